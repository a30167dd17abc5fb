"""Loss scales against tables written by hand."""

import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.precision.policy import DynamicLossScaler, LossScaler


def run(scaler, steps):
    """`steps`: '.' a good step, 'x' an overflow. Returns the scale after each."""
    scales = []
    for step in steps.replace(" ", ""):
        scaler.update(overflow=step == "x")
        scales.append(scaler.loss_scale)
    return scales


TABLE = [
    # window, hysteresis, consecutive, steps, scale after each (from 16)
    (3, 1, False, "... ...", [16, 16, 32, 32, 32, 64]),
    (3, 1, False, "..x ...", [16, 16, 8, 8, 8, 16]),
    (2, 1, False, "xx..", [8, 4, 4, 8]),
    (9, 2, False, "xxxx", [16, 8, 4, 2]),
    (9, 3, False, "xxxx", [16, 16, 8, 4]),
    (9, 2, False, "x.x.x", [16, 16, 8, 8, 4]),
    (9, 2, True, "x.x.x", [16, 16, 16, 16, 16]),
    (9, 2, True, "xx.xx", [16, 8, 8, 8, 4]),
    (2, 2, False, "x..xx", [16, 16, 32, 32, 16]),  # raising restores the credit
    (1, 1, False, "..x.", [32, 64, 32, 64]),
]


@pytest.mark.parametrize(("window", "hysteresis", "consecutive", "steps", "scales"), TABLE)
def test_dynamic(window, hysteresis, consecutive, steps, scales):
    scaler = DynamicLossScaler(16, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
    assert run(scaler, steps) == scales


def test_the_scale_stops_at_the_minimum_and_then_training_ends():
    scaler = DynamicLossScaler(16, hysteresis=1, min_scale=5)
    assert run(scaler, "xx") == [8, 5]
    with pytest.raises(StateError, match=r"smallest loss scale \(5, fp16\.min_loss_scale\).*learning rate or use bf16"):
        scaler.update(overflow=True)


def test_at_the_minimum_the_credit_still_counts():
    scaler = DynamicLossScaler(4, hysteresis=2, min_scale=4)
    assert run(scaler, "x") == [4]
    with pytest.raises(StateError):
        scaler.update(overflow=True)


@pytest.mark.parametrize("at", range(9))
def test_state_round_trip_at_any_moment(at):
    steps, options = "x..x.xx..", {"window": 3, "hysteresis": 2}
    first, second = DynamicLossScaler(16, **options), DynamicLossScaler(1, **options)
    run(first, steps[:at])
    second.load_state_dict(first.state_dict())
    assert run(first, steps[at:] + "...x") == run(second, steps[at:] + "...x")


def test_static_stays():
    scaler = LossScaler(128)
    assert run(scaler, ".xx.x") == [128.0] * 5
    assert scaler.overflow is True
    assert not scaler.is_dynamic
    other = LossScaler(1)
    other.load_state_dict(scaler.state_dict())
    assert other.cur_scale == 1.0, "a constant scale is the configuration's, whatever a checkpoint had"


def test_a_half_precision_loss_is_scaled_in_fp32():
    loss = torch.tensor(3.0, dtype=torch.float16)
    scaled = LossScaler(65536).scale(loss)
    assert (scaled.dtype, scaled.item()) == (torch.float32, 196608.0)  # inf in fp16
    assert LossScaler(1.0).scale(loss) is loss


def test_every_skipped_step_is_told_at_the_default_level(lines, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    run(DynamicLossScaler(16, hysteresis=2), "xx")
    assert [text.split("loss scale ")[1] for _, text in lines] == ["16 kept (hysteresis)", "16 -> 8"]
