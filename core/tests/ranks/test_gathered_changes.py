"""Changes inside `GatheredParameters` without `modifier_rank` are an error on every rank, and ranks never differ."""

import contextlib
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.comm.torch_group import forget
from deepspeed.errors import CommError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters, gather, module_hooks
from torch import nn

OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(20, 30, bias=False), nn.Parameter(torch.ones(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x) * self.small


def create_engine(**zero: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, **zero},
    }
    return deepspeed.initialize(model=Net(), config=config)[0]


def values(params: list[nn.Parameter]) -> torch.Tensor:
    with GatheredParameters(params):
        return torch.cat([param.detach().reshape(-1).clone() for param in params])


@torch.no_grad()
def in_place(param: nn.Parameter) -> None:
    param.view(-1)[-1:] += 7.0  # of the last rank's shard


def assigned(param: nn.Parameter) -> None:
    param.data = param.data + 1.0


def through_data(param: nn.Parameter) -> None:
    param.data.view(-1)[-1:] += 7.0


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 20)).square().mean())
    engine.step()


def change(checks: bool, zero: dict[str, Any], only_rank: int | None) -> list[str]:
    """What was said of each change."""
    engine = create_engine(enable_sanity_checks=checks, **zero)
    params = list(engine.module.parameters())
    before, said = values(params), []
    for name, how in product(("large", "small"), (in_place, assigned, through_data)):
        is_refused = checks or how is not through_data
        try:
            with GatheredParameters(params):
                if only_rank in (None, dist.get_rank()):
                    how(dict(engine.module.named_parameters())[f"{name}.weight" if name == "large" else name])
        except StateError as error:
            assert is_refused
            said.append(str(error))
        else:
            assert not is_refused
        assert torch.equal(values(params), before), (name, how)
        step(engine)
    with GatheredParameters(params):
        pass
    with torch.no_grad():
        output = engine(torch.eye(20))
    torch.testing.assert_close(output, before[30:].view(30, 20).t() * before[:30])
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("checks", "zero", "only_rank"),
    swept(
        product([False, True], [{}, OFFLOADED], [None, 0, 1]),
        lambda checks, zero, rank: (
            (checks, bool(zero), rank) in {(False, False, 0), (True, True, 1), (True, False, None)}
        ),
    ),
)
def test_a_change_without_modifier_rank_is_refused_on_every_rank(checks, zero, only_rank):
    for said in run_ranks(2, change, checks, zero, only_rank):
        assert len(said) == (6 if checks else 4)
        half = len(said) // 2
        assert all("found the parameter large.weight changed on rank" in each for each in said[:half])
        assert all("found the parameter small changed on rank" in each for each in said[half:])
        assert all("modifier_rank=0" in each for each in said)


def undo(checks: bool) -> list[str]:
    """What was said of values that were changed and changed back, as adapters are merged for a generation: peft's DoRA,
    OFT and IA3 assign `param.data`."""
    engine = create_engine(enable_sanity_checks=checks)
    params, said = list(engine.module.parameters()), []
    before = values(params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "warn_once", said.append)
        for name in ("large.weight", "small"):
            param = engine.module.get_parameter(name)
            with GatheredParameters(params):
                for sign in (1.0, -1.0):
                    param.data = param.data + sign * torch.linspace(0.3, 0.4, param.numel()).view(param.shape)
                assert not torch.equal(torch.cat([each.detach().view(-1) for each in params]), before)
            assert torch.equal(values(params), before)
            with pytest.raises(StateError, match=f"{name} changed on rank"), GatheredParameters(params):
                param.data = param.data * (1 + 1e-5)
    step(engine)
    engine.destroy()
    return said


@pytest.mark.parametrize("checks", [True, False])
def test_a_change_that_was_undone_up_to_rounding_is_dropped_with_a_warning(checks):
    for said in run_ranks(2, undo, checks):
        first, second = said
        assert "found the parameter large.weight changed by no more than rounding on ranks 0, 1 in a context" in first
        assert "found the parameter small changed by no more than rounding on ranks 0, 1 in a context" in second


def nested_job() -> None:
    """The outermost context decides, and what an engine writes inside is no change of the user's."""
    engine = create_engine(enable_sanity_checks=True)
    params = list(engine.module.parameters())
    with GatheredParameters(params, modifier_rank=1):
        with GatheredParameters(params), torch.no_grad():
            for param in params:
                param.fill_(3.0 + dist.get_rank())
        assert all(bool((param == 3.0 + dist.get_rank()).all()) for param in params)
    assert bool((values(params) == 4.0).all())
    with GatheredParameters(params), GatheredParameters(params, modifier_rank=0), torch.no_grad():
        for param in params:
            param.fill_(5.0 + dist.get_rank())
    assert bool((values(params) == 5.0).all())
    with GatheredParameters(params):
        for param in params:
            deepspeed.utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape, 6.0))  # type: ignore[attr-defined]
    assert bool((values(params) == 6.0).all())
    with GatheredParameters(params):
        with contextlib.suppress(KeyError), GatheredParameters(params):
            params[0].data.zero_()
            raise KeyError
        params[0].data.fill_(6.0)
    with GatheredParameters(params):
        engine.destroy()


