"""`import deepspeed` loads names only: no torch, no pydantic, no plugin, and of ours only the front and the ground."""

import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "pydantic", "pluggy", "numpy", "psutil", "rich", "hjson", "safetensors", "importlib_metadata"}


def modules_loaded_by(statement):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^import time:[^|]*\|[^|]*\|\s*(\S+)$", done.stderr, flags=re.MULTILINE))


def test_import_deepspeed():
    loaded = modules_loaded_by("import deepspeed; deepspeed.__version__")
    assert "deepspeed" in loaded, "the report of importtime was not understood"
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert "importlib.metadata" not in loaded
    ours = {name.removeprefix("deepspeed.") for name in loaded if name.startswith("deepspeed.")}
    assert {name for name in ours if not name.startswith("_")} <= {"errors", "log"}
    assert not any(name.startswith("ds_ext_") for name in loaded)


def test_the_engine_loads_no_package_that_few_runs_need():
    loaded = modules_loaded_by("import deepspeed; deepspeed.initialize")
    assert "torch" in loaded, "the report of importtime would show it"
    assert loaded & {"psutil", "rich", "hjson", "safetensors", "torch._dynamo", "torch.distributed.tensor"} == set()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_trains_and_saves_loads_no_compiler(stage, tmp_path):
    """torch's optimizers load torch._dynamo when they are built: as much time as torch itself, and 70 MiB per rank."""
    script = f"""
import deepspeed, torch
model = torch.nn.Linear(2, 2)
section = {{"optimizer": {{"type": "Adam"}}, "train_batch_size": 1, "zero_optimization": {{"stage": {stage}}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=section)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
engine.optimizer.zero_grad()
engine.save_checkpoint({str(tmp_path)!r})
engine.load_checkpoint({str(tmp_path)!r})
"""
    assert modules_loaded_by(script) & {"torch._dynamo", "sympy", "torch.distributed.tensor"} == set()


def test_the_help_of_ds_ckpt_waits_for_no_torch():
    loaded = modules_loaded_by("from deepspeed.cli import ckpt; ckpt._parser().format_help()")
    assert "deepspeed.checkpoint.convert" in loaded  # which says what the formats are
    assert loaded & {"torch", "safetensors"} == set()


@pytest.mark.parametrize("module", ["checkpoint.writer", "launcher.runner", "launcher.launch", "cli.report"])
def test_what_starts_often_or_reports_on_torch_loads_none(module):
    loaded = modules_loaded_by(f"import deepspeed.{module}")
    assert f"deepspeed.{module}" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("statement", ["from deepspeed.errors import ConfigError", "from deepspeed.log import logger"])
def test_the_ground_floor_is_light_too(statement):
    assert {name.split(".")[0] for name in modules_loaded_by(statement)} & HEAVY == set()
