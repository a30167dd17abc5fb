"""Shards in few bits: how near they come back, how many bytes they take, and which configurations ask for them.

ranks/test_quantized.py sends them.
"""

import re

import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.testing.models import tiny_gpt
from deepspeed.testing.tiers import swept
from deepspeed.zero import quantized
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.quantized import BLOCK_NUMEL, ErrorFeedback, ShardPacking
from deepspeed.zero.unit_groups import UnitRanks
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: less than a block, a block, one element more, several blocks and a rest that is odd
NUMELS = (1, 7, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 5 * BLOCK_NUMEL, 5 * BLOCK_NUMEL + 33)


def numbers(numel, dtype=torch.float32, seed=0):
    """Normal numbers whose size differs by block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.logspace(-3, 2, numel)
    return x.to(dtype)


def bound(x, bits):
    """The largest error of each element: half a scale, 2**-15 of one for fp32's roundings of level and product."""
    largest = torch.cat([block.abs().max().expand(block.numel()) for block in x.float().split(BLOCK_NUMEL)])
    return largest / (2 ** (bits - 1) - 1) * (0.5 + 2**-15)


def packed(x, bits):
    packing = ShardPacking(x.numel(), bits)
    packed_B = torch.empty(packing.num_bytes, dtype=torch.int8)
    packing.pack(x, packed_B)
    return packing, packed_B


def there_and_back(x, bits):
    packing, packed_B = packed(x, bits)
    found = torch.full_like(x, 99)
    packing.unpack(packed_B, found)
    return found


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(
    ("dtype", "bits"),
    swept([(dtype, bits) for dtype in DTYPES for bits in (8, 4)], lambda dtype, bits: dtype is not torch.float16),
)
def test_numbers_come_back_within_half_the_scale_of_their_block(dtype, bits, numel):
    x = numbers(numel, dtype)
    found = there_and_back(x, bits)
    rounding = found.float().abs() * torch.finfo(dtype).eps / 2
    assert bool(((found.float() - x.float()).abs() <= bound(x, bits) + rounding).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_rest_in_int8_are_rounded_once(dtype):
    x = numbers(10_000 * BLOCK_NUMEL + 33, dtype)
    x[:BLOCK_NUMEL] = 0
    packing = ShardPacking(x.numel(), 8)
    packed_B, again_B = (torch.zeros(packing.num_bytes, dtype=torch.int8) for _ in range(2))
    packing.pack(packing.lasting(x), packed_B)
    found, again = torch.empty_like(x), torch.empty_like(x)
    packing.unpack(packed_B, found)
    packing.pack(packing.lasting(found), again_B)
    packing.unpack(again_B, again)
    assert torch.equal(again, found)
    if dtype is torch.float32:  # the others are packed as they are
        assert bool(((found - x).abs() <= bound(x, 8) + found.abs() * torch.finfo(dtype).eps / 2).all())


@pytest.mark.parametrize("numel", NUMELS)
def test_sums_are_made_in_fp32(numel):
    parts = [numbers(numel, seed=seed) for seed in range(3)]
    packing = ShardPacking(numel, 4)
    packed_WB = torch.stack([packed(part, 4)[1] for part in parts])
    expected = sum(there_and_back(part, 4) for part in parts)
    for dtype in DTYPES:
        found = torch.empty(numel, dtype=dtype)
        packing.unpack_sum(packed_WB, found)
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_an_overflow_stays_in_its_block(bits):
    x = numbers(4 * BLOCK_NUMEL + 5)
    blocks = list(x.split(BLOCK_NUMEL))
    blocks[0].zero_()
    blocks[1][3] = torch.inf
    blocks[2][4] = torch.nan
    blocks[4][0] = -torch.inf
    found = there_and_back(x, bits).split(BLOCK_NUMEL)
    assert not found[0].any()
    assert [bool(block.isfinite().all()) for block in found] == [True, False, False, True, False]
    assert not any(block.isfinite().any() for block in (found[1], found[2], found[4]))


@pytest.mark.parametrize(("bits", "part"), [(8, 1 / 4), (4, 1 / 8)])
def test_bytes(bits, part):
    """Of fp32; scales are another 1/256 of it, and each of two parts is padded to 16 bytes."""
    for numel in NUMELS:
        num_blocks = -(-numel // BLOCK_NUMEL)
        assert ShardPacking(numel, bits).num_bytes <= 4 * numel * part + 1 + 4 * num_blocks + 2 * 15


@pytest.mark.parametrize(
    ("key", "stage"),
    [("gradients", 0), *((key, stage) for key in ("weights", "nontrainable_weights") for stage in (0, 1, 2))],
)
def test_a_stage_that_quantizes_nothing_refuses(make_engine, key, stage):
    key = f"zero_quantized_{key}"
    with pytest.raises(ConfigError, match=rf"optimization\.{key}: found true with zero_optimization\.stage {stage}"):
        make_engine(nn.Linear(2, 2), zero_optimization={"stage": stage, key: True})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {},
            "zero_optimization.zeropp_loco_param: found it with zero_quantized_gradients false, where gradients are "
            "sent as they are and leave no error to make up for; set zero_quantized_gradients to true, or omit it",
        ),
        ({"zero_quantized_gradients": True, "err_beta": 1.0}, "zeropp_loco_param.err_beta: found 1.0"),
        ({"zero_quantized_gradients": True, "reset_T": 0}, "zeropp_loco_param.reset_T: found 0"),
    ],
)
def test_error_feedback_of_nothing_is_refused(make_engine, keys, message):
    keys = dict(keys)
    loco = {name: keys.pop(name) for name in ("err_beta", "reset_T") if name in keys}
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_engine(nn.Linear(2, 2), zero_optimization={"stage": 3, "zeropp_loco_param": loco, **keys})


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_added_to_what_is_sent_next(monkeypatch, dtype, numel):
    """Of two ranks' parts; the first is zero, so that its errors are. In runs of two blocks."""
    monkeypatch.setattr(quantized, "RUN_NUMEL", 2 * BLOCK_NUMEL)
    x = numbers(numel, dtype)
    packing, feedback = ShardPacking(numel, 4), ErrorFeedback(0.5, 10)
    parts_WS = torch.stack([torch.zeros_like(x), x])
    sent_WB = torch.empty(2, packing.num_bytes, dtype=torch.int8)
    error = torch.zeros(numel)
    for _ in range(3):
        feedback.pack("unit", parts_WS, sent_WB)
        none, came = torch.empty_like(parts_WS, dtype=torch.float32)
        packing.unpack(sent_WB[0], none)
        packing.unpack(sent_WB[1], came)
        assert not none.any()
        assert torch.equal(came, there_and_back(x.float() + error, 4))
        error = there_and_back(0.5 * error + 0.5 * (x.float() + error - came), 8)
    assert feedback.held_bytes == 2 * ShardPacking(numel, 8).num_bytes
    feedback.end_step(keeps=False)
    assert feedback.held_bytes == 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_leaves_no_error(bad):
    x = numbers(3 * BLOCK_NUMEL)
    packing, feedback = ShardPacking(x.numel(), 4), ErrorFeedback(0.5, 10)
    broken = x.clone()
    broken[BLOCK_NUMEL] = bad
    sent_WB = torch.empty(1, packing.num_bytes, dtype=torch.int8)
    came = torch.empty_like(x)
    for each in (broken, x):
        feedback.pack("unit", each.view(1, -1), sent_WB)
        packing.unpack(sent_WB[0], came)
        assert bool(came[:BLOCK_NUMEL].isfinite().all())
        assert bool(came[BLOCK_NUMEL : 2 * BLOCK_NUMEL].isfinite().all()) == (each is x)
    found, plain = came.split(BLOCK_NUMEL), there_and_back(x, 4).split(BLOCK_NUMEL)
    assert [torch.equal(*blocks) for blocks in zip(found, plain, strict=True)] == [False, True, False]


