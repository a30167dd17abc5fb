"""Sharded parameters on two ranks: units, `GatheredParameters` in its forms, and `zero.Init`."""

import contextlib
from datetime import timedelta
from itertools import product

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import CommError, ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, shape_of, unit_of
from deepspeed.zero.unit_groups import UnitRanks
from torch import nn

LOW = {"bf16": {"enabled": True}}
NOT_AVAILABLE = ZeroParamStatus.NOT_AVAILABLE


def is_empty(param):
    """Whether nothing of the whole parameter is in memory."""
    unit = unit_of(param)
    return unit.status is NOT_AVAILABLE and unit._full_N.untyped_storage().nbytes() == 0 == param.numel()


# ---- units ----------------------------------------------------------------------------------------------------------


def unit_job(from_first_rank):
    rank = dist.get_rank()
    values = [torch.arange(6.0).view(2, 3), torch.tensor(6.0), torch.tensor([7.0, 8.0])]
    offset = 10.0 * rank * from_first_rank  # those of the second rank do not count
    params = [nn.Parameter(value + offset) for value in values]
    ranks = dist.group_backend(None)
    unit = ParamUnit(
        params, ["a", "b", "c"], UnitRanks.over(ranks), device=torch.device("cpu"), from_first_rank=from_first_rank
    )
    assert unit.shard_S.tolist() == ([0, 1, 2, 3, 4, 5] if rank == 0 else [6, 7, 8, 0, 0, 0])
    for _ in range(2):
        assert all(is_empty(param) for param in params)
        unit.gather()
        assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
        unit.release()
    unit.gather()
    with torch.no_grad():
        params[2].fill_(rank + 1.0)
    unit.broadcast(1)
    unit.take_from_full()
    unit.release()
    unit.gather()
    assert params[2].tolist() == [2.0, 2.0]
    unit.release()
    unit.launch()
    _, work = unit.abandon()
    ranks.abandon([work], failed=False)
    assert all(is_empty(param) for param in params)
    try:
        unit.gather()
    except CommError:  # a library that cannot go on says so
        return
    assert torch.equal(params[0], values[0])


@pytest.mark.parametrize("from_first_rank", [True, False])
def test_gather_release_and_abandon(from_first_rank):
    run_ranks(2, unit_job, from_first_rank)


# ---- GatheredParameters ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def create_engine(module=None, **keys):
    torch.manual_seed(3)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **keys.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
        **keys,
    }
    return deepspeed.initialize(model=Net() if module is None else module, config=config)[0]


def plain_net():
    torch.manual_seed(3)
    return Net()


def run_step(engine):
    dtype = engine.module.first.weight.dtype
    engine.backward(engine(torch.ones(4, 5, dtype=dtype)).float().square().mean())
    engine.step()


def forms_job():
    module = create_engine().module
    plain = plain_net()
    first, second = module.first.weight, module.last.weight
    forms = {
        "one": first,
        "a list": [first, second],
        "a generator": module.parameters(),
        "with others": [first, nn.Parameter(torch.ones(1))],
    }
    for form in forms.values():
        assert is_empty(first)
        with GatheredParameters(form) as context:
            assert torch.equal(first, plain.first.weight)
            assert all(param.shape == shape_of(param) for param in context.params)
        assert is_empty(first)
    with GatheredParameters(first, enabled=False):
        assert is_empty(first)
    with GatheredParameters([first]):
        with GatheredParameters(module.parameters()):
            assert second.shape == (3, 7)
        assert torch.equal(first, plain.first.weight), "the outer context holds it"
        assert is_empty(second)
    with GatheredParameters([first]) as outer:
        with pytest.raises(StateError, match="this object entered already"), outer:
            pass
        assert first.shape == first.ds_shape
    with outer:  # again, after it was left
        assert first.shape == first.ds_shape
    with pytest.raises(RuntimeError, match="inside"), GatheredParameters(first):
        raise RuntimeError("inside")
    assert is_empty(first)


def test_every_form_of_gathered_parameters():
    run_ranks(2, forms_job)


