"""One unit's weights and master weights: views of one buffer, fp32 copies of the user's weights, shards."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.unit import Unit
from deepspeed.zero.unit_groups import UnitRanks
from torch.nn import Parameter

SHAPES = [(2, 3), (5,), (1,)]


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def used_memory(numel, dtype, device):
    return torch.full((numel,), 7.0, dtype=dtype, device=device)


def make_group(params, *, rank=0, world_size=1, model_dtype=None, is_flat=True, keeps_params_whole=False):
    numels = [param.numel() for param in params]
    divide = UnitLayout.whole if keeps_params_whole else UnitLayout.even
    return Unit(
        params,
        index=0,
        first_index=10,
        param_group=0,
        layout=divide(numels, world_size) if is_flat else UnitLayout.single(numels),
        ranks=UnitRanks.over(SimpleNamespace(rank=rank, world_size=world_size, allocate=used_memory)),
        model_dtype=model_dtype,
        is_flat=is_flat,
        keeps_params_whole=keeps_params_whole,
    )


def test_without_sharding_in_fp32_the_parameter_is_the_master():
    params = make_params()
    homes = [param.data_ptr() for param in params]
    group = make_group(params, is_flat=False, keeps_params_whole=True)
    assert [shard.master for shard in group.shards] == params
    assert [param.data_ptr() for param in params] == homes
    assert not any(shard.has_master for shard in group.shards)
    assert (group.flat_N, group.master_S) == (None, None)


def test_parameters_become_views_of_one_buffer_with_their_values():
    params = make_params()
    before = [param.detach().clone() for param in params]
    group = make_group(params)
    assert group.flat_N.numel() == 12
    for param, old, offset in zip(params, before, group.layout.offsets):
        assert torch.equal(param, old)
        assert param.data_ptr() == group.flat_N[offset:].data_ptr()
    group.flat_N.zero_()
    assert all(param.abs().sum() == 0 for param in params)


def test_a_master_starts_from_the_users_weights_before_they_are_rounded():
    params = make_params()
    before = [param.detach().clone() for param in params]
    group = make_group(params, model_dtype=torch.bfloat16)
    for shard, param, old in zip(group.shards, params, before):
        assert (param.dtype, shard.master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(shard.master, old.reshape(-1))
        assert torch.equal(param, old.bfloat16())
        assert shard.has_master


@pytest.mark.parametrize("is_flat", [True, False])
def test_low_precision_gets_masters_flat_or_not(is_flat):
    params = make_params()
    group = make_group(params, model_dtype=torch.float16, is_flat=is_flat, keeps_params_whole=True)
    assert [shard.master.shape for shard in group.shards] == [param.shape for param in params]
    assert {param.dtype for param in params} == {torch.float16}
    assert group.master_S.numel() == 12


@pytest.mark.parametrize("rank", range(5))
def test_a_rank_holds_master_weights_of_its_own_shard_only(rank):
    params = make_params()
    flat = torch.cat([*(param.detach().reshape(-1) for param in params), torch.zeros(8)])  # 12 elements and padding
    group = make_group(params, rank=rank, world_size=5, model_dtype=torch.bfloat16)
    start, stop = group.layout.shard(rank)
    assert group.master_S.numel() == stop - start == 4
    assert torch.equal(group.master_S, flat[start:stop])
    for shard in group.shards:
        assert torch.equal(shard.master, flat[shard.fragment.start : shard.fragment.stop])
        assert shard.index == 10 + shard.fragment.param


@pytest.mark.parametrize("keeps_params_whole", [False, True])
def test_what_no_parameter_covers_is_zero(keeps_params_whole):
    group = make_group(make_params(), world_size=3 if keeps_params_whole else 5, keeps_params_whole=keeps_params_whole)
    gaps = group.layout.gaps
    assert gaps
    assert all(group.flat_N[start:stop].tolist() == [0.0] * (stop - start) for start, stop in gaps)


def test_a_fragment_of_a_sharded_fp32_group_shares_the_models_memory():
    params = make_params()
    group = make_group(params, rank=1, world_size=2)
    (shard, *_) = group.shards
    shard.master.fill_(9.0)
    assert not shard.has_master
    assert params[shard.fragment.param].reshape(-1)[shard.fragment.param_start] == 9.0


def test_whole_shards_keep_the_parameters_shape():
    params = make_params()
    shards = [
        shard
        for rank in (0, 1)
        for shard in make_group(params, rank=rank, world_size=2, keeps_params_whole=True).shards
    ]
    assert [tuple(shard.master.shape) for shard in shards] == SHAPES


def test_masters_and_weights_follow_each_other():
    params = make_params()
    group = make_group(params, model_dtype=torch.bfloat16)
    with torch.no_grad():
        params[0].fill_(3.0)
    group.masters_from_weights()
    assert group.shards[0].master.tolist() == [3.0] * 6
    group.shards[1].master.fill_(1 / 3)
    group.weights_from_masters()
    assert torch.equal(params[1], torch.full((5,), 1 / 3, dtype=torch.bfloat16))


def test_only_what_was_changed_is_taken_into_master_weights():
    params = make_params()
    group = make_group(params, model_dtype=torch.bfloat16)
    before = group.master_S.clone()
    with torch.no_grad():
        params[1][2:4] = 3.0
    group.take_changes()
    assert torch.equal(group.shards[0].master, before[:6])
    assert group.shards[1].master.tolist() == [*before[6:8].tolist(), 3.0, 3.0, before[10].item()]


def test_parameters_that_are_not_contiguous():
    transposed = Parameter(torch.arange(6.0).view(2, 3).t())
    before = transposed.detach().clone()
    make_group([transposed], model_dtype=torch.bfloat16)
    assert torch.equal(transposed.float(), before)


def test_a_mixed_group_keeps_integers_out_of_it():
    params = [Parameter(torch.ones(3, dtype=torch.float64))]
    group = make_group(params, model_dtype=torch.bfloat16)
    assert group.dtype is torch.bfloat16
    assert make_group([Parameter(torch.ones(3, dtype=torch.float64))]).dtype is torch.float64
