"""Files that DeepSpeed 0.19.6 wrote load here, at any number of ranks and any stage, and losses continue.

`deepspeed-0.19.6.tar.xz` is what `downstream/deepspeed/train.py save` made with it on two ranks.
"""

import importlib.util
import json
import tarfile
from itertools import product
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import consolidate
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

FILES = Path(__file__).with_name("deepspeed-0.19.6.tar.xz")
CASES = ("0-fp32", "0-bf16", "1-fp32", "2-bf16", "3-fp32-subgroups")
TARGETS = ("0-fp32", "1-bf16", "2-fp32", "3-fp32", "3-bf16")


def load_script():
    path = Path(__file__).parents[3] / "downstream/deepspeed/train.py"
    spec = importlib.util.spec_from_file_location("downstream_deepspeed_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with tarfile.open(FILES) as archive:
        archive.extractall(folder, filter="data")
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


@pytest.mark.parametrize("case", CASES)
def test_fp32_weights_of_deepspeeds_files(folder, case):
    weights = consolidate.get_fp32_state_dict_from_zero_checkpoint(folder / case)
    shapes = {name: value.shape for name, value in load_script().Net().state_dict().items()}
    assert {name: value.shape for name, value in weights.items()} == shapes
    assert all(value.isfinite().all() for value in weights.values())
    if "fp32" in case:
        same = consolidate.get_fp32_state_dict_from_zero_checkpoint(folder / "1-fp32")
        assert all(torch.allclose(weights[name], same[name], rtol=1e-6) for name in same)