def modified_job(modifier_rank, keys):
    engine = create_engine(**keys)
    params = [engine.module.first.weight, engine.module.last.bias]
    others = [engine.module.first.bias, engine.module.last.weight]
    run_step(engine)
    masters = [safe_get_full_fp32_param(param).clone() for param in others]
    expected = [safe_get_full_fp32_param(param).clone() for param in params]
    is_refused = contextlib.nullcontext() if modifier_rank is not None else pytest.raises(StateError, match="without")
    with is_refused, GatheredParameters(params, modifier_rank=modifier_rank), torch.no_grad():
        for param in params:
            param.fill_(dist.get_rank() + 1 / 3)
    if modifier_rank is not None:
        low = torch.tensor(modifier_rank + 1 / 3).to(params[0].dtype).item()
        expected = [torch.full_like(former, low) for former in expected]
    for param, wanted in zip(params, expected, strict=True):
        assert torch.equal(safe_get_full_fp32_param(param), wanted)
        with GatheredParameters(param):
            assert torch.equal(param, wanted.to(param.dtype))
    for param, master in zip(others, masters, strict=True):
        assert torch.equal(safe_get_full_fp32_param(param), master), "what was not changed keeps its precision"
    run_step(engine)  # the update starts from what was set
    assert 0 < (safe_get_full_fp32_param(params[0]) - expected[0]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("modifier_rank", "keys"),
    swept(product([None, 0, 1], [{}, LOW]), lambda rank, keys: (rank == 0) is not bool(keys)),
)
def test_only_the_modifiers_changes_are_kept_also_in_master_weights(modifier_rank, keys):
    run_ranks(2, modified_job, modifier_rank, keys)


def kept_whole_job(max_reuse):
    """What a forward left whole, because it is needed again soon, is no way around the rules of the context."""
    engine = create_engine(zero={"stage3_max_reuse_distance": max_reuse})
    param, plain = engine.module.first.weight, plain_net()
    with torch.no_grad():
        engine(torch.ones(4, 5))
        with GatheredParameters(param):
            param.data.zero_()
        output = engine(torch.ones(4, 5))
        torch.testing.assert_close(output, plain(torch.ones(4, 5)))
        with GatheredParameters(engine.module.parameters()):
            engine(torch.ones(4, 5))
            assert torch.equal(param, plain.first.weight), "a forward inside leaves it whole"
        assert is_empty(param)


@pytest.mark.parametrize("max_reuse", [0, 10**9])
def test_a_forward_before_the_context_and_inside_it(max_reuse):
    run_ranks(2, kept_whole_job, max_reuse)


def set_while_gathered_job(keys):
    """Whatever a forward has left whole or on its way, the next one reads what was set."""
    engine = create_engine(nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))), zero=keys)
    with torch.no_grad():
        for _ in range(3):
            engine(torch.ones(4, 5))
        seen = [param.ds_status for param in engine.module.parameters()]
        for param in engine.module.parameters():
            safe_set_full_fp32_param(param, torch.eye(5))
        assert torch.equal(engine(torch.ones(4, 5)), torch.ones(4, 5))
    return seen


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        ({}, ZeroParamStatus.AVAILABLE),
        ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 30}, ZeroParamStatus.INFLIGHT),
    ],
    ids=["kept", "gathered ahead"],
)
def test_a_weight_that_was_set_is_read_next(keys, status):
    assert all(seen[0] is status for seen in run_ranks(2, set_while_gathered_job, keys))


def outside_job():
    engine = create_engine()
    engine.module.last.bias.data = torch.zeros(3)
    with pytest.raises(StateError, match=r"parameter last\.bias: found a value of shape \(3,\) that was put into it"):
        run_step(engine)


def test_a_value_put_in_outside_of_the_context_is_refused():
    run_ranks(2, outside_job)


def evaluated_job(with_grad, then, zero):
    engine = create_engine(zero={"stage3_max_reuse_distance": 10**9, **zero})
    param = engine.module.first.weight
    run_step(engine)
    with torch.set_grad_enabled(with_grad):
        engine(torch.ones(4, 5))
        if then == "evaluation":
            engine.module.first(torch.ones(4, 5))
    assert param.shape == (7, 5)
    param.data.zero_()  # torch does not count it
    if then == "evaluation":
        engine(torch.ones(4, 5))
    call = engine.empty_partition_cache if then == "release" else lambda: run_step(engine)
    with pytest.raises(StateError, match=r"parameter first\.weight: found an in-place change outside of .*Gathered"):
        call()
    assert is_empty(param)
    run_step(engine)  # of what the shards hold
    assert safe_get_full_fp32_param(param).abs().min() > 0


