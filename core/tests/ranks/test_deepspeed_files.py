"""Files that DeepSpeed 0.19.6 wrote load here, at any number of ranks and any stage, and losses continue.

`deepspeed-0.19.6.tar.xz` is what `downstream/original/train.py save` made with it on two ranks.
"""

import importlib.util
import json
import shutil
import tarfile
from itertools import product
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, consolidate
from deepspeed.errors import CheckpointError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

FILES = Path(__file__).with_name("deepspeed-0.19.6.tar.xz")
CASES = ("0-fp32", "0-bf16", "1-fp32", "2-bf16", "3-fp32-subgroups")
UNIVERSAL = ("universal-1-fp32", "universal-3-fp32-subgroups")  # made of the others by DeepSpeed's ds_to_universal
TARGETS = ("0-fp32", "1-bf16", "2-fp32", "3-fp32", "3-bf16")


def load_script():
    path = Path(__file__).parents[3] / "downstream/original/train.py"
    spec = importlib.util.spec_from_file_location("downstream_original_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with tarfile.open(FILES) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 may have none
        archive.extractall(folder)
    return folder


def load_job(folder, pairs):
    script = load_script()
    for case, target in pairs:
        script.load(folder, case, target)


def is_kept(world_size, case, target):
    return (CASES.index(case) + TARGETS.index(target) + 2 * world_size) % 5 == 0


@pytest.mark.parametrize(
    ("world_size", "is_all"), swept(product((1, 2, 3), (False, True)), lambda world, is_all: not is_all)
)
def test_losses_continue_from_deepspeed(folder, world_size, is_all):
    pairs = [pair for pair in product(CASES, TARGETS) if is_all or is_kept(world_size, *pair)]
    run_ranks(world_size, load_job, folder, pairs)
    for case, target in pairs:
        unbroken = json.loads((folder / f"{case}.save.json").read_text())[3:]
        found = json.loads((folder / f"{case}.{target}.{world_size}.json").read_text())
        tolerance = 1e-5 if "fp32" in case and "fp32" in target else 1e-2
        assert found == pytest.approx(unbroken, rel=tolerance), (case, target)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_continue_from_deepspeeds_universal_format(folder, world_size):
    targets = ("1-fp32", "3-bf16") if world_size == 2 else ("0-fp32", "3-fp32")
    pairs = list(product(UNIVERSAL, targets))
    run_ranks(world_size, load_job, folder, pairs)
    for case, target in pairs:
        unbroken = json.loads((folder / f"{case}.save.json").read_text())[3:]
        found = json.loads((folder / f"{case}.{target}.{world_size}.json").read_text())
        assert found == pytest.approx(unbroken, rel=1e-5 if "fp32" in target else 1e-2), (case, target)


def test_no_weights_are_taken_from_the_module_of_a_universal_checkpoint(folder):
    with pytest.raises(CheckpointError, match="universal format; give the checkpoint that it was made from"):
        consolidate.get_fp32_state_dict_from_zero_checkpoint(folder / "universal-1-fp32")


def test_a_missing_file_of_the_universal_format_is_named(folder, tmp_path):
    tag = "universal-1-fp32/global_step3_universal"
    shutil.copytree(folder / tag, tmp_path / "tag")
    (tmp_path / "tag/zero/gain/fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero/gain/fp32\.pt is missing"):
        Checkpointer().load(tmp_path, "tag")
    (tmp_path / "tag/zero/optimizer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero/optimizer_state\.pt is missing"):
        Checkpointer().load(tmp_path, "tag")


@pytest.mark.parametrize("target", ["exp_avg.pt", "fp32.pt"])
def test_a_value_of_another_shape_in_the_universal_format_is_named(folder, tmp_path, target):
    shutil.copytree(folder / "universal-1-fp32/global_step3_universal", tmp_path / "tag")
    shapes = {path.parent.name: torch.load(path)["param"].shape for path in (tmp_path / "tag/zero").glob("*/fp32.pt")}
    name = next(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] != shape[1])
    path = tmp_path / "tag/zero" / name / target
    torch.save({"param": torch.load(path)["param"].t().contiguous()}, path)
    with pytest.raises(CheckpointError, match=rf"{name}/{target}: found shape .*, and the parameter has"):
        Checkpointer().load(tmp_path, "tag")