def test_nested_contexts_and_writes_of_the_engine():
    run_ranks(2, nested_job)


def small_on_one_rank_job() -> str:
    """Small parameters are whole anyway, so one rank may look at them alone; what it changes there is refused there."""
    engine = create_engine()
    small = engine.module.small
    if dist.get_rank() == 0:
        with GatheredParameters(small):
            assert bool((small == 1.0).all())
        with pytest.raises(StateError, match="small changed on rank 0"), GatheredParameters(small):
            in_place(small)
    step(engine)
    assert bool((small == 1.0).all())
    engine.destroy()
    return ""


def test_one_rank_may_read_small_parameters_alone():
    run_ranks(2, small_on_one_rank_job)


def failing_job(place: str, with_engine: bool) -> tuple[str, bool]:
    """What rank 0 raises where rank 1 fails alone, and whether both go on."""
    engine = create_engine() if with_engine else None
    if engine is None:
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
            net = Net()
    params = [(engine.module if engine is not None else net).large.weight]
    modifier_rank = 0 if place == "modifier" else None
    found = ""
    try:
        if place == "before" and dist.get_rank() == 1:
            with torch.no_grad():
                params[0].data = torch.ones(3)
        with GatheredParameters(params, modifier_rank=modifier_rank):
            if place != "before" and dist.get_rank() == 1:
                raise ValueError("of rank 1 alone")
    except (ValueError, StateError, CommError) as error:
        found = f"{type(error).__name__}: {error}"
        if place == "before" and dist.get_rank() == 1:
            params[0].data = torch.empty(0)
    if engine is not None:
        step(engine)
    return found, bool(torch.isfinite(values(params)).all())


@pytest.mark.parametrize("with_engine", [True, False])
@pytest.mark.parametrize("place", ["inside", "modifier", "before"])
def test_a_rank_that_leaves_a_context_by_an_exception_tells_its_peers(place: str, with_engine: bool) -> None:
    (first, first_goes_on), (second, second_goes_on) = run_ranks(2, failing_job, place, with_engine)
    assert "rank 1" in first
    assert "rank 1" not in second.partition("rank 1 alone")[0] or place == "before"
    assert first_goes_on
    assert second_goes_on


def set_local(param: nn.Parameter, what: str) -> None:
    """Of this rank's elements."""
    if what == "weight":
        utils.safe_set_local_fp32_param(param, utils.safe_get_local_fp32_param(param) + 1.0)
    else:
        key = "momentum_buffer"
        utils.safe_set_local_optimizer_state(param, utils.safe_get_local_optimizer_state(param, key) + 1.0, key)