@pytest.mark.parametrize("with_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(
    ("then", "zero"),
    [
        ("step", {}),
        ("evaluation", {}),
        ("release", {}),
        pytest.param("step", {"offload_param": {"device": "cpu"}}, marks=pytest.mark.sweep),
    ],
)
def test_a_change_of_data_that_an_evaluation_left_whole_is_refused(with_grad, then, zero):
    run_ranks(2, evaluated_job, with_grad, then, zero)


def evaluations_job(keys):
    """Evaluations alone change nothing, and compare what they leave whole once, when it is released."""
    engine = create_engine(zero={"stage3_max_reuse_distance": 10**9}, **keys)
    param, value = engine.module.first.weight, torch.full((7, 5), 0.25)
    inputs = torch.ones(4, 5, dtype=param.dtype)
    unit, compared = unit_of(param), []
    unit._is_all_as_sharded = lambda: compared.append(1) or ParamUnit._is_all_as_sharded(unit)
    for _ in range(2):
        run_step(engine)
    assert not compared
    for _ in range(3):
        engine(inputs)
    run_step(engine)
    assert len(compared) == 1
    engine(inputs)
    safe_set_full_fp32_param(param, value)
    engine(inputs)
    safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 2)
    assert torch.equal(safe_get_full_fp32_param(param), value * 2)
    engine(inputs)
    with GatheredParameters(param, modifier_rank=0):
        param.data.fill_(1.0)
    run_step(engine)
    engine.destroy()


@pytest.mark.parametrize("keys", [{}, LOW], ids=["fp32", "bf16"])
def test_what_an_evaluation_left_whole_may_be_set(keys):
    run_ranks(2, evaluations_job, keys)


# ---- zero.Init ------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Draws numbers itself, between those of its children."""

    def __init__(self, numel):
        super().__init__()
        self.inner = nn.Linear(numel, numel)
        self.scale = nn.Parameter(torch.randn(numel))
        self.register_buffer("positions", torch.arange(numel).float())
        self.outer = nn.Linear(numel, numel)
        self.outer.bias = self.inner.bias  # tied


