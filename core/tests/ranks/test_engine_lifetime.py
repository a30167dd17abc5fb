"""An engine lives as long as somebody refers to it, and what it leaves may be trained by another, at every stage."""

import copy
import gc
import pickle
import re
import weakref
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import CheckpointError, ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

BATCHES = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))


class Keeps(nn.Module):
    """Keeps a tensor of its forward, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        return self.last(torch.tanh(self.kept)).square().mean()

    def generate(self, x: Tensor) -> Tensor:
        return self(x)


def create_engine(
    model: nn.Module,
    stage: int,
    optimizer: Any = None,
    *,
    is_hybrid: bool = False,
    is_bf16: bool = False,
    **zero: Any,
) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "hybrid_engine": {"enabled": is_hybrid},
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    if optimizer is None:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, batches: Any) -> list[float]:
    rank, losses = dist.get_rank(), []
    for batch in batches:
        loss = engine(batch[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        engine.step()
        both = loss.detach().clone()
        dist.all_reduce(both)
        losses.append(both.item() / dist.get_world_size())
    return losses


# ---- what is freed --------------------------------------------------------------------------------------------------


def freed_job(stage: int, how: str, is_leaf: bool, zero: dict[str, Any]) -> None:
    model = Keeps()
    set_z3_leaf_module(model, is_leaf)
    engine = create_engine(model, stage, **zero)
    loss = engine(BATCHES[0][:2])
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        engine(BATCHES[0][:2])
    loss = engine(BATCHES[0][:2])  # its graph is kept by the model, and the loss by the user
    refs = {"module": weakref.ref(model), "engine": weakref.ref(engine), "sharding": weakref.ref(engine.sharding)}
    refs |= {name: weakref.ref(param) for name, param in model.named_parameters()}
    if how == "destroyed":
        engine.destroy()
    del engine, model
    gc.collect()
    left = [name for name in ("module", "engine", "sharding") if refs[name]() is not None]
    assert left == [], left
    del loss
    gc.collect()
    left = [name for name, ref in refs.items() if ref() is not None]
    assert left == [], left


@pytest.mark.parametrize(
    ("stage", "how", "is_leaf", "zero"),
    swept(
        [
            (stage, how, is_leaf, zero)
            for stage, how in product(range(4), ("destroyed", "dropped"))
            for is_leaf, zero in (
                [(False, {})]
                if stage < 3
                else [
                    (False, {}),
                    (True, {}),
                    (False, {"offload_param": {"device": "cpu"}}),
                    (False, {"stage3_max_reuse_distance": 0}),
                ]
            )
        ],
        lambda stage, how, is_leaf, zero: (
            stage == 3 or (stage, how) in {(0, "dropped"), (1, "dropped"), (2, "destroyed")}
        ),
    ),
)
def test_a_kept_tensor_of_a_forward_keeps_neither_module_nor_engine(stage, how, is_leaf, zero):
    run_ranks(2, freed_job, stage, how, is_leaf, zero)


def dropped_job(stage: int) -> list[float]:
    """The module and the user's own optimizer stay; nobody can destroy the engine any more."""
    torch.manual_seed(0)
    model = Keeps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = create_engine(model, stage, optimizer)
    losses = train(engine, BATCHES[:3])
    sharding = weakref.ref(engine.sharding)
    del engine
    gc.collect()
    assert sharding() is None
    with torch.no_grad():  # the module can still be used
        rank = dist.get_rank()
        loss = model(BATCHES[3][2 * rank : 2 * rank + 2])
    dist.all_reduce(loss)
    optimizer.zero_grad()
    engine = create_engine(model, stage, torch.optim.SGD(model.parameters(), lr=0.1))
    losses += train(engine, BATCHES[3:])
    assert loss.item() / 2 == pytest.approx(losses[3], rel=1e-5)
    hooks = sum(len(param._post_accumulate_grad_hooks or {}) for param in model.parameters())
    assert hooks <= 4, "those of the first engine are gone"
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", range(4))
def test_a_dropped_engine_lets_go(stage):
    torch.manual_seed(0)
    model = Keeps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [plain_step(model, optimizer, batch) for batch in BATCHES]
    for losses in run_ranks(2, dropped_job, stage):
        assert losses == pytest.approx(expected, rel=1e-4)


