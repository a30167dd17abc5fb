"""Error feedback of gradients in int4 (LoCo) on real ranks: its formulas, what it gains, and when errors are dropped.

unit/zero/test_quantized.py has the blocks themselves.
"""

from itertools import pairwise

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.utils import safe_get_full_grad
from torch import nn

GRADIENTS = {"zero_quantized_gradients": True}
LOCO = {**GRADIENTS, "zeropp_loco_param": {"err_beta": 0.75, "reset_T": 4}}
#: half a scale, and what fp32 adds to it; per largest element of a block
INT4 = (0.5 + 2**-15) / 7


class Dot(nn.Module):
    """Has x as the gradient of its weight, whatever the weight is."""

    def __init__(self, numel=1001):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x):
        return (self.weight * x).sum()


def create_dot(zero, **keys):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    return make_engine(Dot(), zero_optimization=zero, optimizer={"type": "SGD", "params": {"lr": 1}}, **keys)


def gradient(rank, number, numel=1001):
    """The gradient of one micro-batch. Blocks differ in size; the sums over ranks and batches are not near zero."""
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + number))
    return (torch.sin(torch.arange(numel) + rank) + 0.1 * noise) * torch.logspace(-2, 1, numel)


def reduced(engine, *numbers):
    """The gradient that the step gets of micro-batches of these numbers; then makes the step."""
    for number in numbers:
        x = gradient(dist.get_rank(), number) if isinstance(number, int) else number
        engine.backward(engine(x.to(engine.module.weight.dtype)))
        if number is not numbers[-1]:
            engine.step()
    found = safe_get_full_grad(engine.module.weight)
    engine.step()
    return found


def rounded(x, bits):
    """What arrives of x: by blocks of 256, to the nearest multiple of the scale."""
    most = 2 ** (bits - 1) - 1
    blocks = []
    for block in x.split(256):
        scale = (block.abs().max() * (1 / most)).clamp_min(torch.finfo(torch.float32).tiny)
        blocks.append((block * (1 / scale)).round().clamp(-most, most) * scale)
    return torch.cat(blocks)


def simulated(world_size, num_steps, num_micros, beta, reset_steps, adds_first=False):
    """The gradients of each step, of all ranks in one process: LoCo's formulas, part by part.

    Args:
        adds_first: each rank adds its micro-batches up, and one reduction follows; else one follows each of them.
    """
    shard = -(-1001 // (2 * world_size)) * 2
    errors = [torch.zeros(world_size, shard) for _ in range(world_size)]
    for step in range(num_steps):
        total = torch.zeros(world_size, shard)
        numbers = list(range(num_micros * step, num_micros * (step + 1)))
        for together in [numbers] if adds_first else [[number] for number in numbers]:
            arrived = torch.zeros(world_size, shard)
            for rank in range(world_size):
                own = sum(gradient(rank, number) / num_micros * (1 / world_size) for number in together)
                own = torch.nn.functional.pad(own, (0, world_size * shard - 1001)).view(world_size, shard)
                for part in range(world_size):
                    wanted = errors[rank][part] + own[part]
                    sent = rounded(wanted, 4)
                    arrived[part] += sent
                    error = errors[rank][part] * beta + (wanted - sent) * (1 - beta)
                    errors[rank][part] = rounded(error, 8)
            total += arrived
        yield total.view(-1)[:1001]
        if (step + 1) % reset_steps == 0:
            for error in errors:
                error.zero_()


def loco_job(stage, num_steps, num_micros):
    engine = create_dot({**LOCO, "stage": stage}, gradient_accumulation_steps=num_micros)
    batches = torch.arange(num_steps * num_micros).view(num_steps, num_micros).tolist()
    return [reduced(engine, *numbers) for numbers in batches]


@pytest.mark.parametrize(
    ("stage", "world_size", "num_micros"), [(3, 2, 1), (3, 3, 1), (3, 2, 2), (1, 3, 1), (1, 2, 2), (2, 3, 2)]
)
def test_error_feedback_is_that_of_plain_torch(stage, world_size, num_micros):
    expected = list(simulated(world_size, 6, num_micros, 0.75, 4, adds_first=stage == 1))
    for found in run_ranks(world_size, loco_job, stage, 6, num_micros):
        for step, (own, wanted) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-7, msg=lambda text, step=step: f"{step}: {text}")


def mean_job(zero, nums_steps):
    """The largest error of the mean gradient over the first steps, over the largest of its block."""
    engine = create_dot(zero)
    exact, found, errors = 0, 0, []
    for step in range(max(nums_steps)):
        exact += sum(gradient(rank, step).double() for rank in range(2)) / 2
        found += reduced(engine, step).double()
        if step + 1 in nums_steps:
            missed = ((found - exact) / (step + 1)).split(256)
            errors.append(max((a.norm() / b.norm()).item() for a, b in zip(missed, (exact / (step + 1)).split(256))))
    return errors


