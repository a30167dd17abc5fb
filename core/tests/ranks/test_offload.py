"""Offload to a separate host memory on two ranks: late copies, single parameters, checkpoints.

The cpu accelerator's memory is the host's; here `HostPlacement.is_needed` says yes all the same, and its streams are
those of `LateCopies`: a copy on a side stream is made at the last moment that an event allows. What does not wait for
it reads old values, and a buffer that is written before its copy is done spoils the copy.
"""

import contextlib
import functools
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.engine import sharding
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import OddMLP, make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero import fragments, units
from deepspeed.zero.offload import policy
from deepspeed.zero.offload.host import HostPlacement
from torch import nn
from torch.overrides import TorchFunctionMode

BF16 = {"bf16": {"enabled": True}}
PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
every_stage = pytest.mark.parametrize("stage", [1, 2])


class LateStream:
    def __init__(self, *_, **__):
        self.queue = []
        self.num_done = 0

    def run_to(self, count):
        while self.num_done < count:
            self.queue[self.num_done]()
            self.num_done += 1

    def wait_stream(self, other):
        """What the computation does is done when its call returns."""
        assert other is LateCopies.computation

    def wait_event(self, event):
        event.synchronize()


class LateEvent:
    def record(self, stream):
        self.stream, self.count = stream, len(stream.queue)

    def synchronize(self):
        self.stream.run_to(self.count)

    def query(self):
        return self.stream.num_done >= self.count


class Queueing(TorchFunctionMode):
    """Puts non-blocking copies on a stream."""

    def __init__(self, stream):
        self.stream = stream

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = (tensor.detach() for tensor in args)

            def copy():
                with torch._C.DisableTorchFunction():
                    target.copy_(source)

            self.stream.queue.append(copy)
            return args[0]
        return function(*args, **kwargs)


class LateCopies(PlainAccelerator):
    computation = LateStream()
    Stream, Event = LateStream, LateEvent

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return False

    def current_stream(self, device_index=None):
        return self.computation

    def stream(self, stream):
        return Queueing(stream)


@contextlib.contextmanager
def separate_host_memory():
    """Inside, offload goes to a memory of its own."""
    kept = HostPlacement.is_needed, policy.get_accelerator, sharding.ShardingOptions, units.WIDENED_NUMEL
    HostPlacement.is_needed = staticmethod(lambda device: True)
    policy.get_accelerator = LateCopies
    # several fragments, buckets and batches for the few parameters
    sharding.ShardingOptions = functools.partial(sharding.ShardingOptions, update_numel=12)
    units.WIDENED_NUMEL = 12
    try:
        yield
    finally:
        HostPlacement.is_needed, policy.get_accelerator, sharding.ShardingOptions, units.WIDENED_NUMEL = kept


def create_engine(stage, precision, is_offloaded=True, seed=3, nvme_path=None, **keys):
    torch.manual_seed(seed)
    zero = {"reduce_bucket_size": 10}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
        if nvme_path is not None:
            pipelines = {"pipeline_read": True, "pipeline_write": True}
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme_path, **pipelines}
    with separate_host_memory() if is_offloaded else contextlib.nullcontext():
        engine = make_engine(OddMLP(), stage, zero_optimization=zero, **PRECISIONS[precision], **keys)
    assert engine.sharding.placement.is_offloaded is is_offloaded
    return engine


def loss_of(engine, step):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(4, 5, generator=generator).to(engine.module.gain.dtype)
    return (engine(x).float() - 1.0).square().mean()


def train(engine, steps):
    losses = []
    for step in steps:
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, 10 * step + micro_step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def state_of(engine):
    """What `safe_get_*` give, whole on every rank, by parameter."""
    return {
        name: [
            fragments.safe_get_full_fp32_param(param),
            fragments.safe_get_full_optimizer_state(param, "exp_avg"),
            fragments.safe_get_full_optimizer_state(param, "exp_avg_sq"),
            param.detach().clone(),
        ]
        for name, param in engine.module.named_parameters()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensors in found.items():
        for tensor, other in zip(tensors, expected[name], strict=True):
            assert (tensor is None) is (other is None), name
            assert tensor is None or (torch.equal(tensor, other) and tensor.dtype == other.dtype), name


def assert_close(precision, found, expected):
    """Fragments are cut elsewhere and sums made in another order, so not to the last bit."""
    bound = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **bound)


def late_copies_job(stage, precision, accumulation, nvme_path=None):
    plain = create_engine(stage, precision, False, gradient_accumulation_steps=accumulation, gradient_clipping=0.05)
    late = create_engine(
        stage, precision, nvme_path=nvme_path, gradient_accumulation_steps=accumulation, gradient_clipping=0.05
    )
    stream = late.sharding.placement._lane._stream
    expected, found = train(plain, range(6)), train(late, range(6))
    assert len(stream.queue) > 6 * accumulation, "copies went over the side stream"
    assert stream.num_done == len(stream.queue), "and nothing is left in it after a step"
    assert_close(precision, found, expected)
    assert_close(precision, state_of(late), state_of(plain))


@pytest.mark.parametrize(
    ("world_size", "accumulation", "precision"),
    swept(product((1, 2), (1, 3), PRECISIONS), lambda world, count, _: world == 2 and count == 3),
)
@every_stage
def test_every_copy_is_waited_for(world_size, stage, precision, accumulation):
    run_ranks(world_size, late_copies_job, stage, precision, accumulation)