def dropped_hybrid_job(stage: int) -> None:
    """The module's `generate` leads to its engine, and keeps none."""
    model, batch = Keeps(), BATCHES[0][:2]
    generate = model.generate
    engine = create_engine(model, stage, is_hybrid=True)
    wanted = model.generate(batch)
    assert engine.generation_times.num_calls == 1
    ref = weakref.ref(engine)
    del engine
    gc.collect()
    assert ref() is None
    with torch.no_grad():
        assert torch.equal(model.generate(batch), wanted)
    engine = create_engine(model, stage, is_hybrid=True)
    assert torch.equal(model.generate(batch), wanted)
    assert engine.generation_times.num_calls == 1
    if stage < 3:  # sharded weights are not copied
        for reference in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
            model.first.weight.data.mul_(2)
            assert torch.equal(reference.generate(batch), wanted)
            assert not torch.equal(model.generate(batch), wanted)
            model.first.weight.data.div_(2)
            assert engine.generation_times.num_calls == 2
            engine.generation_times.num_calls = 1
            other = create_engine(reference, stage, is_hybrid=True)
            assert torch.equal(reference.generate(batch), wanted)
            assert other.generation_times.num_calls == 1
            other.destroy()
            assert "generate" not in vars(reference)
    engine.destroy()
    assert "generate" not in vars(model)
    assert model.generate == generate


@pytest.mark.parametrize("stage", range(4))
def test_a_module_that_generates_keeps_no_engine(stage):
    run_ranks(2, dropped_hybrid_job, stage)


# ---- two engines ----------------------------------------------------------------------------------------------------


