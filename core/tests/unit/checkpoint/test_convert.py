"""`ds_ckpt convert`: what is written, for whom, in how much memory, and what is refused."""

import json
import re
import resource
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import layout, other_formats
from deepspeed.checkpoint.convert import FORMATS, convert
from deepspeed.checkpoint.dcp_file import DcpFolder
from deepspeed.cli.ckpt import main
from deepspeed.errors import CheckpointError, ConfigError
from safetensors.torch import load_file


@pytest.fixture
def saved(make_ranks, make_training, tmp_path):
    training = make_training(world_size=3)
    make_ranks(3).save(training, tmp_path / "ckpt", "global_step1", client_state={"epoch": 4})
    return training


def assert_same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_as_safetensors_with_json(saved, tmp_path, capsys):
    arguments = ["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", "safetensors", "--json"]
    assert main([*arguments, "--max-shard-size", "100"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["tag"], record["to"], record["output"]) == ("global_step1", "safetensors", str(tmp_path / "out"))
    found = {}
    for each in record["files"]:
        path = tmp_path / "out" / each["name"]
        assert path.stat().st_size == each["bytes"]
        found.update(load_file(path) if path.suffix == ".safetensors" else {})
    assert_same(found, saved.weights)


def test_weights_as_torch_saves_them(saved, tmp_path, capsys):
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", "torch", "-t", "global_step1"]) == 0
    assert "pytorch_model.bin" in capsys.readouterr().out
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), saved.weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_has_weights_states_groups_and_client_state(saved, tmp_path):
    convert(tmp_path / "ckpt", tmp_path / "out", "dcp")
    trained = {name: weight for group in saved.groups for name, weight in group.items()}
    moments = {name: {"exp_avg": torch.empty_like(weight), "step": torch.empty(())} for name, weight in trained.items()}
    weights = {name: torch.empty_like(weight) for name, weight in saved.weights.items()}
    state = {"model": weights, "optim": {"state": moments}, "epoch": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["epoch"] == 4
    assert_same(weights, saved.weights)
    for name, weight in trained.items():
        assert torch.equal(moments[name]["exp_avg"], weight / 2)
        assert moments[name]["step"] == 3
    folder = DcpFolder(tmp_path / "out")
    assert folder.value("optim.param_groups.1.lr") == 0.2
    assert folder.value("optim.param_groups.1.params") == ["lin.bias", "scale"]


def test_memory_holds_two_files_at_most(large, tmp_path, monkeypatch):
    monkeypatch.setattr(other_formats, "_FILE_BYTES", 2 * large.weight_bytes)
    convert(large.directory, tmp_path / "out", "dcp")
    assert len(large.added) == 24
    assert max(large.added) < 5 * large.weight_bytes  # torch's writer frees a file's tensors during the next
    assert DcpFolder(tmp_path / "out").tensors["optim.state.w7.exp_avg"].read(5, 2).tolist() == [1.0, 1.0]


def test_an_output_that_holds_something_is_refused(saved, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", "dcp"]) == 2
    assert "is there and not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(("flag", "words"), [(["-t", "nope"], "no checkpoint with the tag 'nope'"), ([], "5 apples")])
def test_what_cannot_be_done_is_named(saved, tmp_path, capsys, flag, words):
    size = ["--max-shard-size", "5 apples"]
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", "torch", *size, *flag]) == 2
    assert words in capsys.readouterr().err


def test_the_help_says_what_each_format_is_and_asks_for_no_url(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {each.meaning}" in text for name, each in FORMATS.items())
    assert "DIR the directory that holds the tags" in text
    assert "URL" not in text


@pytest.mark.parametrize("to", FORMATS)
def test_damage_is_found_before_anything_is_written(saved, tmp_path, capsys, to):
    path = tmp_path / "ckpt" / "global_step1" / layout.shard_file(2, 0)
    content = bytearray(path.read_bytes())
    content[content.find(b"exp_avg")] ^= 1
    path.write_bytes(content)
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", to]) == 1
    assert f"{path} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    path.unlink()
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", to, "--no-verify"]) == 1
    assert f"{path} is missing" in capsys.readouterr().err


def test_states_without_names_are_refused(make_ranks, make_training, tmp_path):
    training = make_training(world_size=1, stage=0)
    state = {**training.model_state(), "optimizer": {"state": {}, "param_groups": []}}
    make_ranks(1)(lambda c, _: c.save(tmp_path / "ckpt", "t", model_state=state, shard_state=None))
    with pytest.raises(CheckpointError, match="without the names of its parameters"):
        convert(tmp_path / "ckpt", tmp_path / "out", "dcp")


def test_an_unknown_format_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="found the format 'hf'; allowed: safetensors, torch, dcp"):
        convert(saved, tmp_path / "out", "hf")


@contextmanager
def small_disk(num_bytes):
    """Files of this process that are longer than this are refused, as by a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_is_named_and_leaves_nothing(saved, tmp_path, to):
    before = {path: path.read_bytes() for path in (tmp_path / "ckpt").rglob("*") if path.is_file()}
    with small_disk(64), pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "ckpt", tmp_path / "out", to)
    assert "cannot write" in str(caught.value)
    assert re.search(r"File too large \(\d+ MiB are free there\)", str(caught.value))
    assert "convert again" in str(caught.value)
    if to in ("dcp", "torchtitan"):
        assert "__0_0.distcp: " in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path not in before]
    assert {path: path.read_bytes() for path in before} == before
    convert(tmp_path / "ckpt", tmp_path / "out", to)  # once there is room
