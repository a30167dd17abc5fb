"""A checkpoint has a file for each layer of a pipeline and for each expert, with DeepSpeed's names and contents.

`before-files-of-layers.tar.xz` is what `downstream/original/train.py save` made on two ranks with an earlier version of
this package, which had the layers in `mp_rank_*` and the experts in `expert_rank_*`.
"""

import importlib.util
import json
import shutil
import tarfile
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.index import TensorTable, read_index
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe.topology import PipeModelDataParallelTopology
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

BEFORE = Path(__file__).with_name("before-files-of-layers.tar.xz")
CASES = ("0-fp32-pipe", "1-fp32-pipe", "0-fp32-moe", "1-fp32-moe")
LAYERS = (0, 1, 2, 3, 5)  # 4 is a function, 6 shares its weights through one


def load_script():
    path = Path(__file__).parents[3] / "downstream/original/train.py"
    spec = importlib.util.spec_from_file_location("downstream_original_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_job(folder, cases):
    script = load_script()
    for case in cases:
        script.save(folder, case)


def load_job(folder, pairs):
    script = load_script()
    for case, target in pairs:
        script.load(folder, case, target)


def check_losses(folder, pairs, world_size):
    for case, target in pairs:
        unbroken = json.loads((folder / f"{case}.save.json").read_text())[3:]
        found = json.loads((folder / f"{case}.{target}.{world_size}.json").read_text())
        assert found == pytest.approx(unbroken, rel=1e-5), (case, target)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "index.json")


def read(folder, name):
    return torch.load(folder / name, weights_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_job, folder, CASES)
    return folder


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(BEFORE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 may have none
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_of_a_pipeline(saved, stage):
    folder = saved / f"{stage}-fp32-pipe" / "global_step3"
    layers = [f"layer_{index:02d}-model_states.pt" for index in LAYERS]
    ranks = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(2)]
    shards = [f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(2)] if stage else []
    assert names_in(folder) == [*layers, *ranks, *shards]
    keys = [list(read(folder, name)) for name in layers]
    block = ["scale", "inner.weight", "inner.bias"]
    assert keys == [["weight"], block, [], block, block], "the names that the layer itself has"
    models = [read(folder, name) for name in ranks]
    assert [model["module"] for model in models] == [None, None]
    assert [model["mp_world_size"] for model in models] == [2, 2]
    assert models[1]["epoch"] == 3
    assert all((model["optimizer"] is None) == (stage > 0) for model in models)


@pytest.mark.parametrize("stage", [0, 1])
def test_experts(saved, stage):
    folder = saved / f"{stage}-fp32-moe" / "global_step3"
    experts = [f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt" for layer in (0, 1) for expert in range(4)]
    states = [f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)] if stage else []
    assert names_in(folder) == sorted([*experts, *states, "mp_rank_00_model_states.pt", *shards])
    own = "mixtures.1.deepspeed_moe.experts.deepspeed_experts.2"
    assert list(read(folder, "layer_1_expert_2_mp_rank_00_model_states.pt")) == [f"{own}.weight", f"{own}.bias"]
    model = read(folder, "mp_rank_00_model_states.pt")
    assert "mixtures.0.deepspeed_moe.gate.wg.weight" in model["module"]
    assert not any("experts" in name for name in model["module"])
    assert (model["num_experts"], model["optimizer"]) == ([4, 4], None)
    assert all((read(folder, name)["optimizer"] is None) == (stage > 0) for name in states)


def pipeline_job(folder, stage, topology):
    deepspeed.init_distributed()
    script = load_script()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    if topology is None:
        module = script.create_pipeline(2)
    else:
        layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(3)]
        module = PipelineModule(layers, topology=PipeModelDataParallelTopology(*topology), loss_fn=torch.nn.L1Loss())
    engine = deepspeed.initialize(model=module, config=config)[0]
    if topology is None:
        engine.train_batch(iter([(torch.zeros(1, 3).long(),) * 2]))
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


@pytest.mark.parametrize("stage", swept([0, 1, 2, 3], lambda stage: stage == 1))
def test_copies_of_a_stage_write_its_layers_once(tmp_path, stage):
    run_ranks(4, pipeline_job, tmp_path, stage, None)
    names = [name for name in names_in(tmp_path / "a") if name.startswith("layer")]
    assert names == [f"layer_{index:02d}-model_states.pt" for index in LAYERS if stage < 3]