class Defined(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(4), Scaled(6)])
        self.empty = nn.Parameter(torch.empty(0))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)

        class Late(nn.Linear):
            """A class that did not exist when the context was entered."""

            def reset_parameters(self):
                nn.init.uniform_(self.weight)
                nn.init.constant_(self.bias, 2.0)

        self.late = Late(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()


def assert_equal_weights(module, plain, dtype=None):
    for (name, param), (plain_name, wanted) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name
        assert param.requires_grad == wanted.requires_grad, name
        wanted = wanted.to(dtype) if dtype is not None and wanted.is_floating_point() else wanted
        assert wanted.numel() == 0 or is_empty(param), name
        with GatheredParameters(param):
            assert wanted.numel() == 0 or param.dtype == wanted.dtype, name
            assert torch.equal(param, wanted.to(param.dtype)), name
    for one, other in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def construct_job(build, config, dtype):
    torch.manual_seed(5 + dist.get_rank())  # rank 0's seed counts
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = build()
        drawn = torch.rand(1)
    torch.manual_seed(5)
    plain = build()
    assert dist.get_rank() > 0 or torch.equal(drawn, torch.rand(1)), "the generator is where it would be"
    assert_equal_weights(module, plain, dtype)


def defined_and_applied():
    module = Defined()
    module.apply(lambda each: nn.init.ones_(each.weight) if isinstance(each, nn.Linear) else None)
    return module


STAGE3 = {"zero_optimization": {"stage": 3}}
BF16 = {**STAGE3, **LOW, "train_batch_size": "auto"}
BUILDS = [Net, Defined, defined_and_applied]


@pytest.mark.parametrize(
    ("build", "config", "dtype"),
    swept(
        [(build, *how) for build in BUILDS for how in ((None, None), (STAGE3, None), (BF16, torch.bfloat16))],
        lambda build, config, dtype: (build, config) in ((Net, None), (Defined, STAGE3), (defined_and_applied, BF16)),
    ),
)
def test_weights_equal_a_plain_construction_under_one_seed(build, config, dtype):
    run_ranks(2, construct_job, build, config, dtype)


def existing_and_nested_job():
    module, inits = plain_net(), [vars(cls).get("__init__") for cls in (Net, nn.Linear)]
    deepspeed.zero.Init(module=module)
    assert_equal_weights(module, plain_net())
    torch.manual_seed(3)
    with deepspeed.zero.Init(config=STAGE3), deepspeed.zero.Init(remote_device="cpu"):
        module = Net()
        with deepspeed.zero.Init(enabled=False):
            plain = nn.Linear(2, 2)
    assert_equal_weights(module, plain_net())
    with pytest.raises(RuntimeError, match="inside"), deepspeed.zero.Init():
        raise RuntimeError("inside")
    assert [vars(cls).get("__init__") for cls in (Net, nn.Linear)] == inits
    assert "__init_subclass__" not in vars(nn.Module)
    assert nn.Linear(2, 2).weight.shape == (2, 2)
    assert plain is not None


def test_an_existing_module_and_nested_contexts():
    run_ranks(2, existing_and_nested_job)


def refused_job():
    for stage in (0, 1, 2):
        with pytest.raises(ConfigError, match=rf"zero\.Init: zero_optimization\.stage is {stage}, so no parameter"):
            deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": stage}})
        with deepspeed.zero.Init():
            module = Net()
        with pytest.raises(
            ConfigError,
            match=rf"stage is {stage}, and zero.Init or an engine of stage 3 sharded 4 parameters .* 'first\.weight'",
        ):
            create_engine(module, zero={"stage": stage})


def test_a_stage_that_shards_no_parameters_is_refused():
    run_ranks(2, refused_job)


def trained_job(keys, threshold):
    """An engine of a sharded model goes the same way as one of a plain model, and leaves a plain module behind."""
    results = []
    for is_sharded in (True, False):
        torch.manual_seed(3)
        with deepspeed.zero.Init(enabled=is_sharded, dtype=torch.float32):
            module = Net()
        engine = create_engine(module, zero={"stage3_param_persistence_threshold": threshold}, **keys)
        for _ in range(3):
            run_step(engine)
        engine.destroy()
        assert all(unit_of(param) is None for param in module.parameters())
        results.append([param.detach().clone() for param in module.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.shape == other.shape


@pytest.mark.parametrize(
    ("keys", "threshold"), swept(product([{}, LOW], [0, 10]), lambda keys, threshold: bool(keys) is bool(threshold))
)
def test_a_model_of_the_context_trains_as_a_plain_one(keys, threshold):
    run_ranks(2, trained_job, keys, threshold)


def build_alone():
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    dist.group_backend(group).connect()
    if dist.get_rank() == 0:
        message = "rank 0 called zero.Init and waited for 1 s: rank 1 has not called it"
        with pytest.raises(CommError, match=message), deepspeed.zero.Init(data_parallel_group=group):
            nn.Linear(5, 3)
    torch.distributed.barrier()


def build_more():
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    with deepspeed.zero.Init(data_parallel_group=group):
        nn.Linear(5, 4)
        if dist.get_rank() == 0:
            message = r"zero.Init: broadcast of the parameter weight of shape \(3, 5\): .* build the same modules"
            with pytest.raises(CommError, match=message):
                nn.Linear(5, 3)
    torch.distributed.barrier()


@pytest.mark.parametrize("job", [build_alone, build_more])
def test_a_module_that_one_rank_builds_alone_is_named(job):
    run_ranks(2, job)


# ---- gradients in flight --------------------------------------------------------------------------------------------


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(6)))


def late_peer_job():
    """The highest number of gradient buffers at once, if no reduction is seen to be over before it is waited for."""
    block = 8 * 8 + 8
    ahead_by_one = {
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 0,
    }
    engine = create_engine(Deep(), zero=ahead_by_one)
    buckets = engine.sharding.gradients.memory.buckets
    counts = []

    def launch(self, *args):
        original_launch(self, *args)
        counts.append(sum(bucket._memory is not None for bucket in buckets))

    original_launch, original_poll = Bucket.launch, Bucket.poll
    Bucket.launch, Bucket.poll = launch, lambda self: self._work is None
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 8)).square().mean())
            engine.step()
    finally:
        Bucket.launch, Bucket.poll = original_launch, original_poll
    return len(buckets), max(counts)


def test_buffers_of_gradients_do_not_pile_up_where_peers_are_late():
    assert run_ranks(2, late_peer_job) == [(6, 2)] * 2