class Adapters(nn.Module):
    """A frozen base and two adapters, of which one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.which = nn.Linear(8, 8), "first"
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + getattr(self, self.which)(x)).square().mean()

    def select(self, which: str, *, trains_base: bool = False) -> torch.optim.Optimizer | None:
        """The next forwards use `which`; an optimizer of what trains then."""
        self.which = which
        for name, param in self.named_parameters():
            param.requires_grad_(name.startswith(which) or (trains_base and name.startswith("base")))
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.1)


def plain_step(model: nn.Module, optimizer: Any, batch: Tensor) -> float:
    loss = (model(batch[:2]) + model(batch[2:])) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def create_adapters() -> Adapters:
    torch.manual_seed(0)
    return Adapters()


#: (adapter, batches); the base is trained with the second adapter where the job says so
TURNS = [("first", slice(0, 2)), ("second", slice(2, 4)), ("first", slice(4, 5)), ("second", slice(5, 6))]


def plain_turns(trains_base: bool) -> list[float]:
    model, optimizers, losses = create_adapters(), {}, []
    for which, part in TURNS:
        new = model.select(which, trains_base=trains_base and which == "second")
        optimizer = optimizers.setdefault(which, new)
        losses += [plain_step(model, optimizer, batch) for batch in BATCHES[part]]
    return losses


def turns_job(stage: int, trains_base: bool, zero: dict[str, Any], built_in_init: bool, ends_first: str) -> list[float]:
    with deepspeed.zero.Init(enabled=built_in_init):
        model = create_adapters()
    engines: dict[str, Any] = {}
    losses: list[float] = []
    for which, part in TURNS:
        optimizer = model.select(which, trains_base=trains_base and which == "second")
        if which not in engines:
            engines[which] = create_engine(model, stage, optimizer, **zero)
        losses += train(engines[which], BATCHES[part])
    engines.pop(ends_first).destroy()
    ((last, engine),) = engines.items()
    model.select(last)
    with torch.no_grad():
        before = engine(BATCHES[0])
    engine.destroy()
    assert torch.equal(model(BATCHES[0]), before), "weights are whole when both are gone"
    return losses


OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
#: small parameters are whole / all of the model is one unit / units are released at once
KEYS: list[dict[str, Any]] = [
    {},
    {"stage3_param_persistence_threshold": 10**5},
    {"stage3_module_granularity_threshold": 10**6},
]
KEYS += [{"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, OFFLOADED]


@pytest.mark.parametrize(
    ("stage", "trains_base", "zero", "built_in_init", "ends_first"),
    swept(
        [
            (stage, trains_base, zero, built_in_init, ends_first)
            for stage, trains_base, zero, built_in_init, ends_first in product(
                range(4), [False, True], KEYS, [False, True], ["first", "second"]
            )
            if stage == 3 or not (zero or built_in_init)
        ],
        lambda stage, trains_base, zero, built_in_init, ends_first: (
            (trains_base and (built_in_init == bool(zero) if stage == 3 else stage > 0) and ends_first == "first")
            or (stage, zero, ends_first, built_in_init) == (3, {}, "second", False)
        ),
    ),
)
def test_what_one_engine_froze_another_trains(stage, trains_base, zero, built_in_init, ends_first):
    expected = plain_turns(trains_base)
    for losses in run_ranks(2, turns_job, stage, trains_base, zero, built_in_init, ends_first):
        assert losses == pytest.approx(expected, rel=1e-4)


def same_job(stage: int) -> str:
    model = create_adapters()
    engine = create_engine(model, stage, model.select("first"))
    with pytest.raises(ConfigError) as caught:
        create_engine(model, stage, model.select("first", trains_base=True))
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_living_engine_trains_is_refused_by_name(stage):
    for said in run_ranks(2, same_job, stage):
        assert "'first.weight', that another engine trains; call destroy() on that engine first" in said
        assert "accelerator.free_memory()" in said  # for those who never call initialize themselves
        assert "trainer.strategy.deepspeed_engine.destroy()" in said


def weights_of(model: nn.Module) -> list[Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


def checkpoint_job(folder: str, stage: int, zero: dict[str, Any], is_bf16: bool, is_part: bool) -> list[str]:
    """An engine without optimizer loads into what another one trains, and says why it does not save it."""
    model = create_adapters()
    model = model.bfloat16() if is_bf16 else model
    optimizer = model.select("first", trains_base=True)
    engine = create_engine(model, stage, optimizer, is_bf16=is_bf16, **zero)
    batches = BATCHES.bfloat16() if is_bf16 else BATCHES
    train(engine, batches[:1])
    engine.save_checkpoint(folder)
    wanted, losses = weights_of(model), train(engine, batches[1:4])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": is_bf16},
    }
    seen = nn.ModuleDict({"base": model.base}) if is_part else model
    evaluating = deepspeed.initialize(model=seen, config=config)[0]
    if not is_part:
        with torch.no_grad():
            evaluating(batches[0][:2])
    said = ""
    try:
        evaluating.save_checkpoint(f"{folder}/evaluating")
    except StateError as error:
        said = str(error)
    evaluating.load_checkpoint(folder, load_optimizer_states=False, load_module_strict=not is_part)
    found = weights_of(model)
    assert [torch.equal(*each) for each in zip(found, wanted, strict=True)] == (
        [True, True, False, False, True, True] if is_part else [True] * 6  # the last two are not trained
    )
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    if not is_part:
        again = train(engine, batches[1:4])  # SGD has no states: from the same weights the same
        assert again == pytest.approx(losses, rel=2e-2 if is_bf16 else 1e-6)
        assert again[0] == pytest.approx(losses[0], rel=1e-6)
    engine.load_checkpoint(folder)
    assert all(map(torch.equal, weights_of(model), wanted))
    evaluating.destroy()
    engine.destroy()
    return [said]


#: ranks, stage, zero_optimization, in bf16, only a part of the module is in the engine that loads
LOADS: list[tuple[int, int, dict[str, Any], bool, bool]] = [
    *((2, stage, {}, is_bf16, is_part) for stage, is_bf16, is_part in product([2, 3], [False, True], [False, True])),
    *((1, 3, {}, is_bf16, False) for is_bf16 in (False, True)),
    *((2, 3, zero, is_bf16, is_part) for zero, is_bf16, is_part in product(KEYS[1:], [False, True], [False, True])),
]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "zero", "is_bf16", "is_part"),
    swept(
        LOADS,
        lambda num_ranks, stage, zero, is_bf16, is_part: (
            (is_bf16 and not is_part and (stage == 2 or not zero or zero == OFFLOADED))
            or (stage == 3 and not is_bf16 and is_part == bool(zero))
        ),
    ),
)
def test_an_engine_loads_what_another_one_trains(tmp_path, num_ranks, stage, zero, is_bf16, is_part):
    """As Lightning's `test(ckpt_path=...)` after `fit`. It does not save it: the file of a shard would lack them."""
    for (said,) in run_ranks(num_ranks, checkpoint_job, str(tmp_path), stage, zero, is_bf16, is_part):
        words = "save_checkpoint: found . parameters, such as 'base.weight', that another engine trains or has sharded"
        assert bool(re.match(words, said)) == (stage == 3), said


