"""Checkpoints under a URL: in fsspec's memory, and in an S3 server over loopback where moto is installed.

Ranks that are threads use the server: in fsspec's memory all readers of a file share its position.
"""

import gc
import io
import json
import sys
import uuid
from contextlib import redirect_stdout

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, save_state_dict_file
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.layout import location
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.cli.ckpt import main
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.ops.op_builder.cache import owner_mark

upath = pytest.importorskip("upath")


@pytest.fixture
def memory():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server in this process."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    running = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def s3(server, monkeypatch):
    variables = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://bucket-{uuid.uuid4().hex}"
    location(bucket).mkdir()
    return f"{bucket}/run"


@pytest.fixture(params=["memory", "s3"])
def url(request):
    return request.getfixturevalue(request.param)


def test_two_ranks_save_and_load_under_a_url(s3, make_training, make_ranks):
    ranks, training = make_ranks(2), make_training()
    first, second = ranks.save(training, s3, "global_step1")
    assert str(first) == str(second) == f"{s3}/global_step1"
    for rank, found in enumerate(ranks.load(s3)):
        assert found.tag == "global_step1"
        assert torch.equal(found.model_state["module"]["scale"], training.weights["scale"].bfloat16())
        expected = training.shard_state(rank)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        parts = found.shard_state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        assert all(map(torch.equal, parts, expected))
    (tag,) = saved_tags(location(s3))
    assert len(tag.index.files) == 3
    assert not tag.faults(content=True)


def test_more_ranks_read_what_fewer_have_saved(s3, make_training, make_ranks):
    make_ranks(2).save(make_training(), s3, "global_step1")
    found, *_ = make_ranks(3).load(s3)
    assert len(found.parts.shard_states) == 2


def save(checkpointer, url, step):
    model_state = {"module": {"w": torch.full((300,), float(step))}, "dp_world_size": 1, "mp_world_size": 1}
    checkpointer.save(url, f"global_step{step}", model_state=model_state, shard_state=None)


def test_old_tags_are_removed(url):
    for step in (1, 2, 3):
        save(Checkpointer(keep_last=2), url, step)
    assert [tag.name for tag in saved_tags(location(url))] == ["global_step2", "global_step3"]
    assert Checkpointer().load(url).tag == "global_step3"


def test_a_complete_tag_is_not_replaced_and_an_incomplete_one_is(memory):
    save(Checkpointer(), memory, 1)
    with pytest.raises(CheckpointError, match="there is a complete checkpoint, and an object store cannot replace it"):
        save(Checkpointer(), memory, 1)
    assert Checkpointer().load(memory).model_state["module"]["w"][0] == 1
    (location(memory) / "global_step1" / "index.json").unlink()  # as a kill leaves it
    save(Checkpointer(), memory, 1)
    assert Checkpointer().load(memory).tag == "global_step1"


def test_damage_is_found_and_the_last_good_tag_offered(url):
    for step in (1, 2):
        save(Checkpointer(), url, step)
    path = location(url) / "global_step2" / "mp_rank_00_model_states.pt"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"global_step2/mp_rank_00_model_states.pt is damaged.*'global_step1'"):
        Checkpointer().load(url)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpointer().load(url)


