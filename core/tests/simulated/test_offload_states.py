"""`engine.offload_states` and `reload_states` on devices with memory of their own."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError, StateError
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
OFFLOADED = {"offload_param": {"device": "cpu"}}
STATES = ("optim_states", "hp_params", "lp_params")


class Net(torch.nn.Module):
    """Weights above and below the threshold of stage 3, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)
        self.last = torch.nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.frozen(self.first(x).tanh())).float().square().mean()


def create_engine(stage, precision, **section):
    torch.manual_seed(0)
    stage3 = {"stage3_param_persistence_threshold": 100}
    zero = {**stage3, **section}
    return make_engine(Net(), stage, gradient_accumulation_steps=2, zero_optimization=zero, **PRECISIONS[precision])


def micro_step(engine, number):
    generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    loss = engine(torch.randn(4, 64, generator=generator).to(engine.device, dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


def devices(engine):
    return [{device.type for device in get_state_devices(engine, state)} for state in STATES]


def unbroken(stage, precision, section):
    engine = create_engine(stage, precision, **section)
    losses = [micro_step(engine, number) for number in range(6)]
    engine.destroy()
    return losses


def moved(stage, precision, section, non_blocking):
    """Everything moves away and back after a step, and in the middle of an accumulation."""
    engine = create_engine(stage, precision, **section)
    losses, x = [], torch.ones(1, 64).to(engine.device, next(engine.module.parameters()).dtype)
    for number in range(6):
        losses.append(micro_step(engine, number))
        if number in (1, 2):
            before = devices(engine)
            held = get_accelerator().memory_allocated()
            engine.offload_states(non_blocking=non_blocking)
            assert devices(engine) == [{"cpu"}] * 3
            assert get_accelerator().memory_allocated() < held / 4 or section
            calls = {
                "forward": lambda: engine(x),
                "backward": lambda: engine.backward(x.sum().requires_grad_()),
                "save_checkpoint": lambda: engine.save_checkpoint("nowhere"),
                "safe_get": lambda: deepspeed.utils.safe_get_full_fp32_param(engine.module.first.weight),
                "offload_states": engine.offload_states,
            }
            for asked, call in calls.items():
                with pytest.raises(StateError, match=rf"{asked}.*call engine\.reload_states\(\) first"):
                    call()
            engine.reload_states(non_blocking=non_blocking)
            assert devices(engine) == before
    engine.offload_states()
    engine.destroy()  # a plain model is left
    assert engine.module.first.weight.shape == (64, 64)
    assert engine.module.first.weight.isfinite().all()
    return losses


@pytest.mark.parametrize(
    ("stage", "precision", "section", "non_blocking"),
    swept(
        [
            (stage, precision, section, non_blocking)
            for stage in (1, 2, 3)
            for precision in PRECISIONS
            for section in ({}, {"offload_optimizer": {"device": "cpu"}}, OFFLOADED)
            if stage == 3 or section is not OFFLOADED
            for non_blocking in (False, True)
        ],
        lambda stage, precision, section, non_blocking: (
            section in ({}, OFFLOADED) and (precision == "bf16") is (stage != 2) and non_blocking is (stage == 3)
        ),
    ),
)
def test_training_goes_on_as_if_nothing_had_moved(sim_ranks, stage, precision, section, non_blocking):
    expected = sim_ranks(unbroken, stage, precision, section)
    assert sim_ranks(moved, stage, precision, section, non_blocking) == expected


def evaluate_meanwhile():
    engine = create_engine(3, "bf16")
    losses = [micro_step(engine, number) for number in range(2)]
    x = torch.ones(1, 64, device=engine.device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = engine(x).item()
    include = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
    engine.optimizer.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=True)
    assert [each == {"cpu"} for each in devices(engine)] == [True, True, False]
    with torch.no_grad():
        assert engine(x).item() == expected
    engine.module.zero_grad()
    with pytest.raises(StateError, match=r"backward: found hp_params, optim_states in host memory since"):
        engine.backward(engine(x))
    engine.reload_states()
    losses += [micro_step(engine, number) for number in range(2, 6)]
    engine.destroy()
    return losses


def test_a_forward_works_while_its_weights_are_there(sim_ranks):
    assert sim_ranks(evaluate_meanwhile) == sim_ranks(unbroken, 3, "bf16", {})


def gathers_meanwhile():
    engine = create_engine(3, "fp32")
    weight = engine.module.first.weight
    engine.offload_states(include=["lp_params"])
    with pytest.raises(
        StateError, match=r"first\.weight.*moved to host memory by offload_states\(\); call engine\.rel"
    ):
        deepspeed.zero.GatheredParameters(weight).__enter__()
    engine.reload_states()
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.shape == (64, 64)
    engine.destroy()


def test_weights_that_moved_cannot_be_gathered(sim, sim_ranks):
    for ranks in (sim, sim_ranks):
        ranks(gathers_meanwhile)


def refused():
    engine = make_engine(Net(), 0)
    with pytest.raises(ConfigError, match=r"offload_states: zero_optimization\.stage is 0"):
        engine.offload_states()
    engine.destroy()
    engine = create_engine(2, "fp32")
    with pytest.raises(ConfigError, match="device is 'nvme'; states move to \"cpu\" only"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ConfigError, match="device is 'cuda'; states move to \"cpu\" only"):
        engine.offload_states(device="cuda")
    for include in ("optim_states", ["optim_states", "weights"]):
        with pytest.raises(ConfigError, match="include is .*; give a list of any of optim_states, hp_params"):
            engine.offload_states(include=include)
    engine.reload_states()  # nothing has moved
    engine.destroy()
    with pytest.raises(StateError, match="offload_states: the engine was destroyed"):
        engine.offload_states()


def test_what_cannot_move_is_refused(sim):
    sim(refused)
