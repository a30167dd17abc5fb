"""`checkpoint.keep_last`: which tags a save removes, and which never; and the tag that a failed load offers."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, TorchStore, checkpointer, index, layout
from deepspeed.checkpoint.index import read_index
from deepspeed.checkpoint.tags import plan_prune, saved_tags
from deepspeed.errors import CheckpointError, ConfigError

MODEL = layout.model_file(0)


def save(directory, *tags, **options):
    state = {"module": {"w": torch.ones(2)}, "dp_world_size": 1, "mp_world_size": 1}
    save_latest = options.pop("save_latest", True)
    for tag in tags:
        Checkpointer(**options).save(directory, tag, model_state=state, shard_state=None, save_latest=save_latest)


def names(directory):
    return [tag.name for tag in saved_tags(directory)]


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_last_saves_stay_whatever_their_numbers(tmp_path):
    save(tmp_path, "s9", "s10", "s300", "s20", keep_last=2)
    assert names(tmp_path) == ["s300", "s20"]
    assert {path.name for path in tmp_path.iterdir()} == {"s300", "s20", "latest", "zero_to_fp32.py"}
    save(tmp_path, "s300", keep_last=1)
    assert names(tmp_path) == ["s300"]


def test_a_save_by_a_clock_that_is_behind_stays(tmp_path, monkeypatch):
    save(tmp_path, "a", "b")
    describe = checkpointer.describe_save
    early = {"at": "2001-01-01T00:00:00+00:00"}
    monkeypatch.setattr(checkpointer, "describe_save", lambda *values: {**describe(*values), **early})
    save(tmp_path, "c", keep_last=2, save_latest=False)
    assert names(tmp_path) == ["c", "b"]


def test_what_latest_names_stays(tmp_path):
    save(tmp_path, "best")
    save(tmp_path, "a", "b", "c", keep_last=1, save_latest=False)
    assert names(tmp_path) == ["best", "c"]


def test_what_is_no_checkpoint_of_ours_stays(tmp_path):
    save(tmp_path, "old", "unreadable", "linked", "mine")
    (tmp_path / "old" / "index.json").unlink()  # as an earlier version, or DeepSpeed, saved it
    flip_bit(tmp_path / "unreadable" / "index.json")
    (tmp_path / "best").symlink_to("linked")
    (tmp_path / "mine" / "notes.txt").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").write_text("{}")
    save(tmp_path, "x", "y", keep_last=1)
    assert set(os.listdir(tmp_path)) >= {"old", "unreadable", "linked", "best", "mine", "data", "y"}
    assert not (tmp_path / "x").exists()
    reasons = plan_prune(tmp_path, 1).kept
    assert reasons["old"] == "it has no index.json"
    assert "index.json is damaged" in reasons["unreadable"]
    assert reasons["linked"] == "a link leads to it"
    assert reasons["mine"] == "it holds other files: notes.txt"
    assert reasons["y"] == "named by latest"


def test_lists_of_tensors_of_what_goes_are_not_looked_at(tmp_path, monkeypatch):
    save(tmp_path, "a", "b", "c")
    assert read_index(tmp_path / "a").tensors is not None
    monkeypatch.setattr(index, "_record", lambda *values: pytest.fail("the tensors of a file were parsed"))
    monkeypatch.setattr(index, "_table", lambda tensors: pytest.fail("the table was parsed") if tensors else None)
    plan = plan_prune(tmp_path, 1, newest="c")
    assert ([tag.name for tag in plan.removed], list(plan.kept)) == (["a", "b"], ["c"])


def test_tags_of_more_steps_stay_after_the_clock_was_set_back(tmp_path, monkeypatch):
    describe, at = checkpointer.describe_save, {}
    monkeypatch.setattr(checkpointer, "describe_save", lambda *values: {**describe(*values), **at})
    for steps, year in ((100, 2025), (200, 2026), (300, 2001), (400, 2002)):
        at.update(at=f"{year}-01-01T00:00:00+00:00", global_steps=steps)
        save(tmp_path, f"s{steps}")
    assert [tag.name for tag in plan_prune(tmp_path, 2).removed] == ["s100", "s200"]
    at.update(at="2000-01-01T00:00:00+00:00", global_steps=500)
    save(tmp_path, "s500", keep_last=2)
    assert sorted(names(tmp_path)) == ["s400", "s500"]


def change_table(folder, change):
    """Write another table into the index, which then has a checksum that fits."""
    known = read_index(folder)
    tables = json.loads(json.dumps(known.tensors))
    change(tables)
    (folder / "index.json").write_bytes(replace(known, tensors=tables).to_bytes())


MALFORMED = {
    "no name": lambda table: table["entries"][0].pop("name"),
    "text": lambda table: table["entries"].append("abc"),
    "no such file": lambda table: table["entries"][0]["weight"].update(parts=[[7, 1, 0, 2]]),
    "no such tensor": lambda table: table["entries"][0]["weight"].update(key=["module", "v"]),
    "beyond its end": lambda table: table["entries"][0]["weight"].update(parts=[[0, 1, 1, 2]]),
    "another shape": lambda table: table["entries"][0].update(shape=[5]),
    "the same as itself": lambda table: table["entries"].append({"name": "x", "same_as": "x"}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_tag_with_a_malformed_table_does_not_count(tmp_path, case):
    save(tmp_path, "a", "b", "c")
    change_table(tmp_path / "c", MALFORMED[case])
    plan = plan_prune(tmp_path, 1)
    assert [tag.name for tag in plan.removed] == ["a"]
    assert list(plan.kept) == ["b", "c"]
    faults = {tag.name: tag.faults(content=True) for tag in saved_tags(tmp_path)}
    assert not faults["b"]
    assert "table of tensors is damaged" in faults["c"]["index.json"]


def test_an_incomplete_tag_does_not_count(tmp_path):
    save(tmp_path, "a", "b", "c")
    (tmp_path / "c" / MODEL).unlink()
    plan = plan_prune(tmp_path, 1)
    assert [tag.name for tag in plan.removed] == ["a"]
    assert list(plan.kept) == ["b", "c"]


def test_a_tag_that_is_being_saved_stays(tmp_path, lines):
    save(tmp_path, "a")
    other = TorchStore()
    other.create(tmp_path / "a")  # another job replaces it
    save(tmp_path, "b", keep_last=1)
    assert names(tmp_path) == ["a", "b"]
    assert any("keep_last" in text and "is saving it now" in text for _, text in lines)
    other.discard(tmp_path / "a")
    save(tmp_path, "c", keep_last=1)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_in_a_removal_leaves_the_tag_whole_or_gone(tmp_path, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    save(tmp_path, "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "rename") if moment == "before" else (shutil, "rmtree")), die)
        with pytest.raises(Killed):
            TorchStore().remove(tmp_path / "a")
    assert names(tmp_path) == (["a", "b"] if moment == "before" else ["b"])
    assert (tmp_path / ".a.pruned").exists() == (moment == "after")
    save(tmp_path, "c")
    assert set(os.listdir(tmp_path)) - {"a"} == {"b", "c", "latest", "zero_to_fp32.py"}


def test_a_tag_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, lines):
    save(tmp_path, "a")
    rename = os.rename

    def refuse(source, target):
        if source == tmp_path / "a":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    save(tmp_path, "b", keep_last=1)
    assert names(tmp_path) == ["a", "b"]
    assert any(f"cannot remove {tmp_path / 'a'}: Permission denied" in text for _, text in lines)


class PlainStore:
    """The six methods of a vendor's store, with the torch store behind them."""

    def __init__(self):
        store = TorchStore()
        for name in ("create", "save", "wait", "commit", "discard", "load"):
            setattr(self, name, getattr(store, name))