@pytest.mark.parametrize("precision", swept(PRECISIONS, lambda precision: precision == "bf16"))
@every_stage
def test_every_copy_to_and_from_swap_files_is_waited_for(tmp_path, stage, precision):
    run_ranks(2, late_copies_job, stage, precision, 3, str(tmp_path))


def access_job(stage, precision, is_offloaded, nvme_path=None):
    """The gradient in the middle and at the end of an accumulation, and after it was set; then weight and moments."""
    engine = create_engine(
        stage, precision, is_offloaded, nvme_path=nvme_path, gradient_accumulation_steps=2, gradient_clipping=1.0
    )
    net, seen = engine.module, []
    for step in range(3):
        for micro_step in range(2):
            engine.backward(loss_of(engine, 10 * step + micro_step))
            for param in net.parameters():
                seen.append(fragments.safe_get_full_grad(param))
                for grad in (seen[-1], fragments.safe_get_local_grad(param)):
                    assert grad is None or grad.dtype is torch.float32
            if step == 1 and micro_step == 1:
                wanted = torch.full_like(net.first.weight, 3.0)
                fragments.safe_set_full_grad(net.first.weight, wanted)
                assert torch.equal(fragments.safe_get_full_grad(net.first.weight), wanted)
            if step == 2 and micro_step == 0:  # what is set counts in the sum that follows
                grad = fragments.safe_get_full_grad(net.last.weight)
                fragments.safe_set_full_grad(net.last.weight, torch.zeros_like(grad))
            engine.step()
        seen.append(torch.tensor(engine.get_global_grad_norm()))
    weight = torch.linspace(-1, 1, 21).view(3, 7)
    fragments.safe_set_full_fp32_param(net.last.weight, weight)
    fragments.safe_set_full_optimizer_state(net.last.weight, weight.square(), "exp_avg_sq")
    assert torch.equal(fragments.safe_get_full_fp32_param(net.last.weight), weight)
    assert torch.equal(net.last.weight.detach(), weight.to(net.last.weight.dtype))
    train(engine, [3])
    return seen, state_of(engine)


def compare_access_job(stage, precision, nvme_path=None):
    (seen, state), (expected, expected_state) = (
        access_job(stage, precision, is_offloaded, nvme_path) for is_offloaded in (True, False)
    )
    assert_close(precision, seen, expected)
    assert_close(precision, state, expected_state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_stage
def test_single_parameters_are_the_same(stage, precision):
    run_ranks(2, compare_access_job, stage, precision)


@every_stage
def test_single_parameters_are_the_same_in_swap_files(tmp_path, stage):
    run_ranks(2, compare_access_job, stage, "fp32", str(tmp_path))


def checkpoint_job(stage, precision, saves_offloaded, directory):
    first = create_engine(stage, precision, saves_offloaded)
    train(first, range(3))
    first.save_checkpoint(directory)
    saved = state_of(first)
    second = create_engine(stage, precision, not saves_offloaded, seed=4)
    train(second, range(1))  # has states of its own, which the load replaces
    path, _ = second.load_checkpoint(directory)
    assert path is not None
    assert_same(state_of(second), saved)
    assert_close(precision, train(second, range(3, 6)), train(first, range(3, 6)))
    assert_close(precision, state_of(second), state_of(first))


@pytest.mark.parametrize(
    ("saves_offloaded", "stage", "precision"),
    swept(
        product((True, False), (1, 2), PRECISIONS),
        lambda _, stage, precision: (stage, precision) in ((1, "bf16"), (2, "fp16")),
    ),
)
def test_a_checkpoint_crosses_over(stage, precision, saves_offloaded, tmp_path):
    run_ranks(2, checkpoint_job, stage, precision, saves_offloaded, str(tmp_path))


def weights_only_job(directory):
    """Masters start from the loaded weights, in the host's memory too."""
    first = create_engine(2, "bf16")
    train(first, range(2))
    first.save_checkpoint(directory)
    second = create_engine(2, "bf16", seed=4)
    second.load_checkpoint(directory, load_optimizer_states=False)
    for ours, theirs in zip(second.module.parameters(), first.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(fragments.safe_get_full_fp32_param(ours), theirs.float())


def test_weights_alone(tmp_path):
    run_ranks(2, weights_only_job, str(tmp_path))


def added_group_job(nvme_path):
    """A group that is added later gets its own home."""
    losses = []
    for is_offloaded in (True, False):
        engine = create_engine(2, "fp32", is_offloaded, nvme_path=nvme_path)
        train(engine, range(1))
        extra = nn.Parameter(torch.full((5,), 0.5))
        engine.module.register_parameter("extra", extra)
        engine.optimizer.add_param_group({"params": [extra], "lr": 0.1})
        for step in range(1, 4):
            engine.backward(loss_of(engine, step) + (engine.module(extra).sum() - extra.sum()).square())
            engine.step()
        losses.append(train(engine, range(4, 6)))
        assert (extra.detach() != 0.5).any()
    assert_close("fp32", *losses)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_added_group(tmp_path, device):
    run_ranks(1, added_group_job, str(tmp_path) if device == "nvme" else None)


def given_optimizer_job():
    with separate_host_memory():
        for make in (deepspeed.ops.adam.DeepSpeedCPUAdam, torch.optim.SGD):
            net = OddMLP()
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "zero_force_ds_cpu_optimizer": make is not torch.optim.SGD,
            }
            engine, *_ = deepspeed.initialize(model=net, optimizer=make(net.parameters(), lr=0.1), config=config)
            losses = [train(engine, [0])[0] for _ in range(5)]
            assert losses[-1] < losses[0]


def test_a_given_optimizer_updates_on_the_host():
    run_ranks(1, given_optimizer_job)
