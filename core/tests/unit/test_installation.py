"""What messages tell people to install, and that files of DeepSpeed itself are noticed."""

import json
import logging

import deepspeed
import pytest
import torch
from deepspeed import _installation
from deepspeed._installation import foreign_deepspeed, pip_install
from deepspeed.cli import report

GIT = {"url": "https://example.org/us/core.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
CASES = {
    "index": ({}, "ds-ext-cuda", "pip install ds-ext-cuda"),
    "index, extra": ({}, "ds-core[mpi]", "pip install 'ds-core[mpi]'"),
    "git": (
        GIT,
        "ds-ext-cuda",
        'pip install "ds-ext-cuda @ git+https://example.org/us/core.git@c0ffee#subdirectory=extensions/ds-ext-cuda"',
    ),
    "checkout": ({"url": "file:///a%20b/core"}, "deepspeed", "pip install '/a b/compat/deepspeed'"),
    "checkout, core": ({"url": "file:///a/core"}, "ds-core[mpi]", "pip install '/a/core[mpi]'"),
    "a copy of the core alone": ({"url": "file:///tmp/x.whl"}, "ds-ext-cpu", "pip install ds-ext-cpu"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_installs_from_where_the_core_came_from(case, monkeypatch):
    found, requirement, command = CASES[case]
    monkeypatch.setattr(_installation, "origin", lambda: found)
    assert pip_install(requirement) == command


@pytest.fixture
def deepspeed_itself(tmp_path, monkeypatch):
    """A path on which the metadata of DeepSpeed 0.19.6 is found."""
    folder = tmp_path / "deepspeed-0.19.6.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.6\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_ours_is_not_foreign():
    assert foreign_deepspeed() is None


def test_the_report_and_initialize_say_so(deepspeed_itself, single_rank, capsys, caplog, monkeypatch):
    assert report.main(["--explain-accelerator", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["overwritten_by"] == "0.19.6"
    logger = deepspeed.logger
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=logger.name):
        model = torch.nn.Linear(1, 1)
        deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0].destroy()
    assert "DeepSpeed itself (0.19.6) is installed over the files of ds-core" in caplog.text
