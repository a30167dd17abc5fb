"""Stage 3 on four ranks in groups of two, with a copy of the shards (MiCS) or of the weights (hpZ) in each, against
stage 0."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

WORLD, INPUTS, WIDTH, NUM_STEPS, ACCUMULATION, CLIP = 4, 5, 7, 20, 2, 0.05
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
MICS = {"mics_shard_size": 2}
MICS_1 = {"mics_shard_size": 1}  # every rank holds a copy: nothing is sharded
HPZ = {"zero_hpz_partition_size": 2}


class Net(nn.Module):
    """Sizes that no number of ranks divides; a frozen layer; a gain that stays whole."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.tanh(self.frozen(torch.tanh(self.first(x)) * self.gain))
        return F.softplus(self.last(x + self.block(torch.tanh(self.block(x))))).mean()


def create_engine(zero, *, uses_init=False, **keys):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage3_param_persistence_threshold": 2, **zero},
        "steps_per_print": 10**6,
        **keys,
    }
    init = deepspeed.zero.MiCS_Init if "mics_shard_size" in zero else deepspeed.zero.Init
    with init(config_dict_or_path=config) if uses_init else contextlib.nullcontext():
        model = Net()
    return deepspeed.initialize(model=model, config=config)[0]


def samples(step, micro):
    return torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank()))


def train(engine, steps, *, looks=False):
    """Losses and norms. `looks`: gradients are read between two backward calls of a step."""
    losses, norms = [], []
    for step in steps:
        for micro in range(ACCUMULATION):
            loss = engine(samples(step, micro).to(engine.module.first.weight.dtype))
            engine.backward(loss)
            if looks:
                safe_get_full_grad(engine.module.block.weight)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return torch.tensor(losses), torch.tensor(norms)


def masters(engine):
    return [safe_get_full_fp32_param(param) for param in engine.module.parameters() if param.requires_grad]


def train_job(zero, kwargs, looks):
    engine = create_engine(zero, **kwargs)
    result = (*train(engine, range(NUM_STEPS), looks=looks), *masters(engine))
    shards = [unit.shard_S.numel() for unit in engine.sharding.units.divided()]
    engine.destroy()
    return result, shards


@functools.cache
def stage_0(precision):
    return run_ranks(WORLD, train_job, {"stage": 0}, {precision: {"enabled": True}} if precision else {}, False)


def largest_difference(found, expected):
    pairs = [
        pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours[0], theirs[0], strict=True)
    ]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