def test_errors_of_the_mean_fall_with_feedback_and_stay_without():
    loco = {**GRADIENTS, "zeropp_loco_param": {}}
    plain, found = (run_ranks(2, mean_job, zero, (1, 8, 64))[0] for zero in (GRADIENTS, loco))
    assert found[0] == plain[0], "the first step has nothing to make up for"
    assert found[0] > 2 * found[1] > 10 * found[2]
    assert plain[2] > 5 * found[2]


def without_errors_job(event, folder, zero):
    """What is reduced after an event which leaves no errors, and what a new engine reduces; then in a second step."""
    keys = {}
    if event in ("overflow", "raise"):
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        keys["fp16"] = {**fp16, "loss_scale_window": 3 if event == "raise" else 1000}
    engine = create_dot(zero, **keys)
    first = [reduced(engine, number) for number in (7, 8)]
    assert engine.sharding.options.stage.held_bytes >= 1001
    reduced(engine, 9)
    if event == "overflow":
        bad = gradient(0, 1)
        bad[700] = torch.inf
        reduced(engine, bad if dist.get_rank() == 0 else gradient(1, 1) * 1000)
        assert not engine.was_step_applied()
        keys["fp16"]["initial_scale_power"] = 3
    elif event == "raise":
        assert engine.optimizer.cur_scale == 2**5
        keys["fp16"]["initial_scale_power"] = 5
    elif event == "load":
        engine.save_checkpoint(folder)
        reduced(engine, 9)
        engine.load_checkpoint(folder)
    elif event == "reset":
        reduced(engine, 9)
    found = [reduced(engine, number) for number in (7, 8)]
    new = create_dot(zero, **keys)
    return first, found, [reduced(new, number) for number in (7, 8)]


def twice_job(stage):
    """Two backwards in one step, each of which reduces: what the first has left in the buffer is reduced again."""
    engine = create_dot({**GRADIENTS, "stage": stage})
    for number in range(2):
        engine.backward(engine(gradient(dist.get_rank(), number)))
    return safe_get_full_grad(engine.module.weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_reduction_of_a_step_rounds_by_half_a_scale(stage):
    exact = sum(gradient(rank, number) for rank in range(2) for number in range(2)) / 2
    for found in run_ranks(2, twice_job, stage):
        for start, stop in pairwise((0, 256, 502, 758, 1001)):  # blocks of shards of 502
            own, wanted = found[start:stop], exact[start:stop]
            assert bool(((own - wanted).abs() <= 2 * wanted.abs().max() * INT4).all())


def added_job():
    """A group that is added trains with the errors of the others, which stay."""
    model = nn.ModuleList([Dot(), Dot(33)])
    model.forward = lambda x: model[0](x) + model[1](x[:33])
    model[1].requires_grad_(False)
    zero = {"stage3_param_persistence_threshold": 0, **LOCO}
    engine = make_engine(model, 3, zero_optimization=zero, optimizer={"type": "SGD", "params": {"lr": 1}})
    found = []
    for number in range(3):
        if number == 1:
            model[1].requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model[1].parameters())})
        engine.backward(engine(gradient(dist.get_rank(), number)))
        found.append([safe_get_full_grad(each.weight) for each in model[: 1 + (number > 0)]])
        engine.step()
    return found


def test_errors_stay_when_a_group_is_added():
    for found in run_ranks(2, added_job):
        for step, expected in enumerate(simulated(2, 3, 1, 0.75, 4)):
            torch.testing.assert_close(found[step][0], expected, rtol=1e-6, atol=1e-7)
        assert [len(each) for each in found] == [1, 2, 2]


@pytest.mark.parametrize(
    ("event", "stage"),
    [("overflow", 3), ("overflow", 1), ("raise", 2), ("load", 3), ("load", 2), ("reset", 3), ("", 3)],
)
def test_what_leaves_no_errors(event, stage, tmp_path):
    """Of `Dot` a gradient does not depend on weights, so that what differs are errors."""
    loco = {"reset_T": 4 if event == "reset" else 100}
    zero = {**GRADIENTS, "zeropp_loco_param": loco, "stage": stage}
    for first, found, new in run_ranks(2, without_errors_job, event, str(tmp_path), zero):
        assert all(map(torch.equal, found, new)) == bool(event)
        assert event in ("overflow", "raise") or all(map(torch.equal, first, new))
