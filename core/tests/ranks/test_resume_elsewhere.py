"""A checkpoint loads at any number of ranks, any stage and any precision, and training goes on as if unbroken."""

from functools import partial
from itertools import combinations, product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.index import TensorTable, read_index
from deepspeed.errors import CheckpointError
from deepspeed.ops.muon import Muon
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import TiedLM
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

WORLDS = (1, 2, 3)
STAGES = (0, 1, 2, 3)
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
NUM_SAMPLES = 6  # of a step, over all ranks


def create_engine(stage, precision, seed=0, threshold=10, bucket=40):
    torch.manual_seed(seed)
    zero = {"stage": stage, "reduce_bucket_size": bucket, "stage3_param_persistence_threshold": threshold}
    config = {
        "train_batch_size": NUM_SAMPLES,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        **PRECISIONS[precision],
    }
    net = TiedLM()
    groups = [
        {"params": [net.tokens.weight, net.gain]},
        {"params": [*net.block.parameters(), *net.unused.parameters()], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]


def train(engine, first, last):
    """The mean losses of the ranks in steps first .. last - 1, whose samples do not depend on their number."""
    losses = []
    for step in range(first, last):
        samples = torch.randint(11, (NUM_SAMPLES, 6), generator=torch.Generator().manual_seed(step))
        loss = engine(samples.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def place(folder, world_size, stage, precision):
    return str(Path(folder) / f"{world_size}-{stage}-{precision}")


def save_job(folder, mixes):
    """For each of `mixes`, a checkpoint after 3 steps; the states in it and the losses of 3 more steps."""
    results = {}
    for stage, precision in mixes:
        engine = create_engine(stage, precision)
        train(engine, 0, 3)
        engine.save_checkpoint(place(folder, dist.get_world_size(), stage, precision), client_state={"epoch": 3})
        at_save = states(engine)
        results[dist.get_world_size(), stage, precision] = at_save, train(engine, 3, 6)
        engine.destroy()
    return results


def states(engine):
    """Whole master weights and moments, and the frozen weight, which every precision holds as bf16 at least."""
    with GatheredParameters(list(engine.module.parameters())):
        values = [engine.module.frozen.weight.detach().bfloat16()]
    for name, param in engine.module.named_parameters():
        if param.requires_grad and not name.startswith("unused"):
            values.append(safe_get_full_fp32_param(param).float())
            values += [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
    return [value if value is None else value.clone() for value in values]


def resume_job(folder, pairs, results):
    for source, (stage, precision) in pairs:
        engine = create_engine(stage, precision, seed=1, bucket=60)  # other weights, never trained
        _, client = engine.load_checkpoint(place(folder, *source))
        assert client == {"epoch": 3}
        assert engine.global_steps == 3
        assert engine.module.calls == 3
        at_save, unbroken = results[source]
        assert all(map(torch.equal, states(engine), at_save)), (source, stage, precision)
        # low-precision forwards of other shapes round otherwise, and so do other precisions
        tolerance = 1e-5 if precision == source[2] == "fp32" else 1e-2
        assert train(engine, 3, 6) == pytest.approx(unbroken, rel=tolerance), (source, stage, precision)
        engine.destroy()


def weights_job(folder, pairs, results, flags):
    """Weights alone: those of the save, and the optimizer's state is new."""
    for source, (stage, precision) in pairs:
        engine = create_engine(stage, precision, seed=1, bucket=60)
        engine.load_checkpoint(place(folder, *source), **flags)
        found, (expected, _) = states(engine), results[source]
        is_exact = precision == source[2] == "fp32"  # else they may come from, or go through, weights in bf16
        compare = torch.equal if is_exact else partial(torch.allclose, rtol=2**-8)
        assert torch.equal(found[0], expected[0]), (source, stage, precision)
        masters = [(found[index], expected[index]) for index in range(1, len(found), 3)]
        assert all(compare(one, other) for one, other in masters), (source, stage, precision)
        assert not engine.optimizer.state or all(not state for state in engine.optimizer.state.values())
        engine.destroy()


def frozen_job(folder, pairs, results):
    """The whole model is frozen here, and what a checkpoint has of its training is only its weights."""
    for source, (stage, precision) in pairs:
        net = TiedLM().requires_grad_(False)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
        config = {"train_batch_size": NUM_SAMPLES, "zero_optimization": zero, **PRECISIONS[precision]}
        engine = deepspeed.initialize(model=net, config=config)[0]
        engine.load_checkpoint(place(folder, *source), load_module_only=True)
        (frozen, gain, _, _, tokens, *_), _ = results[source]  # in the order of `states`
        with GatheredParameters(list(net.parameters())):
            for param, expected in zip(
                (net.frozen.weight, net.gain, net.tokens.weight), (frozen, gain, tokens), strict=True
            ):
                torch.testing.assert_close(param.float(), expected.float(), rtol=2**-8, atol=0)
        engine.destroy()


MIXES = list(product(STAGES, PRECISIONS))
SOURCES = list(product(WORLDS, STAGES, PRECISIONS))


def is_covering(number, source, target):
    """Chosen so that any two of the six properties, of the save and of the load, meet in all ways."""
    return (5 * number + SOURCES.index(source) + 7 * MIXES.index(target)) % 16 == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of checkpoints of all worlds and mixes; what is in them, and the losses of unbroken runs."""
    folder = str(tmp_path_factory.mktemp("saved"))
    results = {}
    for world_size in WORLDS:
        results.update(run_ranks(world_size, save_job, folder, MIXES)[0])
    return folder, results


@pytest.mark.parametrize(
    ("world_size", "is_all"), swept(product(WORLDS, (False, True)), lambda world, is_all: not is_all)
)
def test_losses_continue_wherever_a_checkpoint_is_loaded(saved, world_size, is_all):
    folder, results = saved
    pairs = [pair for pair in product(SOURCES, MIXES) if is_all or is_covering(world_size, *pair)]
    run_ranks(world_size, resume_job, folder, pairs, results)


@pytest.mark.parametrize("world_size", swept(WORLDS, lambda world_size: world_size == 2))
def test_losses_continue_from_the_universal_format(saved, tmp_path, world_size):
    folder, results = saved
    pairs = [pair for pair in product(SOURCES, MIXES) if is_covering(world_size, *pair)]
    for source in {source for source, _ in pairs}:
        convert(place(folder, *source), place(tmp_path, *source), "universal")
    run_ranks(world_size, resume_job, str(tmp_path), pairs, results)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    swept(
        product(WORLDS, ({"load_optimizer_states": False}, {"load_module_only": True})),
        lambda world_size, flags: (world_size == 2) == ("load_module_only" in flags),
    ),
)
def test_weights_alone_load_wherever_a_checkpoint_is_loaded(saved, world_size, flags):
    folder, results = saved
    pairs = [pair for pair in product(SOURCES, MIXES) if is_covering(world_size, *pair)]
    run_ranks(world_size, weights_job, folder, pairs, results, flags)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_frozen_model_takes_the_weights(saved, world_size):
    folder, results = saved
    pairs = [pair for pair in product(SOURCES, MIXES) if is_covering(world_size, *pair)]
    run_ranks(world_size, frozen_job, folder, pairs, results)


def read_piece(folder, piece):
    """Elements of a value, of whose file nothing is known but the byte at which they begin."""
    dtype = getattr(torch, piece.dtype)
    with open(folder / piece.file, "rb") as file:
        file.seek(piece.offset)
        return torch.frombuffer(bytearray(file.read(piece.numel * dtype.itemsize)), dtype=dtype)


def test_the_index_says_where_every_value_is(saved):
    """In every checkpoint, of any number of ranks, stage and precision; compared with what the engine had."""
    folder, results = saved
    names = [name for name, param in TiedLM().named_parameters() if param.requires_grad and "unused" not in name]
    for source in SOURCES:
        tag = Path(place(folder, *source)) / "global_step3"
        table = TensorTable(read_index(tag))

        def value(name, *kinds, tag=tag, table=table):
            entry = table.entry(name)
            pieces = next(entry.values[kind] for kind in kinds if kind in entry.values)
            return torch.cat([read_piece(tag, piece) for piece in pieces]).view(entry.shape)

        found = [value("frozen.weight", "weight").bfloat16()]
        for name in names:
            found += [value(name, *kinds) for kinds in (("fp32", "weight"), ("exp_avg",), ("exp_avg_sq",))]
        expected, _ = results[source]
        assert all(map(torch.equal, found, expected)), source
        assert table.entry("head.weight").values == table.entry("tokens.weight").values
        assert value("calls", "weight") == 3


def test_any_two_properties_meet():
    rows = [
        (*pair[0], world, *pair[1]) for world in WORLDS for pair in product(SOURCES, MIXES) if is_covering(world, *pair)
    ]
    values = [WORLDS, STAGES, tuple(PRECISIONS)] * 2
    for one, other in combinations(range(6), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(values[one], values[other]))


# ---- other orders, other names, other optimizers ---------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of one shape, run in the order of their names, whatever the order in which they are made."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        for _, layer in sorted(self.named_children()):
            x = layer(x).tanh()
        return x.square().mean()


def create_layers(names, stage, kind, is_reversed=False):
    torch.manual_seed(len(names) + is_reversed)
    net = Layers(names)
    params = list(net.parameters())[:: -1 if is_reversed else 1]
    make = {"SGD": partial(torch.optim.SGD, momentum=0.9), "Adam": torch.optim.Adam, "Muon": Muon}[kind]
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=net, optimizer=make(params, lr=0.1), config=config)[0]


def train_layers(engine, first, last):
    for step in range(first, last):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(x))
        engine.step()
    optimizer, values = engine.basic_optimizer, {}
    for name, param in engine.module.named_parameters():
        is_adam = isinstance(optimizer, torch.optim.Adam) or (isinstance(optimizer, Muon) and param.dim() < 2)
        moment = safe_get_full_optimizer_state(param, "exp_avg" if is_adam else "momentum_buffer")
        values[name] = safe_get_full_fp32_param(param).clone(), moment.clone()
    return values


def save_layers_job(folder, stage, kind):
    engine = create_layers("abc", stage, kind)
    at_save = train_layers(engine, 0, 3)
    engine.save_checkpoint(folder, tag="a")
    later = train_layers(engine, 3, 5)
    engine.destroy()
    return at_save, later


def load_layers_job(folder, tag, stage, kind, names, is_reversed):
    engine = create_layers(names, stage, kind, is_reversed)
    engine.load_checkpoint(folder, tag=tag)
    at_load = train_layers(engine, 3, 3)
    later = train_layers(engine, 3, 5)
    engine.destroy()
    return at_load, later


@pytest.mark.parametrize(("names", "is_reversed"), [("cab", False), ("abc", True)])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_in_another_order_are_found_by_their_names(tmp_path, stage, names, is_reversed):
    expected, _ = run_ranks(2, save_layers_job, str(tmp_path), stage, "Adam")
    found, _ = run_ranks(2, load_layers_job, str(tmp_path), "a", stage, "Adam", names, is_reversed)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name])


def renamed_job(folder, stage):
    engine = create_layers("abd", stage, "Adam")
    with pytest.raises(CheckpointError, match=r"found none of the parameter d\.weight, which this run trains"):
        engine.load_checkpoint(folder, load_module_strict=False)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_of_another_name_does_not_get_the_states_in_its_place(tmp_path, stage):
    run_ranks(2, save_layers_job, str(tmp_path), stage, "Adam")
    run_ranks(2, renamed_job, str(tmp_path), stage)


@pytest.mark.parametrize("form", ["universal", "dcp"])
@pytest.mark.parametrize(("kind", "stage"), [*product(["SGD", "Muon"], STAGES)])
def test_a_conversion_keeps_the_states_of_optimizers_that_count_no_steps(tmp_path, kind, stage, form):
    expected, _ = run_ranks(2, save_layers_job, str(tmp_path / "saved"), stage, kind)
    convert(tmp_path / "saved", tmp_path / form if form == "universal" else tmp_path / form / "a_dcp", form)
    found, _ = run_ranks(2, load_layers_job, str(tmp_path / form), f"a_{form}", stage, kind, "abc", False)
    for one, other in zip(found, expected, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name])
