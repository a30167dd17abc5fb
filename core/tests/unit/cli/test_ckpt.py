"""`ds_ckpt`: what it says of checkpoints, by tables and as JSON, and its exit codes."""

import json
import os
import shutil
import socket
import subprocess
import sys

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import Checkpointer, layout
from deepspeed.checkpoint.persistence import copy_tag
from deepspeed.cli.ckpt import main
from deepspeed.errors import CheckpointError

MODEL, SHARD = layout.model_file(0), layout.shard_file(0, 0)


@pytest.fixture
def saved(tmp_path):
    """Tags s1 and s2, of which `latest` names s2."""
    for step in (1, 2):
        model_state = {
            "module": {"w": torch.ones(3, 4), "count": torch.tensor(step)},
            "global_steps": step,
            "dp_world_size": 1,
            "mp_world_size": 1,
        }
        shard = {"optimizer_state_dict": {"zero_stage": 2, "partition_count": 1}}
        Checkpointer().save(tmp_path, f"s{step}", model_state=model_state, shard_state=shard)
    return tmp_path


@pytest.fixture
def ask(capsys):
    """Run the command; its exit code and its record."""

    def ask(*arguments):
        code = main([str(each) for each in (*arguments, "--json")])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else captured.err

    return ask


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def states(record):
    return {row["tag"]: row["state"] for row in record["tags"]}


def test_verify_names_each_damaged_file(saved, ask):
    code, record = ask("verify", saved)
    assert (code, states(record)) == (0, {"s1": "whole", "s2": "whole"})
    flip_bit(saved / "s1" / MODEL)
    (saved / "s1" / SHARD).unlink()
    code, record = ask("verify", saved)
    assert (code, states(record)) == (1, {"s1": "damaged", "s2": "whole"})
    faults = record["tags"][0]["faults"]
    assert str(saved / "s1" / MODEL) in faults[MODEL]
    assert "CRC-32" in faults[MODEL]
    assert "is missing" in faults[SHARD]
    assert ask("verify", saved, "s2")[0] == 0