def borrowing_job(folder: str, zero: dict[str, Any]) -> None:
    """An engine with an optimizer, too, loads what another one trains."""
    model = create_adapters()
    first = create_engine(model, 3, model.select("first", trains_base=True), **zero)
    second = create_engine(model, 3, model.select("second"), **zero)
    train(second, BATCHES[:1])
    second.save_checkpoint(folder)
    wanted, losses = weights_of(model), train(second, BATCHES[1:3])
    model.select("first", trains_base=True)
    train(first, BATCHES[3:])
    second.load_checkpoint(folder)
    assert all(map(torch.equal, weights_of(model), wanted))
    model.select("second")
    assert train(second, BATCHES[1:3]) == pytest.approx(losses, rel=1e-6)
    second.destroy()
    first.destroy()


@pytest.mark.parametrize("zero", swept(KEYS, lambda zero: not zero))
def test_an_engine_that_trains_loads_what_it_shares(tmp_path, zero):
    run_ranks(2, borrowing_job, str(tmp_path), zero)


def moved_job(folder: str) -> str:
    model = create_adapters()
    engine = create_engine(model, 3, model.select("first"))
    engine.save_checkpoint(folder)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    evaluating = deepspeed.initialize(model=model, config=config)[0]
    engine.offload_states()
    with pytest.raises(StateError) as caught:
        evaluating.load_checkpoint(folder)
    engine.reload_states()
    evaluating.load_checkpoint(folder)
    return str(caught.value)


def test_an_engine_does_not_load_what_another_one_has_moved(tmp_path):
    for said in run_ranks(2, moved_job, str(tmp_path)):
        assert "in host memory since offload_states(); call engine.reload_states() first" in said


def other_shape_job(folder: str) -> list[str]:
    """What is said of a frozen parameter that has another shape in the file."""
    engine = create_engine(nn.Sequential(nn.Linear(8, 16, bias=False)), 3)
    engine.save_checkpoint(folder)
    said = []
    for num_in, num_out in ((16, 8), (8, 20)):
        frozen = nn.Linear(num_in, num_out, bias=False).requires_grad_(False)
        other = create_engine(nn.Sequential(frozen, nn.Linear(num_out, 2)), 3)
        with pytest.raises(CheckpointError) as caught:
            other.load_checkpoint(folder, load_optimizer_states=False, load_module_strict=False)
        said.append(str(caught.value))
    return said


def test_a_frozen_parameter_of_another_shape_is_not_loaded(tmp_path):
    for said in run_ranks(2, other_shape_job, str(tmp_path)):
        shapes = [r"\(8, 16\)", r"\(20, 8\)"]
        for text, shape in zip(said, shapes, strict=True):
            assert re.search(rf"0.weight: found shape \(16, 8\), and the model has {shape}", text), text
