"""TensorBoard, W&B and Comet, through stand-ins of their packages; TensorBoard also through the real one if it is
installed."""

import pytest
import torch
from deepspeed.config.monitor import CometConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor

EVENTS = [("a/loss", torch.tensor(0.5), 4), ("a/lr", 0.1, 4), ("a/loss", 0.25, 8)]


def called(module, what):
    return [arguments for name, arguments in module.calls if name == what]


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def test_tensorboard_writes_scalars_and_flushes(summary_writer):
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path="out", job_name="job"))
    monitor.write_events(EVENTS)
    assert called(summary_writer, "init") == ["out/job"]
    assert called(summary_writer, "add_scalar") == [("a/loss", 0.5, 4), ("a/lr", 0.1, 4), ("a/loss", 0.25, 8)]
    assert len(called(summary_writer, "flush")) == 1
    monitor.write_events(EVENTS[:1], flush=False)
    assert len(called(summary_writer, "flush")) == 1
    monitor.close()
    assert summary_writer.calls[-1] == ("close", ())


def test_tensorboard_itself(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = TensorBoardMonitor(TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    monitor.write_events(EVENTS)
    accumulator = accumulators.EventAccumulator(str(tmp_path / "job"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("a/loss")] == [(4, 0.5), (8, 0.25)]
    monitor.close()


# ---- W&B ------------------------------------------------------------------------------------------------------------


def test_wandb_logs_the_events_of_a_step_together(wandb):
    monitor = WandbMonitor(WandbConfig(enabled=True, group="g", team="t", project="p"))
    monitor.write_events(EVENTS)
    assert called(wandb, "init") == [{"project": "p", "group": "g", "entity": "t"}]
    assert called(wandb, "log") == [({"a/loss": 0.5, "a/lr": 0.1}, 4, None), ({"a/loss": 0.25}, 8, None)]


def test_wandb_steps_ascend(wandb):
    monitor = WandbMonitor(WandbConfig(enabled=True))
    monitor.write_events(EVENTS[::-1])
    assert [step for _, step, _ in called(wandb, "log")] == [4, 8]


def test_wandb_ends_once(wandb):
    monitor = WandbMonitor(WandbConfig(enabled=True))
    monitor.close()
    monitor.close()
    monitor.write_events(EVENTS)
    assert [what for what, _ in wandb.calls] == ["init", "finish"]


# ---- Comet ----------------------------------------------------------------------------------------------------------


def test_comet_gets_what_the_section_says(comet_ml):
    said = {"api_key": "k", "workspace": "w", "project": "p", "experiment_key": "e", "mode": "get", "online": False}
    monitor = CometMonitor(CometConfig(enabled=True, experiment_name="n", **said))
    assert comet_ml.calls == [("start", said), ("set_name", "n")]
    assert monitor.experiment is not None


def test_comet_keeps_its_defaults_where_the_section_is_silent(comet_ml):
    CometMonitor(CometConfig(enabled=True))
    assert comet_ml.calls == [("start", {})]


def test_comet_logs_each_name_once_in_an_interval(comet_ml):
    monitor = CometMonitor(CometConfig(enabled=True, samples_log_interval=10))
    for step in (4, 8, 14, 15, 40):
        monitor.write_events([("loss", torch.tensor(0.5), step)])
    monitor.write_events([("lr", 0.1, 41)])
    assert called(comet_ml, "log_metric") == [("loss", 0.5, 4), ("loss", 0.5, 14), ("loss", 0.5, 40), ("lr", 0.1, 41)]


def test_comet_ends_once(comet_ml):
    monitor = CometMonitor(CometConfig(enabled=True))
    monitor.close()
    monitor.close()
    monitor.write_events(EVENTS)
    assert [what for what, _ in comet_ml.calls] == ["start", "end"]


# ---- all of them ----------------------------------------------------------------------------------------------------

every_service = pytest.mark.parametrize(
    ("monitor_class", "config_class", "stand_in"),
    [
        (TensorBoardMonitor, TensorBoardConfig, "summary_writer"),
        (WandbMonitor, WandbConfig, "wandb"),
        (CometMonitor, CometConfig, "comet_ml"),
    ],
)


@every_service
def test_switched_off_nothing_is_called(request, monitor_class, config_class, stand_in):
    module = request.getfixturevalue(stand_in)
    monitor = monitor_class(config_class())
    monitor.write_events(EVENTS)
    monitor.close()
    assert (module.calls, monitor.enabled) == ([], False)


@every_service
def test_another_rank_calls_nothing(request, another_rank, monitor_class, config_class, stand_in):
    module = request.getfixturevalue(stand_in)
    monitor = monitor_class(config_class(enabled=True))
    monitor.write_events(EVENTS)
    monitor.close()
    assert (module.calls, monitor.enabled) == ([], False)