@pytest.mark.parametrize(("world", "sizes"), [(4, (2, 2, 1)), (2, (2, 1, 1))])
def test_a_topology_with_slices_has_their_numbers_in_the_names(tmp_path, world, sizes):
    """Megatron's, also with one slice."""
    run_ranks(world, pipeline_job, tmp_path, 0, sizes)
    names = [name for name in names_in(tmp_path / "a") if name.startswith("layer")]
    places = product(range(3), range(sizes[1]))
    assert names == [f"layer_{index:02d}-model_{slice_:02d}-model_states.pt" for index, slice_ in places]


class Stacked(torch.nn.Module):
    def __init__(self, ep_size):
        super().__init__()
        self.moe = MoE(6, lambda: ExpertMLP(6, 5), 4, ep_size=ep_size, k=1, drop_tokens=False)

    def forward(self, x):
        return self.moe(x)[0].square().mean()


def stacked_job(folder, ep_size, stage, load):
    deepspeed.init_distributed()
    torch.manual_seed(0 if not load else 1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=Stacked(ep_size), config=config)[0]
    if load:
        engine.load_checkpoint(folder, tag="a")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    losses = []
    for step in range(3):
        loss = engine(x)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if step == 0 and not load:
            engine.save_checkpoint(folder, tag="a")
    engine.destroy()
    return losses


STACKED = [((2, 2, 0), (1, 1, 0)), ((1, 1, 0), (1, 1, 0)), ((1, 1, 1), (2, 2, 2)), ((4, 2, 1), (2, 1, 0))]


@pytest.mark.parametrize(("source", "target"), STACKED)
def test_experts_that_are_stacked_have_files_of_their_own(tmp_path, source, target):
    """(ranks, ep_size, stage) of the save and of the load."""
    unbroken = run_ranks(source[0], stacked_job, tmp_path, *source[1:], False)[0]
    for expert in range(4):
        state = read(tmp_path / "a", f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
        own = f"moe.deepspeed_moe.experts.deepspeed_experts.{expert}"
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        assert shapes == {f"{own}.up.weight": (5, 6), f"{own}.down.weight": (6, 5)}
    for losses in run_ranks(target[0], stacked_job, tmp_path, *target[1:], True):
        assert losses[:2] == pytest.approx(unbroken[1:], rel=1e-5)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "a")
    assert weights["moe.deepspeed_moe.experts.up"].shape == (4, 5, 6)


PAIRS = {
    "pipe": [(f"{case}-fp32-pipe", f"{target}-fp32-pipe") for case in (0, 1) for target in (0, 1, 2, 3)],
    "moe": [(f"{case}-fp32-moe", f"{target}-fp32-moe") for case in (0, 1) for target in (0, 1, 2, 3)],
}


WORLDS = [("pipe", 1), ("pipe", 2), ("pipe", 3), ("moe", 1), ("moe", 2), ("moe", 4)]


def some(kind, world_size):
    return PAIRS[kind][world_size % 3 :: 3]


@pytest.mark.parametrize(("kind", "world_size"), WORLDS)
def test_what_an_earlier_version_saved_loads(before, kind, world_size):
    pairs = some(kind, world_size)
    run_ranks(world_size, load_job, before, pairs)
    check_losses(before, pairs, world_size)


@pytest.mark.parametrize(("kind", "world_size"), WORLDS)
def test_losses_go_on_on_other_ranks(saved, kind, world_size):
    pairs = some(kind, world_size)
    run_ranks(world_size, load_job, saved, pairs)
    check_losses(saved, pairs, world_size)


OURS = ("ds_module_files", "ds_module_rest", "ds_model_parallel", "ds_optimizer_file", "ds_data_rank", "shared_params")


def as_deepspeeds(folder, target, case):
    """A tag with only the keys that DeepSpeed writes."""
    shutil.copytree(folder / case, target / case)
    shutil.copy(folder / f"{case}.save.json", target)
    tag = target / case / "global_step3"
    (tag / "index.json").unlink()
    for path in tag.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        if path.name.startswith("mp_rank"):
            state = {key: value for key, value in state.items() if key not in OURS} | {"ds_version": "0.19.6"}
        if isinstance(state.get("optimizer"), dict):
            del state["optimizer"]["param_names"]
            state = {"optimizer": state["optimizer"]} if path.name.startswith("expp") else state
        if path.name.startswith(("mp_rank", "expp")):
            if case != "1-fp32-pipe":
                state.pop("param_shapes", None)
            torch.save({key: value for key, value in state.items() if key not in OURS}, path)