@pytest.mark.parametrize("order", [("--json", "DIR", "s1"), ("DIR", "--json", "s1"), ("DIR", "s1", "--json")])
@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_tag_may_follow_an_option(saved, capsys, command, order):
    assert main([command, *(str(saved) if each == "DIR" else each for each in order)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "s2" not in json.dumps(record)


@pytest.mark.parametrize("name", [MODEL, SHARD, "index.json"])
def test_verify_finds_a_flipped_bit_in_any_file(saved, ask, name):
    flip_bit(saved / "s2" / name)
    code, record = ask("verify", saved)
    assert code == 1
    assert list(record["tags"][1]["faults"]) == [name]


def test_verify_finds_what_does_not_belong(saved, ask):
    shutil.copy(saved / "s2" / SHARD, saved / "s2" / layout.shard_file(1, 0))
    (saved / "s1" / "index.json").unlink()
    (saved / "latest").write_text("s7")
    code, record = ask("verify", saved)
    assert code == 1
    assert states(record) == {"s1": "no index", "s2": "damaged"}
    (faults,) = (row["faults"] for row in record["tags"] if row["tag"] == "s2")
    assert "is not listed" in faults[layout.shard_file(1, 0)]
    assert "latest names 's7', which is not there" in record["latest"]


@pytest.fixture(params=["a FIFO", "a folder", "a socket"])
def odd(request, saved, monkeypatch):
    """Put what is no file in the place of one: `odd(path)`, relative to the directory; returns what messages say."""
    monkeypatch.chdir(saved)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        make = {"a FIFO": os.mkfifo, "a folder": os.mkdir, "a socket": listener.bind}[request.param]

        def put(path):
            os.unlink(path)
            make(path)
            return f"{saved / path} is {request.param}, where a regular file is expected"

        yield put


@pytest.mark.parametrize("name", ["latest", "s2/index.json", f"s2/{MODEL}", f"s2/{SHARD}"])
def test_what_is_no_regular_file_is_named_and_not_opened(saved, ask, odd, name):
    words = odd(name)
    code, record = ask("verify", saved)
    assert (code, words in json.dumps(record)) == (1, True)
    code, found = ask("show", saved)
    assert (code, words in json.dumps(found)) == (1, True)
    code, found = ask("prune", saved, "--keep-last", "1", "--dry-run")
    assert code == (1 if name == "latest" else 0)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer().load(saved)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [MODEL, SHARD])
def test_nor_without_an_index(saved, ask, odd, name):
    (saved / "s2/index.json").unlink()
    words = odd(f"s2/{name}")
    if name == MODEL:
        code, record = ask("show", saved, "s2")
        assert (code, words in record["faults"]["parameters"]) == (1, True)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer().load(saved)
    assert words in str(caught.value)


def test_show_lists_tags(saved, ask):
    (saved / "s1" / SHARD).unlink()
    code, record = ask("show", saved)
    assert code == 1
    assert record["latest"] == "s2"
    first, second = record["tags"]
    assert second.pop("bytes") == sum(path.stat().st_size for path in (saved / "s2").iterdir())
    assert second.pop("date").endswith("+00:00")
    assert second == {
        **{"tag": "s2", "global_steps": 2, "zero_stage": 2, "ranks": 1},
        **{"complete": True, "faults": {}},
    }
    assert first["complete"] is False
    assert "is missing" in first["faults"][SHARD]


def test_show_lists_both_tiers(saved, ask, tmp_path, capsys):
    far = tmp_path / "far"
    copy_tag(saved / "s1", far, save_latest=True, keep_last=None)
    code, record = ask("show", saved, "--persistent", far)
    assert code == 0
    assert [(row["tag"], row["tier"]) for row in record["tags"]] == [
        *(("s1", "near"), ("s1", "persistent"), ("s2", "near")),
    ]
    assert (record["latest"], record["persistent_latest"]) == ("s2", "s1")
    assert main(["show", str(saved), "--persistent", str(far)]) == 0
    assert "persistent" in capsys.readouterr().out
    assert "--persistent: found the TAG s1 too" in ask("show", saved, "s1", "--persistent", far)[1]


def test_show_lists_files_and_parameters_of_a_tag(saved, ask):
    code, record = ask("show", saved, "s2")
    assert code == 0
    assert [file["name"] for file in record["files"]] == [MODEL, SHARD]
    assert record["parameters"] == [
        {"name": "w", "shape": [3, 4], "dtype": "float32"},
        {"name": "count", "shape": [], "dtype": "int64"},
    ]


def test_show_works_without_an_index(saved, ask):
    (saved / "s2" / "index.json").unlink()
    code, record = ask("show", saved, "s2")
    assert code == 0
    assert record["complete"] is None
    assert [file["name"] for file in record["files"]] == [MODEL, SHARD]
    assert [each["name"] for each in record["parameters"]] == ["w", "count"]


def test_prune_removes_what_its_dry_run_names(saved, ask):
    for options in (["--dry-run"], []):
        code, record = ask("prune", saved, "--keep-last", 1, *options)
        assert code == 0
        assert list(record["removed"]) == ["s1"]
        assert record["kept"] == {"s2": "named by latest"}
        assert (saved / "s1").exists() == bool(options)
    assert sorted(os.listdir(saved)) == ["latest", "s2", "zero_to_fp32.py"]


def test_prune_finishes_what_a_kill_left(saved, ask, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Killed):
            ask("prune", saved, "--keep-last", 1)
    assert (saved / ".s1.pruned").is_dir()
    assert ask("prune", saved, "--keep-last", 1)[1]["removed"] == {}
    assert sorted(os.listdir(saved)) == ["latest", "s2", "zero_to_fp32.py"]


def test_what_cannot_be_run_is_one_line(saved, ask, tmp_path):
    (tmp_path / "empty" / "photos").mkdir(parents=True)
    for arguments, words in (
        (["verify", tmp_path / "empty"], "holds no tag that save_checkpoint saved, so there is nothing to verify"),
        (["show", saved / "nowhere"], "there is no directory"),
        (["verify", saved / "s1"], "This is the folder of one tag"),
        (["verify", saved, "s9"], "holds no tag s9; it holds: s1, s2"),
        (["show", saved, "s9"], "holds no tag s9"),
    ):
        code, said = ask(*arguments)
        assert code == 2
        assert said.startswith("ds_ckpt: ")
        assert words in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "verb"), [(["show"], "show"), (["verify"], "verify"), (["prune", "--keep-last", "1"], "remove")]
)
def test_a_folder_of_folders_with_tags_names_the_newest(saved, capsys, command, verb):
    """A Trainer saves to `checkpoint-<step>` below the directory that it was given."""
    name, *flags = command
    for step in (3, 6):
        shutil.copytree(saved / "s2", saved / "out" / f"checkpoint-{step}" / f"s{step}")
    main([name, str(saved / "out"), *flags])
    said = " ".join("".join(capsys.readouterr()).split())
    assert (
        f"nothing to {verb}; give one of the 2 folders in it that hold tags; the newest is {saved}/out/checkpoint-6"
        in said
    )


