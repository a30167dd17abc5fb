"""Two ranks on two simulated devices: what the cpu accelerator computes, and nothing that it alone would allow."""

import contextlib
import os
from itertools import product
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import all_gather_object, all_reduce
from deepspeed.comm.torch_group import TorchGroup
from deepspeed.testing.models import make_engine, tiny_gpt
from deepspeed.testing.tiers import swept
from deepspeed.zero.offload import buffers
from deepspeed.zero.unit import synchronize_module

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": FP16}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
STAGE3 = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
every_stage = pytest.mark.parametrize("stage", [0, 1, 2])
every_schedule = pytest.mark.parametrize("schedule", ["late", "early"])
MIXES = [("fp32", "late"), ("fp32", "early"), ("bf16", "early"), ("fp16", "late")]


class Net(torch.nn.Module):
    """A buffer, a scalar and a parameter that is never used; 2 ranks do not divide it."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7, bias=False)  # a norm takes a bias away, and Adam makes much of nothing
        self.norm = torch.nn.BatchNorm1d(7)
        self.unused = torch.nn.Linear(2, 2)
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))) * self.gain).float().square().mean()


def create_engine(stage, precision, model=Net, clipping=0.0, accumulation=2, **section):
    torch.manual_seed(0)
    return make_engine(
        model(),
        stage,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping,
        optimizer={"type": "AdamW", "params": {"lr": 0.02}},
        zero_optimization={"reduce_bucket_size": 64, **STAGE3, **section},
        **PRECISIONS[precision],
    )


def batches(steps, width=5):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(4, width, generator=generator) for _ in range(2 * steps)]


def run(engine, steps):
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for x in batches(steps):
        loss = engine(x.to(engine.device, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(stage, precision, section, changes, schedule=None):
    if schedule is not None:
        torch.sim.set_schedule(schedule)
    engine = create_engine(stage, precision, **section, **changes)
    losses = run(engine, 3)
    weights = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    if schedule is not None:
        torch.sim.set_schedule("late")
    return losses, weights, float(norm), str(engine.device)


_results = {}


def result(ranks, stage, precision, section=(), schedule=None, **changes):
    key = id(ranks), stage, precision, str(section), schedule, str(changes)
    if key not in _results:
        _results[key] = ranks(train, stage, precision, dict(section), changes, schedule)
    return _results[key]


def assert_same(one, other, tolerance=0.0):
    for (losses, weights, norm, _), (losses_2, weights_2, norm_2, _) in zip(one, other, strict=True):
        assert losses == pytest.approx(losses_2, rel=tolerance, abs=tolerance)
        assert norm == pytest.approx(norm_2, rel=max(tolerance, 1e-6))  # in fp64 on the host
        for name, value in weights.items():
            torch.testing.assert_close(value, weights_2[name], rtol=tolerance, atol=tolerance)


# ----- collectives ---------------------------------------------------------------------------------------------------


def exchanges():
    accelerator = get_accelerator()
    rank = dist.get_rank()
    accelerator.set_device(rank)
    told = {"backend": dist.get_backend()}
    x = torch.full((4,), 1.0 + rank, device="sim")
    work = dist.all_reduce(x, async_op=True)
    told["before"] = x.tolist()
    work.wait()
    told["after"] = x.tolist()
    parts = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(parts, torch.full((2,), float(rank), device="sim"))
    told["gathered"] = parts.tolist()
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device="sim"))
    told["scattered"] = part.tolist()
    dist.broadcast(x.fill_(rank), 1)
    told["broadcast"] = x.tolist()
    dist.barrier()
    objects = [None, None]
    all_gather_object(objects, {"rank": rank})
    told["objects"] = objects
    try:
        all_reduce(torch.ones(1))
    except RuntimeError as error:
        told["host"] = str(error)
    return told


def test_exchanges_of_device_memory(sim_ranks):
    told = sim_ranks(exchanges)
    for rank, answer in enumerate(told):
        assert answer["backend"] == "simccl"
        assert answer["before"] == [1.0 + rank] * 4  # nobody waited yet
        assert answer["after"] == [3.0] * 4
        assert answer["gathered"] == [0.0, 0.0, 1.0, 1.0]
        assert answer["scattered"] == [[0.0, 2.0], [4.0, 6.0]][rank]
        assert answer["broadcast"] == [1.0] * 4
        assert answer["objects"] == [{"rank": 0}, {"rank": 1}]
        assert "only those of sim" in answer["host"]


# ----- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "precision", "schedule"),
    swept(
        [(stage, *mix) for stage, mix in product((0, 1, 2, 3), MIXES)],
        lambda stage, *mix: stage >= 2 or (stage, *mix) in ((0, "fp32", "late"), (1, "bf16", "early")),
    ),
)
def test_losses_and_weights_are_those_of_the_cpu(sim_ranks, cpu_ranks, stage, precision, schedule):
    simulated = result(sim_ranks, stage, precision, schedule=schedule)
    assert [device for *_, device in simulated] == ["sim:0", "sim:1"]
    assert_same(simulated, result(cpu_ranks, stage, precision), 0.0 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("stage", "section"), [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"mics_shard_size": 1})], ids=str
)
def test_clipping_is_that_of_the_cpu(sim_ranks, cpu_ranks, stage, section):
    simulated = result(sim_ranks, stage, "fp32", section, clipping=0.05)
    assert_same(simulated, result(cpu_ranks, stage, "fp32", section, clipping=0.05), 1e-6)


@pytest.mark.parametrize(
    ("stage", "precision", "schedule"),
    swept(
        [(stage, *mix) for stage, mix in product((1, 2), MIXES)],
        lambda stage, precision, schedule: (stage == 2) is (schedule == "late" or precision == "fp16"),
    ),
)
def test_offload_changes_nothing(sim_ranks, stage, precision, schedule):
    # of several backwards stage 2 adds the sums of the ranks here, and their gradients there
    offloaded = result(sim_ranks, stage, precision, OFFLOAD, schedule, accumulation=1)
    assert_same(offloaded, result(sim_ranks, stage, precision, accumulation=1))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["ordered", "none"])
def test_offload_relies_on_what_the_device_orders(sim_ranks, stage, schedule):
    offloaded = result(sim_ranks, stage, "fp32", OFFLOAD, schedule, accumulation=1)
    assert_same(offloaded, result(sim_ranks, stage, "fp32", accumulation=1))


@pytest.mark.parametrize("stage", [1, 2])
@every_schedule
def test_offload_accumulates_and_clips_as_without(sim_ranks, stage, schedule):
    offloaded = result(sim_ranks, stage, "fp32", OFFLOAD, schedule, clipping=0.05)
    assert_same(offloaded, result(sim_ranks, stage, "fp32", clipping=0.05), 1e-6)


PIPELINED = {"device": "nvme", "pipeline_read": True, "pipeline_write": True}
PARTS = {
    "half of it": {"device": "cpu", "ratio": 0.5},
    "nvme": PIPELINED,
    "half of it on nvme": {**PIPELINED, "ratio": 0.5},
}


@pytest.mark.parametrize(
    ("part", "stage", "precision"),
    swept(
        product(PARTS, (1, 2, 3), ("fp32", "bf16")),
        lambda part, stage, precision: (
            (stage, precision) == {"half of it": (2, "fp32"), "nvme": (3, "bf16")}.get(part, (1, "fp32"))
        ),
    ),
)
def test_offload_of_a_part_and_to_swap_files_changes_nothing(sim_ranks, tmp_path, part, stage, precision):
    section = {"offload_optimizer": {**PARTS[part], "nvme_path": str(tmp_path)}, "reduce_bucket_size": 16}
    offloaded = sim_ranks(train_with_files, stage, precision, section)
    without = {"reduce_bucket_size": 16}
    assert_same(offloaded, result(sim_ranks, stage, precision, without, accumulation=1), 1e-6)


def train_with_files(stage, precision, section):
    os.environ["DS_OPS_DISABLE"] = "cpu_adam,fused_adam"  # and not async_io
    try:
        return train(stage, precision, section, {"accumulation": 1}, "late")
    finally:
        os.environ["DS_OPS_DISABLE"] = "all"


@contextlib.contextmanager
def copying_without_waiting(lane):
    with lane._accelerator.stream(lane._stream):
        yield


# A wait of the offload left out: the place, and what stands there instead; on how many ranks nothing else waits there.
FAULTS = {
    "a sum leaves before it is there": (1, buffers.CopyLane, "copying", copying_without_waiting),
    "weights are used before they are there": (2, buffers.Mark, "wait", lambda mark: None),
    "the host reads before a sum has arrived": (2, buffers.Mark, "wait_on_host", lambda mark: None),
}


def train_with(fault, schedule):
    _, owner, name, instead = FAULTS[fault]
    with mock.patch.object(owner, name, instead):
        return train(2, "fp32", OFFLOAD, {}, schedule)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_seen(sim, sim_ranks, fault):
    ranks = {1: sim, 2: sim_ranks}[FAULTS[fault][0]]
    right = result(ranks, 2, "fp32", OFFLOAD)[0][0]
    seen = [ranks(train_with, fault, schedule)[0][0] for schedule in ("late", "early")]
    assert any(losses != right for losses in seen)


class OnAnotherStream:
    """A collective whose result arrives on a side stream, for which nothing waits."""

    def __init__(self, work):
        self._work = work

    def poll(self):
        return self._work.poll()

    def wait(self):
        accelerator = get_accelerator()
        with accelerator.stream(accelerator.Stream()):
            self._work.wait()


def train_without_waiting_for(collective, schedule):
    """Stage 3; the parameters are gathered for each forward and each backward."""
    issue = getattr(TorchGroup, collective)

    def issue_only(*args, **kwargs):
        return OnAnotherStream(issue(*args, **kwargs))

    with mock.patch.object(TorchGroup, collective, issue_only):
        return train(3, "fp32", {}, {}, schedule)[0]


# "early" runs the work of a side stream at once
@pytest.mark.parametrize(("schedule", "is_right"), [("late", False), ("early", True)])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_missing_wait_of_stage_3_is_seen(sim_ranks, collective, schedule, is_right):
    right = [losses for losses, *_ in result(sim_ranks, 3, "fp32")]
    found = sim_ranks(train_without_waiting_for, collective, schedule)
    assert [one == other for one, other in zip(found, right, strict=True)] == [is_right] * 2


def train_gpt(stage):
    engine = create_engine(stage, "fp32", tiny_gpt)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 64, (4, 17), generator=generator).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_a_gpt_trains_as_on_the_cpu(sim_ranks, cpu_ranks):
    losses = sim_ranks(train_gpt, 2)
    assert losses == cpu_ranks(train_gpt, 2)


# ----- weights in host memory, as stage 3 gets them ------------------------------------------------------------------


def weights_of_the_first_rank():
    deepspeed.init_distributed()
    torch.manual_seed(dist.get_rank())
    module = torch.nn.Linear(3, 2)
    synchronize_module(module)
    return module.weight.detach()


def test_weights_in_host_memory_are_synchronized_through_the_device(sim_ranks):
    first, *others = sim_ranks(weights_of_the_first_rank)
    assert others
    assert all(torch.equal(first, other) for other in others)


# ----- checkpoints ---------------------------------------------------------------------------------------------------


def save(folder, stage, section, precision="bf16"):
    engine = create_engine(stage, precision, **section)
    run(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    losses = run(engine, 1)
    engine.destroy()
    return losses


def resume(folder, stage, section, precision="bf16"):
    engine = create_engine(stage, precision, **section)
    engine.load_checkpoint(folder)
    losses = run(engine, 1)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("stage", "section"), swept(product((1, 2), ({}, OFFLOAD)), lambda stage, section: (stage == 2) is bool(section))
)
def test_a_checkpoint_is_resumed_here_and_on_the_cpu(sim_ranks, cpu_ranks, tmp_path, stage, section):
    expected = sim_ranks(save, str(tmp_path), stage, section)
    assert sim_ranks(resume, str(tmp_path), stage, section) == expected
    on_cpu = cpu_ranks(resume, str(tmp_path), stage, section)
    assert on_cpu[0] == pytest.approx(expected[0], rel=1e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_the_cpu_is_resumed_on_the_device(sim_ranks, cpu_ranks, tmp_path, stage):
    expected = cpu_ranks(save, str(tmp_path), stage, {})
    assert sim_ranks(resume, str(tmp_path), stage, {})[0] == pytest.approx(expected[0], rel=1e-2)


@every_stage
def test_in_fp32_a_checkpoint_moves_both_ways_without_a_difference(sim_ranks, cpu_ranks, tmp_path, stage):
    for origin, goal in ((sim_ranks, cpu_ranks), (cpu_ranks, sim_ranks)):
        folder = str(tmp_path / str(origin is cpu_ranks))
        expected = origin(save, folder, stage, {}, "fp32")
        assert goal(resume, folder, stage, {}, "fp32") == expected