def test_a_store_of_six_methods_saves_without_an_index_and_cannot_prune(tmp_path):
    save(tmp_path, "a", store=PlainStore())
    assert os.listdir(tmp_path / "a") == [MODEL]
    assert Checkpointer(store=PlainStore()).load(tmp_path, load_shard=False).tag == "a"
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_last: found 2, and the store .* cannot remove tags"):
        Checkpointer(store=PlainStore(), keep_last=2)


def test_the_last_good_tag_is_offered(make_ranks, make_training, tmp_path):
    ranks, shard = make_ranks(2), layout.shard_file(1, 0)
    for step in (1, 2, 3, 4):
        ranks.save(make_training(seed=step), tmp_path, f"s{step}")
    flip_bit(tmp_path / "s4" / shard)
    flip_bit(tmp_path / "s3" / MODEL)
    (tmp_path / "s2" / shard).rename(tmp_path / "s2" / "aside")
    for outcome in ranks.load(tmp_path):
        assert isinstance(outcome, CheckpointError)
        assert str(tmp_path / "s4" / shard) in str(outcome)
        assert str(outcome).endswith("The last good tag there is 's1': its files were verified now.")
    assert [found.tag for found in ranks.load(tmp_path, "s1")] == ["s1"] * 2
    shutil.rmtree(tmp_path / "s1")
    for outcome in ranks.load(tmp_path):
        assert str(outcome).endswith("No other tag is whole.")