def test_a_state_that_one_parameter_lacks_in_the_universal_format_is_named(folder, tmp_path):
    shutil.copytree(folder / "universal-1-fp32/global_step3_universal", tmp_path / "tag")
    (path, *_) = sorted((tmp_path / "tag/zero").glob("*/exp_avg.pt"))
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.parent.name}/exp_avg\.pt is missing, and other parameters"):
        Checkpointer().load(tmp_path, "tag")


@pytest.mark.parametrize("case", CASES)
def test_fp32_weights_of_deepspeeds_files(folder, case):
    weights = consolidate.get_fp32_state_dict_from_zero_checkpoint(folder / case)
    shapes = {name: value.shape for name, value in load_script().Net().state_dict().items()}
    assert {name: value.shape for name, value in weights.items()} == shapes
    assert all(value.isfinite().all() for value in weights.values())
    if "fp32" in case:
        same = consolidate.get_fp32_state_dict_from_zero_checkpoint(folder / "1-fp32")
        assert all(torch.allclose(weights[name], same[name], rtol=1e-6) for name in same)


def save_job(folder, cases):
    script = load_script()
    for case in cases:
        script.save(folder, case)


def read(path):
    with torch.serialization.safe_globals(consolidate.DEEPSPEED_CLASSES):
        return torch.load(path, weights_only=True)


WRITTEN = {"1-fp32": "1-fp32-written", "3-fp32-subgroups": "3-fp32-subgroups-written"}


def test_what_is_written_for_deepspeed_is_what_it_writes(folder, tmp_path):
    """The very training whose files the archive has, saved with `checkpoint.format`."""
    run_ranks(2, save_job, tmp_path, list(WRITTEN.values()))
    for case, written in WRITTEN.items():
        theirs, ours = folder / case / "global_step3", tmp_path / written / "global_step3"
        for path in theirs.glob("*_optim_states.pt"):
            expected = read(path)["optimizer_state_dict"]
            found = read(ours / path.name)["optimizer_state_dict"]
            assert expected.keys() - found.keys() <= {"param_slice_mappings", "loss_scaler"}
            key = "fp32_flat_groups" if case[0] == "3" else "single_partition_of_fp32_groups"
            for own, other in zip(found[key], expected[key], strict=True):
                assert own.shape == other.shape
                is_padding = own == 0  # theirs is not initialized
                torch.testing.assert_close(own, other.masked_fill(is_padding, 0))
            base = "optimizer_state_dict" if case[0] == "3" else "base_optimizer_state"
            groups = [[group["params"] for group in each[base]["param_groups"]] for each in (found, expected)]
            assert groups[0] == groups[1]
            assert found[base]["state"].keys() == expected[base]["state"].keys()
            steps = {state["step"].data_ptr() for state in found[base]["state"].values()}
            assert len(steps) == len(found[base]["state"]), "DeepSpeed would count a shared step up several times"
            for index, state in expected[base]["state"].items():
                for name, value in state.items():
                    own = found[base]["state"][index][name]
                    torch.testing.assert_close(own, value.masked_fill(own == 0, 0) if value.dim() else value)
        for path in theirs.glob("zero_pp_rank_*_model_states.pt"):
            expected, found = read(path), read(ours / path.name)
            assert {name: each.shape for name, each in found["module"].items()} == {
                name: each.shape for name, each in expected["module"].items()
            }
            for name, part in expected["frozen_param_fragments"].items():
                assert found["frozen_param_fragments"][name].shape == part.shape
    run_ranks(1, load_job, tmp_path, [(each, "2-fp32") for each in WRITTEN.values()])
    for each in WRITTEN.values():
        unbroken = json.loads((tmp_path / f"{each}.save.json").read_text())[3:]
        assert json.loads((tmp_path / f"{each}.2-fp32.1.json").read_text()) == pytest.approx(unbroken, rel=1e-5)