THEIRS = [
    (1, "0-fp32-pipe", "1-fp32-pipe"),
    (2, "0-fp32-pipe", "0-fp32-pipe"),
    (3, "0-fp32-pipe", "2-fp32-pipe"),
    (1, "1-fp32-pipe", "3-fp32-pipe"),
    (2, "1-fp32-pipe", "1-fp32-pipe"),
    (3, "1-fp32-pipe", "0-fp32-pipe"),
]


@pytest.fixture(scope="module")
def theirs(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    for case in CASES:
        as_deepspeeds(saved, folder, case)
    return folder


@pytest.mark.parametrize(("world_size", "case", "target"), THEIRS)
def test_what_has_deepspeeds_keys_only_loads(theirs, world_size, case, target):
    run_ranks(world_size, load_job, theirs, [(case, target)])
    check_losses(theirs, [(case, target)], world_size)


def weights_job(folder, case, target, seed):
    engine = load_script().create_engine(target, seed=seed)
    engine.load_checkpoint(str(folder / case), load_optimizer_states=False)
    losses = load_script().train(engine, 3, 4)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("world_size", "case", "target"), [(1, "0-fp32-moe", "2-fp32-moe"), (2, "1-fp32-moe", "0-fp32-moe")]
)
def test_experts_with_deepspeeds_keys_only_load_without_states(theirs, world_size, case, target):
    expected = json.loads((theirs / f"{case}.save.json").read_text())[3]
    for losses in run_ranks(world_size, weights_job, theirs, case, target, 1):
        assert losses == pytest.approx([expected], rel=1e-5)


def refused_job(folder, case):
    engine = load_script().create_engine(case, seed=1)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(folder / case))
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("case", CASES[2:])
def test_states_of_experts_without_names_are_refused(theirs, case):
    for told in run_ranks(2, refused_job, theirs, case):
        assert "do not name the parameters of the optimizer's state; load it with load_optimizer_states=False" in told


@pytest.mark.parametrize("case", CASES[:2])
def test_fp32_weights_of_deepspeeds_layers(theirs, case):
    """Without ZeRO the files do not say the names of shared modules."""
    found = get_fp32_state_dict_from_zero_checkpoint(theirs / case)
    expected = {f"{index}.{name}" for index in (1, 3, 5) for name in ("scale", "inner.weight", "inner.bias")}
    assert found.keys() == expected | {"0.weight" if case.startswith("0") else "tied_modules.embed.weight"}


def save_again_job(source, target, cases):
    for case in cases:
        engine = load_script().create_engine(case, seed=1)
        engine.load_checkpoint(str(source / case))
        engine.save_checkpoint(str(target / case))
        engine.destroy()


@pytest.fixture(scope="module")
def saved_again(before, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved_again")
    run_ranks(2, save_again_job, before, folder, CASES)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_fp32_weights_are_those_of_the_earlier_form(saved_again, before, case):
    found, expected = (get_fp32_state_dict_from_zero_checkpoint(folder / case) for folder in (saved_again, before))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("case", CASES[:2])
def test_the_index_says_where_the_weights_of_layers_are(saved, case):
    index = read_index(saved / case / "global_step3")
    entry = TensorTable(index).entry("3.inner.weight", 0)
    (piece,) = entry.values["weight"]
    assert (piece.file, piece.key) == ("layer_03-model_states.pt", ("inner.weight",))
    assert "exp_avg" in entry.values
    (tag,) = saved_tags(saved / case)
    assert not tag.faults(content=True)


def test_a_missing_or_other_file_of_a_layer_is_named(saved, tmp_path):
    folder = saved / "1-fp32-pipe" / "global_step3"
    copy = tmp_path / "tag"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != "index.json":
            (copy / path.name).write_bytes(path.read_bytes())
    layer = copy / "layer_03-model_states.pt"
    torch.save({"other": torch.zeros(1)}, layer)
    with pytest.raises(CheckpointError, match=r"layer_03-model_states\.pt has nothing under 'scale'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "tag")
    layer.unlink()
    with pytest.raises(CheckpointError, match=r"layer_03-model_states\.pt cannot be read"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "tag")
    model = read(copy, "mp_rank_00_model_states.pt")
    model["ds_module_files"] = {"../layer_00-model_states.pt": {"weight": "0.weight"}}
    torch.save(model, copy / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="which is no name of one"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "tag")