def test_the_copy_of_a_damaged_object_is_removed(memory, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save(Checkpointer(), memory, 1)
    path = location(memory) / "global_step1" / "mp_rank_00_model_states.pt"
    path.write_bytes(bytes(path.stat().st_size))
    checkpointer = Checkpointer()
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpointer.load(memory)
    (folder,) = tmp_path.iterdir()
    assert not list(folder.iterdir())


def test_what_a_killed_process_left_in_the_temporary_folder_is_removed(memory, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    machine, process, start = owner_mark().split("-")
    left, of_a_live_one = (tmp_path / f"deepspeed-checkpoint.{machine}-{process}-{number}.x" for number in ("1", start))
    for folder in (left, of_a_live_one):
        folder.mkdir()
        (folder / "copy.pt").touch()
    save(Checkpointer(), memory, 1)
    Checkpointer().load(memory)
    assert not left.exists()
    assert (of_a_live_one / "copy.pt").exists()


def test_a_universal_checkpoint_is_loaded(url):
    folder = location(url) / "step"
    model = {"module": {"w": torch.zeros(4)}, "dp_world_size": 1, "mp_world_size": 1, "ds_version": "0.19.6"}
    options = {"param_groups": [{"lr": 1, "params": [0]}], "state": {0: {"step": 1}}}
    files = {
        "mp_rank_00_model_states.pt": {**model, "param_shapes": [{"w": torch.Size([4])}]},
        "zero/optimizer_state.pt": options,
        "zero/w/fp32.pt": torch.arange(4.0),
    }
    for name, state in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            torch.save(state, file)
    assert torch.equal(Checkpointer().load(url, "step").model_state["module"]["w"], torch.arange(4.0))


def test_a_file_of_weights_goes_to_a_url_too(url):
    save_state_dict_file({"w": torch.ones(3)}, f"{url}/out/pytorch_model.bin")
    content = (location(url) / "out" / "pytorch_model.bin").read_bytes()
    assert torch.load(io.BytesIO(content))["w"].sum() == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("num_bytes", [1000, 60 * 2**20], ids=["one part", "several parts"])
def test_a_file_of_weights_that_is_cut_short_replaces_nothing(s3, monkeypatch, error, num_bytes):
    def write_some(state, file):
        file.write(bytes(num_bytes))
        raise error

    path = f"{s3}/pytorch_model.bin"
    save_state_dict_file({"w": torch.ones(3)}, path)
    former = location(path).read_bytes()
    monkeypatch.setattr(torch, "save", write_some)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
        save_state_dict_file({"w": torch.ones(3)}, path)
    gc.collect()
    assert location(path).read_bytes() == former


def test_the_command_line_takes_urls(memory):
    for step in (1, 2):
        save(Checkpointer(), memory, step)

    def run(*arguments):
        output = io.StringIO()
        with redirect_stdout(output):
            assert main([*arguments, "--json"]) == 0
        return json.loads(output.getvalue())

    assert [tag["state"] for tag in run("verify", memory)["tags"]] == ["whole", "whole"]
    assert list(run("prune", memory, "--keep-last", "1")["removed"]) == ["global_step1"]
    assert [tag["tag"] for tag in run("show", memory)["tags"]] == ["global_step2"]
    assert run("show", memory, "global_step2")["parameters"]


def test_what_reads_folders_refuses_a_url(memory, tmp_path, capsys):
    save(Checkpointer(), memory, 1)
    save(Checkpointer(), tmp_path / "run", 1)
    (location(memory) / "dcp" / ".metadata").write_bytes(b"anything")
    with pytest.raises(
        CheckpointError, match=r"cannot load, as a .*memory://.*/dcp, a URL.* Copy it to or from a folder"
    ):
        Checkpointer().load(memory, "dcp")
    for source, target in ((memory, tmp_path / "out"), (tmp_path / "run", memory)):
        assert main(["convert", str(source), str(target), "--to", "safetensors"]) == 2
        assert f"{memory}, a URL: only folders can be used here" in "".join(capsys.readouterr().err.split("\n"))
    assert not (tmp_path / "out").exists()


def test_what_a_url_cannot_have_is_refused(memory, monkeypatch):
    with pytest.raises(ConfigError, match="async_save: found true for a save to memory://"):
        save(Checkpointer(background=BackgroundWriter()), memory, 1)
    with pytest.raises(ConfigError, match="fsspec cannot open it"):
        Checkpointer().load("nonsense://bucket/run")
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ConfigError, match=r"pip install fsspec universal-pathlib"):
        Checkpointer().load(memory)


class ClientError(Exception):
    """As botocore has them: no `OSError`."""


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ClientError("no credentials"), "the store failed: ClientError: no credentials. Check its address, the cred"),
        (PermissionError("denied"), ": denied"),
        (TimeoutError(), ": TimeoutError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_store_that_fails_is_named(memory, capsys, failure, words):
    def fail(*_, **__):
        raise failure

    save(Checkpointer(), memory, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(location(memory).fs), "_open", fail)
        for call in (lambda: Checkpointer().load(memory), lambda: save(Checkpointer(), memory, 2)):
            with pytest.raises(CheckpointError) as caught:
                call()
            assert words in str(caught.value)
            assert memory in str(caught.value)
        assert main(["verify", memory]) > 0
        assert words in "".join(capsys.readouterr())
    assert Checkpointer().load(memory).tag == "global_step1"
