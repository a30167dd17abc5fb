"""An engine lives as long as somebody refers to it, and what it leaves may be trained by another, at every stage."""

import copy
import gc
import pickle
import weakref
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError, StateError
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


def create_engine(model: nn.Module, stage: int, optimizer: Any = None, is_hybrid: bool = False, **zero: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "hybrid_engine": {"enabled": is_hybrid},
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


def checkpoint_job(folder: str, stage: int, threshold: int) -> list[str]:
    """What an engine without optimizer says when it is to save and to load what another one trains."""
    model = create_adapters()
    optimizer = model.select("first", trains_base=True)
    engine = create_engine(model, stage, optimizer, stage3_param_persistence_threshold=threshold)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    evaluating = deepspeed.initialize(model=model, config=config)[0]
    train(engine, BATCHES[:1])
    said = []
    for call in (evaluating.save_checkpoint, evaluating.load_checkpoint):
        try:
            call(folder)
        except StateError as error:
            said.append(str(error))
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    evaluating.destroy()
    engine.destroy()
    return said


@pytest.mark.parametrize(("stage", "threshold"), [(2, 0), (3, 0), (3, 10**5)])
def test_an_engine_does_not_save_what_another_one_shards(tmp_path, stage, threshold):
    """Nor small parameters beside them: the file of a shard would lack them."""
    num = 4 if threshold else 6  # those that the other engine froze are whole
    for said in run_ranks(2, checkpoint_job, str(tmp_path), stage, threshold):
        assert len(said) == (2 if stage == 3 else 0)
        for call, text in zip(("save", "load"), said):
            words = f"{call}_checkpoint: found {num} parameters, such as 'base.weight', that another engine"
            assert text.startswith(words)
