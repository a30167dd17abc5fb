"""The events of a step have DeepSpeed's documented names."""

from deepspeed.monitor.monitor import step_events


def test_everything_that_is_documented():
    times = {"forward": 1.0, "backward": 5.0, "backward_inner": 3.0, "backward_allreduce": 2.0, "step": 4.0}
    assert step_events(64, loss=0.5, lr=0.1, loss_scale=8.0, times_ms=times) == [
        ("Train/Samples/train_loss", 0.5, 64),
        ("Train/Samples/lr", 0.1, 64),
        ("Train/Samples/loss_scale", 8.0, 64),
        ("Train/Samples/elapsed_time_ms_forward", 1.0, 64),
        ("Train/Samples/elapsed_time_ms_backward", 5.0, 64),
        ("Train/Samples/elapsed_time_ms_backward_inner", 3.0, 64),
        ("Train/Samples/elapsed_time_ms_backward_allreduce", 2.0, 64),
        ("Train/Samples/elapsed_time_ms_step", 4.0, 64),
    ]


def test_what_is_not_known_is_left_out():
    assert step_events(1) == []
    assert step_events(1, loss=0.0, lr=0.0) == [("Train/Samples/train_loss", 0.0, 1), ("Train/Samples/lr", 0.0, 1)]