def set_on_one_rank(stage: int, what: str, modifier_rank: int | None, checks: bool) -> Any:
    """Rank 1 alone sets its elements inside the context. What each rank raised there, and the weights after a step."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "enable_sanity_checks": checks,
        },
    }
    engine = deepspeed.initialize(model=Net(), config=config)[0]
    step(engine)
    found = []
    try:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier_rank):
            if dist.get_rank() == 1:
                set_local(engine.module.large.weight, what)
    except (StateError, CommError) as error:
        found.append(str(error))
    step(engine)
    after = values(list(engine.module.parameters()))
    engine.destroy()
    return found, after


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize(
    ("stage", "what"),
    swept(
        [(3, "weight"), (3, "state"), (1, "weight"), (2, "state")],
        lambda stage, what: stage == 3 or (stage, what) == (1, "weight"),
    ),
)
def test_a_rank_that_sets_its_elements_inside_the_context_parts_no_ranks(stage, what, modifier_rank, checks):
    (first, wanted), (second, after) = run_ranks(2, set_on_one_rank, stage, what, modifier_rank, checks, timeout_s=60)
    assert torch.equal(after, wanted)
    assert bool(first) == bool(second)
    if modifier_rank is None:
        assert not first


def replace_gradient_on_one_rank(stage: int) -> str:
    engine = create_engine(stage=stage, enable_sanity_checks=True)
    engine.backward(engine(torch.ones(1, 20)).square().mean())

    def replace_and_step() -> None:
        if dist.get_rank() == 1:
            grad = utils.safe_get_local_grad(engine.module.large.weight)
            utils.safe_set_local_grad(engine.module.large.weight, grad + 1.0)
        engine.step()
        step(engine)

    with pytest.raises(CommError) as caught:
        replace_and_step()
    forget()  # the group is of no more use: part of a sum may be in a buffer
    return str(caught.value)


@pytest.mark.parametrize("stage", swept([0, 1, 2, 3], lambda stage: stage in (0, 3)))
def test_a_gradient_that_one_rank_alone_replaces_is_an_error_on_all(stage):
    for found in run_ranks(2, replace_gradient_on_one_rank, stage, timeout_s=60):
        assert "rank" in found


def create_training_engine(**zero: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    return deepspeed.initialize(model=Net(), config=config)[0]


def write_in_context(zero: dict[str, Any], modifier_rank: int | None, folder: str) -> None:
    """An engine steps twice and loads inside a context: the same as outside of one, and what is read there is new."""
    wanted, engine = create_training_engine(**zero), create_training_engine(**zero)
    params = list(engine.module.parameters())
    step(wanted)
    first = values(list(wanted.module.parameters()))
    step(wanted)
    second = values(list(wanted.module.parameters()))
    with GatheredParameters(params, modifier_rank=modifier_rank):
        step(engine)
        assert torch.equal(torch.cat([param.detach().view(-1) for param in params]), first)
        step(engine)
    assert torch.equal(values(params), second)
    engine.save_checkpoint(folder)
    step(engine)
    with GatheredParameters(params, modifier_rank=modifier_rank):
        engine.load_checkpoint(folder)
        assert torch.equal(torch.cat([param.detach().view(-1) for param in params]), second)
    step(engine)
    step(wanted)
    assert torch.equal(values(params), values(list(wanted.module.parameters())))
    with GatheredParameters(params, modifier_rank=modifier_rank):
        if dist.get_rank() == 0:
            in_place(params[0])
        with pytest.raises((StateError, CommError), match="rank 0|leave the context before engine.step"):
            step(engine)
        forget()  # the group is of no more use
        raise EOFError


def write_in_context_job(*args: Any) -> None:
    with pytest.raises(EOFError):
        write_in_context(*args)


@pytest.mark.parametrize(
    ("zero", "modifier_rank"),
    swept(product([{}, OFFLOADED], [None, 0]), lambda zero, rank: bool(zero) == (rank is None)),
)
def test_a_step_and_a_load_inside_a_context_are_not_undone_at_its_end(zero, modifier_rank, tmp_path):
    run_ranks(2, write_in_context_job, zero, modifier_rank, str(tmp_path))


def change_on_one_rank(stage: int, keys: dict[str, Any]) -> torch.Tensor:
    """Rank 1 alone changes weights inside the context, in place and through `param.data`. Weights after two more."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if stage == 2 else {})},
        **keys,
    }
    engine = deepspeed.initialize(model=Net(), config=config)[0]
    x = torch.ones(1, 20, dtype=engine.module.small.dtype)
    for number in range(3):
        if number == 1:
            with GatheredParameters(list(engine.module.parameters()), modifier_rank=1), torch.no_grad():
                if dist.get_rank() == 1:
                    engine.module.large.weight.mul_(0.5)
                    engine.module.small.data.fill_(2.0)
        engine.backward(engine(x).square().mean())
        engine.step()
    found = values(list(engine.module.parameters()))
    engine.destroy()
    return found


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}])
def test_what_the_modifier_rank_changes_is_the_same_at_every_stage(keys):
    wanted, _ = run_ranks(2, change_on_one_rank, 3, keys)
    for stage in (0, 1, 2):
        for found in run_ranks(2, change_on_one_rank, stage, keys):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank, as peft's LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(20, 2, bias=False), nn.Linear(2, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))

    def merged(self) -> nn.Linear:
        self.base.weight.data += self.b.weight @ self.a.weight
        return self.base


def merge(inside: bool) -> tuple[bool, list[str]]:
    """Whether a model with its merged adapter computes as before, and the warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(20, 20)), nn.Tanh())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    }
    x, said = torch.randn(4, 20), []
    before = model(x)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module_hooks, "warn_once", said.append)
        with GatheredParameters(list(model.parameters()), modifier_rank=0) if inside else contextlib.nullcontext():
            model[0] = model[0].merged()
        after = engine(x)
        engine(x)
    engine.destroy()
    return torch.allclose(before, after, atol=1e-6), said


def test_an_adapter_that_is_merged_while_sharded_is_a_warning():
    for is_same, said in run_ranks(2, merge, False):
        assert not is_same
        (warning,) = said  # one, of all parts of the adapter
        assert "0.a.weight and more that the engine trains left the model" in warning
    assert run_ranks(2, merge, True) == [(True, []), (True, [])]