@pytest.mark.parametrize("keep", ["0", "-1", "two"])
def test_how_many_to_keep_must_be_positive(saved, keep, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["prune", str(saved), "--keep-last", keep])
    assert raised.value.code == 2
    assert "expected an integer >= 1" in capsys.readouterr().err or keep.startswith("-")


def test_tables_are_for_people(saved):
    """As a program of its own: tables on stdout, what is wrong below them."""
    flip_bit(saved / "s2" / SHARD)
    for arguments, words in (
        (["show", saved], ["step", "latest", "yes"]),
        (["show", saved, "s1"], ["3 x 4", "float32", MODEL]),
        (["verify", saved], ["damaged", "whole", f"{saved / 's2' / SHARD} is damaged"]),
        (["prune", saved, "--keep-last", "1"], ["removed", "named by latest"]),
    ):
        command = [sys.executable, "-m", "deepspeed.cli.ckpt", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if arguments[0] == "verify" else 0), done.stderr
        assert not done.stderr
        for word in words:
            assert word in done.stdout


def train(folder, stage, lr=1e-2, hidden=8):
    """Three steps of one rank, saved as tag `last`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for batch in torch.randn(3, 2, 4, device=engine.device):
        engine.backward(engine(batch).square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="last")
    engine.destroy()


@pytest.mark.usefixtures("single_rank")
def test_compare_reads_other_stages_and_names_what_differs(tmp_path, ask, capsys):
    for name, options in {"0": {}, "3": {"stage": 3}, "faster": {"lr": 2e-2}, "wide": {"hidden": 9}}.items():
        train(tmp_path / name, **{"stage": 0, **options})
    first = tmp_path / "0"
    code, record = ask("compare", first, tmp_path / "3")
    assert (code, record["verdict"], record["apart"]) == (0, "the same bits", [])
    assert record["tensors"] == 4 * 4  # weight, step, exp_avg and exp_avg_sq of four parameters

    code, record = ask("compare", first, tmp_path / "faster")
    assert (code, record["verdict"]) == (1, "differs")
    weights = {each["tensor"]: each for each in record["apart"] if each["what"] == "weight"}
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert weights["2.bias"]["differ"] == 2
    worst = max(each["share"] for each in record["apart"])
    order = [(each["what"] != "weight", -each["share"]) for each in record["apart"]]
    assert order == sorted(order)
    assert ask("compare", first, tmp_path / "faster", "--within", worst)[1]["verdict"] == "within"

    code, record = ask("compare", first, tmp_path / "wide")
    assert code == 1
    assert record["other_shapes"]["0.weight, weight"] == [[8, 4], [9, 4]]
    assert main(["compare", str(first), str(tmp_path / "faster"), "--top", "1"]) == 1
    said = capsys.readouterr().out
    assert "tensors more" in said
    assert "are not the same bits" in said


def test_compare_knows_nan_and_what_one_side_lacks(tmp_path, ask):
    nan = float("nan")
    values = {"a": {"w": torch.tensor([1.0, nan]), "old": torch.ones(1)}, "b": {"w": torch.tensor([1.0, nan])}}
    values["c"] = {"w": torch.tensor([nan, nan])}
    for tag, module in values.items():
        model_state = {"module": module, "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}
        Checkpointer().save(tmp_path, tag, model_state=model_state, shard_state=None)
    code, record = ask("compare", tmp_path, tmp_path, "-t", "a", "--other-tag", "b")
    assert (code, record["apart"], record["only_in_first"]) == (1, [], ["old, weight"])
    code, record = ask("compare", tmp_path, tmp_path, "-t", "b", "--other-tag", "c", "--within", "1e9")
    assert (code, record["verdict"], record["apart"][0]["differ"]) == (1, "differs", 1)
    assert ask("compare", tmp_path, tmp_path, "-t", "b", "--other-tag", "b")[0] == 0


def test_compare_refuses_what_it_cannot_read(saved, ask, capsys, tmp_path):
    assert "there is no directory" in ask("compare", saved, tmp_path / "nowhere")[1]
    with pytest.raises(SystemExit):
        main(["compare", str(saved), str(saved), "--within", "-1"])
    assert "expected a number >= 0" in capsys.readouterr().err