SMALLEST = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
CASES = {
    "mics 2": (MICS, {}, False),
    "mics 2, smallest": ({**MICS, **SMALLEST}, {}, False),
    "mics 2, gradients read between two backwards": (MICS, {}, True),
    "mics 2, MiCS_Init": (MICS, {"uses_init": True}, False),
    "mics 2, predivided": (MICS, {"gradient_predivide_factor": 2.0}, False),
    "mics 1": (MICS_1, {}, True),
    "mics 4": ({"mics_shard_size": 4}, {}, False),
    "hpz 2": (HPZ, {}, False),
    "hpz 2, smallest, zero.Init": ({**HPZ, **SMALLEST}, {"uses_init": True}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_stage_0(case):
    zero, kwargs, looks = CASES[case]
    found = run_ranks(WORLD, train_job, {"stage": 3, **zero}, kwargs, looks)
    assert (stage_0(None)[0][0][1] > 2 * CLIP).all()
    assert largest_difference(found, stage_0(None)) <= 1e-6


def test_mics_in_bf16_equals_stage_0():
    found = run_ranks(WORLD, train_job, {"stage": 3, **MICS}, {"bf16": {"enabled": True}}, False)
    assert largest_difference(found, stage_0("bf16")) <= 1e-2
    assert found[0][1] == found[2][1] == [22, 28, 4, 28]  # half of each unit, padded


# ---- what goes where -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(engine):
    """Inside, collectives of the engine by method and number of ranks."""
    counts = Counter()

    def counting(name, call, ranks):
        @functools.wraps(call)
        def counted_call(self, *args, **kwargs):
            counts[name, self.world_size] += 1
            return call(self, *args, **kwargs)

        return counted_call

    with contextlib.ExitStack() as stack:
        for owner in {type(ranks) for ranks in engine.sharding.backends}:
            for name in ("all_reduce", "reduce_scatter", "all_gather"):
                call = counting(name, getattr(owner, name), owner)
                stack.enter_context(mock.patch.object(owner, name, call))
        yield counts


def count_job(zero):
    engine = create_engine({"stage": 3, **SMALLEST, "stage3_param_persistence_threshold": 0, **zero})
    train(engine, range(2))
    with counted(engine) as counts:
        train(engine, [2])
    num_buckets, num_units = len(engine.sharding.gradients.memory.buckets), len(engine.sharding.units.modules.all)
    engine.destroy()
    return dict(counts), num_buckets, num_units


def test_mics_gathers_in_shard_groups_and_sums_over_copies_once_per_step():
    counts, num_buckets, _ = run_ranks(WORLD, count_job, MICS)[0]
    small = counts.pop(("all_reduce", 4))
    assert small <= 2
    assert counts.pop(("reduce_scatter", 2)) == num_buckets * ACCUMULATION
    assert counts.pop(("all_reduce", 2)) == num_buckets
    assert set(counts) == {("all_gather", 2)}


def test_hpz_gathered_over_all_ranks_once_per_step():
    counts, num_buckets, num_units = run_ranks(WORLD, count_job, HPZ)[0]
    assert counts["reduce_scatter", 4] == num_buckets * ACCUMULATION
    assert counts["all_gather", 4] == num_units
    assert counts["all_gather", 2] >= (2 * ACCUMULATION - 1) * num_buckets
    assert set(counts) == {("all_reduce", 4), ("reduce_scatter", 4), ("all_gather", 4), ("all_gather", 2)}


def changed_between_job():
    """Weights that change between a forward and the next one are gathered from their shards again."""
    engine = create_engine({"stage": 3, **HPZ, **SMALLEST})
    unit = engine.module.first.weight.ds_unit
    x = samples(0, 0)
    with torch.no_grad():
        losses = [engine(x).item(), engine(x).item()]
        assert unit._near.serves(exact=True)
        row = deepspeed.zero.show_layout(engine)[0]
        assert (row.module, row.bytes) == ("first", unit.shard_S.nbytes + unit._near.shard.nbytes)
        with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            for param in engine.module.parameters():
                param.zero_()
        assert not unit._near.serves(exact=False)
        losses.append(engine(x).item())
    engine.destroy()
    return losses


def test_hpz_forgets_its_copy_when_weights_change():
    for first, again, changed in run_ranks(WORLD, changed_between_job):
        assert first == again != changed == pytest.approx(0.6931472)


# ---- files ----------------------------------------------------------------------------------------------------------


def checkpoint_job(folder, divided, others):
    """Saved by one division of the ranks, loaded by others."""
    saved = create_engine({"stage": 3, **divided})
    train(saved, range(3))
    saved.save_checkpoint(folder, tag="a")
    train(saved, range(3, 5))
    expected = masters(saved)
    saved.destroy()
    frozen = saved.module.frozen.weight.detach().clone()
    for zero in others:
        again = create_engine({"stage": 3, **zero})
        with deepspeed.zero.GatheredParameters(again.module.parameters(), modifier_rank=0), torch.no_grad():
            for param in again.module.parameters():
                param.zero_()
        again.load_checkpoint(folder, tag="a")
        train(again, range(3, 5))
        torch.testing.assert_close(masters(again), expected, rtol=1e-6, atol=1e-7)
        again.destroy()
        assert torch.equal(again.module.frozen.weight, frozen)
    plain = create_engine({"stage": 3})
    train(plain, range(3))
    weights = masters(plain)
    plain.destroy()
    return weights


@pytest.mark.parametrize(
    ("divided", "others"),
    [(MICS, [MICS, HPZ, MICS_1]), (MICS_1, [MICS_1, MICS, {}])],
    ids=["mics 2", "mics 1"],
)
def test_a_checkpoint_of_mics_is_one_of_stage_3(divided, others, tmp_path):
    weights = run_ranks(WORLD, checkpoint_job, tmp_path, divided, others)[0]
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="a")
    names = [name for name, param in Net().named_parameters() if param.requires_grad]
    torch.testing.assert_close([state[name] for name in names], weights, rtol=1e-6, atol=1e-7)


# ---- gathered parameters, and errors --------------------------------------------------------------------------------


def modify_job():
    """The changes of one rank reach every copy."""
    engine = create_engine({"stage": 3, **MICS})
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=3), torch.no_grad():
        for param in (engine.module.block.bias, engine.module.gain):
            param.fill_(dist.get_rank())
    found = [float(safe_get_full_fp32_param(param).mean()) for param in (engine.module.block.bias, engine.module.gain)]
    first = engine.is_first_weights_partition_group()
    engine.destroy()
    with pytest.raises(ConfigError, match="zero_optimization.mics_shard_size: found 3, but there are dp 4 x sp 1"):
        create_engine({"stage": 3, "mics_shard_size": 3})
    with pytest.raises(ConfigError, match="zero_optimization.mics_shard_size: found 2 with stage 2"):
        create_engine({"stage": 2, "mics_shard_size": 2})
    with pytest.raises(ConfigError, match="zero_optimization.zero_hpz_partition_size: found 3, but there are dp 4"):
        create_engine({"stage": 3, "zero_hpz_partition_size": 3})
    with pytest.raises(ConfigError, match="mics_shard_size and zero_hpz_partition_size must be the same on all ranks"):
        create_engine({"stage": 3, "mics_shard_size": 2 if dist.get_rank() == 0 else 4})
    return found, first


def test_changes_reach_all_copies_and_sizes_are_checked():
    assert run_ranks(WORLD, modify_job) == [([3.0, 3.0], True)] * 2 + [([3.0, 3.0], False)] * 2


def test_hpz_keeps_weights_as_they_were_rounded():
    quantized = {"stage": 3, "zero_quantized_weights": True, **SMALLEST}
    expected = run_ranks(WORLD, train_job, quantized, {}, False)
    assert largest_difference(run_ranks(WORLD, train_job, {**quantized, **HPZ}, {}, False), expected) <= 1e-6
    assert largest_difference(expected, stage_0(None)) > 1e-6
