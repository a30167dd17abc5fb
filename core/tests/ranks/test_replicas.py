"""Copies of weights are compared before updates: `enable_sanity_checks`, `watch.compare_weights_every`."""

import copy

import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.moe.layer import MoE
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero.param_unit import unit_of
from deepspeed.zero.replicas import _digests
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2)

    def forward(self, x):
        return self.moe(self.first(x))[0]


def train(stage, edited, checks=True, bf16=False, experts=False):
    """What two steps raise on this rank; between them rank 1 alone edits the parameter `edited`."""
    torch.manual_seed(0)
    net = Experts() if experts else nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    keys = {"zero_optimization": {"enable_sanity_checks": checks, "stage3_param_persistence_threshold": 100}}
    engine = make_engine(net, stage, bf16={"enabled": bf16}, **keys)
    raised = None
    for step in range(3):
        x = torch.ones(4, 8, dtype=torch.bfloat16 if bf16 else None)
        engine.backward(engine(x).float().square().mean())
        if step == 1 and edited and engine.global_rank == 1:
            with torch.no_grad():
                dict(engine.module.named_parameters())[edited].view(-1)[3].add_(0.25)
        try:
            engine.step()
        except StateError as error:
            raised = str(error)
            break
    engine.destroy()
    return raised


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_one_rank_changed_ends_all_ranks(stage):
    for raised in run_ranks(2, train, stage, "1.bias", True, stage == 2):
        assert "enable_sanity_checks: the parameter 1.bias must have the same values" in raised
        assert "and rank 1 differs from rank 0" in raised


def test_without_the_key_nothing_is_compared():
    assert run_ranks(2, train, 1, "1.bias", False) == [None, None]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equal_ranks_pass_with_experts_and_sharded_parameters(stage):
    assert run_ranks(2, train, stage, None, True, False, stage < 3) == [None, None]


class Net(nn.Module):
    """Large weights, which stage 3 shards, small ones, which it does not, and one that does not train."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.last.bias.requires_grad = False

    def forward(self, x):
        return self.last(self.first(self.norm(x)))


def flip(value):
    """Turn the lowest bit of an element over; nothing counts it as a change."""
    bits = value.data.view(-1).view({2: torch.int16, 4: torch.int32}[value.itemsize])
    bits[1] ^= 1


def copies_of(module, at):
    """The weight called `at`; of one that is sharded the shard, or with hpZ its part of the second copy."""
    param = module.get_parameter(at)
    return param if unit_of(param) is None else unit_of(param).kept_tensors()[-1]


def watch(stage, *, at=None, every=2, flipped_before=4, flipping=1, num_steps=5, **keys):
    """The losses of some steps, and what they raised; the rank `flipping` flips a bit before one of them."""
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 100, **keys.pop("zero_optimization", {})}
    engine = make_engine(Net(), stage, watch={"compare_weights_every": every}, zero_optimization=zero, **keys)
    losses, raised = [], None
    for step in range(1, num_steps + 1):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + engine.mesh.rank("dp")))
        loss = engine(x.bfloat16() if keys.get("bf16") else x).float().square().mean()
        engine.backward(loss)
        if at and step == flipped_before and engine.global_rank == flipping:
            flip(copies_of(engine.module, at))
        try:
            engine.step()
        except StateError as error:
            raised = step, str(error)
            break
        losses.append(loss.item())
    engine.destroy()
    return losses, raised


@pytest.mark.parametrize(
    ("stage", "at", "flipped_before"),
    [
        (0, "first.weight", 3),  # the next comparison is a step later
        (1, "first.weight", 4),
        (2, "norm.bias", 4),
        (2, "last.bias", 3),  # frozen: no update gives it the values of another rank
        (3, "norm.bias", 4),
        (3, "last.bias", 3),
    ],
)
def test_a_bit_of_one_rank_is_named_on_all_at_the_next_comparison(stage, at, flipped_before):
    first, second = run_ranks(2, watch_at, stage, at, flipped_before)
    for _, raised in (first, second):
        step, text = raised
        assert step == 4
        assert f"watch.compare_weights_every: the parameter {at} must have the same values" in text
        assert "and rank 1 differs from rank 0" in text


def watch_at(stage, at, flipped_before, keys=None, flipping=1):
    return watch(stage, at=at, flipped_before=flipped_before, flipping=flipping, **(keys or {}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equal_weights_pass_and_losses_keep_every_bit(stage):
    compared, plain = (run_ranks(2, watch_every, stage, every) for every in (1, 0))
    assert compared == plain
    assert all(raised is None for _, raised in compared)


def watch_every(stage, every):
    return watch(stage, every=every)


HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
BOTH_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("stage", "keys"), swept([(0, {}), (2, HOST), (3, HOST), (3, BOTH_HOST)], lambda stage, keys: stage != 2)
)
def test_bf16_and_offload(stage, keys):
    keys = {"bf16": {"enabled": True}, **keys}
    assert [raised for _, raised in run_ranks(2, watch_at, stage, None, 4, keys)] == [None, None]
    for _, raised in run_ranks(2, watch_at, stage, "norm.bias", 4, keys):
        assert raised is not None
        assert raised[0] == 4
        assert "parameter norm.bias" in raised[1]


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_copies_of_shards(key):
    keys = {"zero_optimization": {key: 2}}
    assert [raised for _, raised in run_ranks(4, watch_at, 3, None, 4, keys)] == [None] * 4
    for _, raised in run_ranks(4, watch_at, 3, "first.weight", 4, keys, 3):
        assert "parameter first.weight (a shard" in raised[1]
        assert "and rank 3 differs from rank 1" in raised[1]


def test_the_majority_is_believed():
    for _, raised in run_ranks(4, watch_at, 0, "first.weight", 4, None, 0):
        assert "and rank 0 differs from rank 1" in raised[1]


def test_undivided_weights_of_tensor_parallel_ranks():
    keys = {"tensor_parallel": {"autotp_size": 2, "partition_config": PLAN}, "train_micro_batch_size_per_gpu": 4}
    for stage in (0, 1):
        assert [raised for _, raised in run_ranks(2, watch_at, stage, None, 4, keys)] == [None, None]
        for _, raised in run_ranks(2, watch_at, stage, "norm.weight", 4, keys):
            assert "parameter norm.weight" in raised[1]
            assert "and rank 1 differs from rank 0" in raised[1]


PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*first\.weight$"], "partition_type": "column"},
        {"patterns": [r".*last\.weight$"], "partition_type": "row"},
    ],
}


def ask_otherwise():
    with pytest.raises(ConfigError) as caught:
        make_engine(nn.Linear(2, 2), watch={"compare_weights_every": 1 + torch.distributed.get_rank()})
    return str(caught.value)


def test_ranks_that_ask_for_other_periods():
    for text in run_ranks(2, ask_otherwise):
        assert "watch must be the same on all ranks" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("start", [0, 1])
def test_every_bit_counts_in_a_digest(dtype, start):
    value = torch.arange(300).to(dtype)[start:]
    others = []
    for bit in range(8 * value.itemsize):
        for place in (0, 7, len(value) - 1):
            other = value.clone()
            other.view(torch.uint8)[place * value.itemsize + bit // 8] ^= 1 << bit % 8
            others.append(other)
    signs = value.clone()
    signs.view(torch.uint8)[value.itemsize - 1 :: value.itemsize] ^= 128  # two such bits add up to nothing in many sums
    swapped = value.flip(0)
    digests = _digests([value, copy.deepcopy(value), signs, swapped, *others])
    assert digests[0] == digests[1]
    assert len(set(digests)) == len(digests) - 1