def test_one_rank_sends_nothing_and_quantizes_nothing(make_engine):
    tokens = torch.arange(32).view(2, 16)
    losses = []
    for quantizes in (False, True):
        torch.manual_seed(0)
        keys = [f"zero_quantized_{what}" for what in ("weights", "gradients", "nontrainable_weights")]
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **dict.fromkeys(keys, quantizes)}
        model = tiny_gpt()
        model.blocks[0].requires_grad_(False)
        engine = make_engine(model, zero_optimization=zero)
        losses.append([])
        for _ in range(3):
            loss = engine(tokens, tokens)
            losses[-1].append(loss.item())
            engine.backward(loss)
            engine.step()
    assert losses[0] == losses[1]


class Peers:
    """Rank 0 of two, whose peer has the same shard; writes down what it is given."""

    rank, world_size, group = 0, 2, None

    def __init__(self):
        self.dtypes = []

    def allocate(self, numel, dtype, device):
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full_N, shard_S, *, tag=None):
        self.dtypes.append(full_N.dtype)
        full_N.view(2, -1).copy_(shard_S.clone().expand(2, -1))
        return self

    def poll(self):
        return True

    def wait(self):
        pass


def test_a_gather_that_is_not_for_a_module_is_exact():
    values = torch.tensor([1.0, 0.3, 1.0, 0.3])
    peers = Peers()
    param = nn.Parameter(values.clone())
    unit = ParamUnit([param], ["net.weight"], UnitRanks.over(peers), device=torch.device("cpu"))
    unit.launch(quantizes=True)
    unit.finish()
    assert not torch.equal(param.detach(), values)
    with pytest.raises(StateError, match=r"parameters net\.weight: found weights that were gathered in int8"):
        param.partition(has_been_updated=True)
    for _ in range(2):
        unit.gather()
        assert torch.equal(param.detach(), values)
    assert peers.dtypes == [torch.int8, torch.float32]
    assert unit.num_gathers == 2
