"""`index.json`: what it says of a save, and every damage that it finds at a load."""

import json
import zlib
from dataclasses import replace

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, durable, layout
from deepspeed.checkpoint.durable import ChecksumWriter
from deepspeed.checkpoint.index import (
    DamagedCheckpoint,
    FileEntry,
    Index,
    TensorRecord,
    check_content,
    checksums_of,
    read_index,
)
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError

TAG = "global_step3"
NAMES = (layout.model_file(0), layout.shard_file(0, 0), layout.shard_file(1, 0))


@pytest.fixture
def ranks(make_ranks):
    return make_ranks(2)


@pytest.fixture
def folder(ranks, make_training, tmp_path):
    ranks.save(make_training(seed=3), tmp_path, TAG)
    return tmp_path / TAG


def flip_bit(path, at=0.5, bit=3):
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


def reseal(folder, change):
    """Let `change` alter the content of an index, with a checksum that fits."""
    path = folder / layout.INDEX_FILE
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    head = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    path.write_bytes(head + b',\n "checksum": "crc32:%08x"\n}\n' % zlib.crc32(head))


def refused(outcomes, *words):
    """Every rank raised, with all of `words`."""
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError), outcome
        assert all(word in str(outcome) for word in words), outcome


def test_the_index_lists_each_file_as_it_is(folder):
    index = read_index(folder)
    assert sorted(entry.name for entry in index.files) == sorted(NAMES)
    for entry in index.files:
        content = (folder / entry.name).read_bytes()
        assert entry.num_bytes == len(content)
        assert entry.checksums == [f"{zlib.crc32(content):08x}"]
    about = dict(index.saved)
    assert about.pop("at").endswith("+00:00")
    assert about.pop("ds_core")
    assert about == {"tag": TAG, "global_steps": 3, "zero_stage": 2, "dp_world_size": 2, "mp_world_size": 1}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_file_is_named(ranks, folder, name, at):
    flip_bit(folder / name, at)
    found, saved = checksums_of(folder / name)[0], read_index(folder).entry(name).checksums[0]
    refused(ranks.load(folder.parent), str(folder / name), f"CRC-32 {found}", f"saved with {saved}")


def test_every_flipped_bit_of_the_index_is_named(folder):
    path = folder / layout.INDEX_FILE
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            with pytest.raises(DamagedCheckpoint, match=r"index\.json is damaged"):
                Index.from_bytes(bytes(flipped), path)


def test_a_damaged_index_fails_every_rank(ranks, folder):
    flip_bit(folder / layout.INDEX_FILE)
    refused(ranks.load(folder.parent), str(folder / layout.INDEX_FILE))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("change", "word"), [(-1, "cut short"), (1, "too long")])
def test_another_size_is_named(ranks, folder, name, change, word):
    path = folder / name
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + change)
    refused(ranks.load(folder.parent), str(path), f"it has {size + change} bytes, and was saved with {size}", word)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(ranks, folder, name):
    size = (folder / name).stat().st_size
    (folder / name).unlink()
    outcomes = ranks.load(folder.parent)
    refused(outcomes)
    assert f"{folder / name} is missing" in str(outcomes[0])
    assert f"with {size} bytes" in str(outcomes[0])


def test_swapped_shards_are_recognized(ranks, folder):
    one, other = (folder / name for name in NAMES[1:])
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    outcomes = ranks.load(folder.parent)
    refused(outcomes, "swapped")
    assert f"{one} has the content that was saved as {other.name}" in str(outcomes[0])


def test_weights_load_without_the_shards(ranks, folder):
    for name in NAMES[1:]:
        (folder / name).unlink()
    assert [found.tag for found in ranks.load(folder.parent, load_shard=False)] == [TAG] * 2


def test_without_verification_sizes_are_still_compared(make_ranks, folder):
    path, ranks = folder / NAMES[2], make_ranks(2, verify=False)
    flip_bit(path, at=0.9)  # in the zip's directory of tensors, or in one
    content = path.read_bytes()
    outcomes = ranks.load(folder.parent)
    assert not any("CRC-32" in str(outcome) for outcome in outcomes)
    path.write_bytes(content[:-1])
    refused(ranks.load(folder.parent), str(path), "cut short")


def test_a_file_of_another_save_is_not_taken_for_one_of_this(ranks, folder):
    names = [layout.shard_file(rank, 0) for rank in range(2)]
    for name in names:
        (folder / name).rename(folder / f"bf16_{name}")
    outcomes = ranks.load(folder.parent)
    refused(outcomes)
    assert "is missing" in str(outcomes[0])
    assert "not listed in index.json" in str(outcomes[1])


def test_an_index_of_a_later_format_is_refused(ranks, folder):
    reseal(folder, lambda content: content.update(format=2))
    refused(ranks.load(folder.parent), "has format 2", "reads format 1")


def change_file(**keys):
    return lambda content: content["files"][0].update(keys)


def change_saved(**keys):
    return lambda content: content["saved"].update(keys)


@pytest.mark.parametrize(
    "change",
    [
        change_saved(at="yesterday"),
        change_saved(at=5),
        change_saved(dp_world_size="two"),
        lambda content: content.update(saved=[]),
        lambda content: content.pop("files"),
        lambda content: content.pop("format"),
        lambda content: content["files"].append("a"),
        lambda content: content["files"][0].pop("bytes"),
        change_file(name="../other/mp_rank_00_model_states.pt"),
        change_file(name="/etc/passwd"),
        change_file(name=".."),
        change_file(name=3),
        change_file(bytes=-1),
        change_file(bytes="10"),
        change_file(crc32=["00000000"] * 2),
        change_file(crc32=[0]),
        change_file(tensors=[[["module", "w"], "float32"]]),
        change_file(tensors=[[["module", "w"], "float32", [-1], 0]]),
    ],
)
def test_what_is_no_index_fails_every_rank_and_the_last_good_tag_is_offered(
    ranks, folder, make_training, make_ranks, change
):
    """Whatever its checksum says: no rank raises alone, which would leave its peers in a collective."""
    reseal(folder, change)
    refused(ranks.load(folder.parent), str(folder / layout.INDEX_FILE), "is damaged", "No other tag is whole")
    make_ranks(2, keep_last=1).save(make_training(seed=4), folder.parent, "global_step4")
    refused(ranks.load(folder.parent, TAG), "is damaged", "'global_step4'")
    assert [tag.name for tag in saved_tags(folder.parent)] == [TAG, "global_step4"]


def test_a_table_of_tensors_that_is_none_fails_every_rank(ranks, folder):
    reseal(folder, lambda content: content.update(tensors={"groups": []}))
    refused(ranks.load(folder.parent), str(folder / layout.INDEX_FILE), "is damaged", "No other tag is whole")


@pytest.mark.parametrize("name", ["w", ',"tensors":[1]}', ',\n "tensors": {'])
def test_the_lists_of_tensors_can_be_left_out(tmp_path, name):
    record = TensorRecord("float32", (3,), 64)
    files = (FileEntry(name.strip("\n"), 12, ["0" * 8], {("module", name): record}), FileEntry("b", 1, None))
    table = {"groups": [], "entries": [{"name": name}]}
    for tensors in (None, table):
        index = Index(files, {"tag": name, "global_steps": 3}, tensors)
        content = index.to_bytes()
        assert Index.from_bytes(content, tmp_path) == index
        bare = tuple(replace(entry, tensors=None) for entry in files)
        assert Index.from_bytes(content, tmp_path, with_tensors=False) == Index(bare, index.saved)


def test_a_date_may_be_absent(folder):
    reseal(folder, change_saved(at=None))
    (tag,) = saved_tags(folder.parent)
    assert tag.saved_at.tzinfo is not None
    reseal(folder, change_saved(at="2026-01-02T03:04:05"))
    (tag,) = saved_tags(folder.parent)
    assert tag.saved_at.tzinfo is not None


def test_more_or_fewer_blocks_than_were_saved_are_named(folder):
    path, index = folder / NAMES[0], read_index(folder)
    flip_bit(path)
    entry = FileEntry(NAMES[0], None, ["00000000"] * 2)
    with pytest.raises(DamagedCheckpoint, match="it has 1 block of .* bytes, and was saved with 2"):
        check_content(path, entry, index)


def test_the_index_is_plain_json_and_unknown_keys_are_ignored(folder):
    def change(content):
        assert content["format"] == 1
        content["colors"] = [{"name": "w", "red": 1}]
        content["files"][0]["owner"] = "nobody"

    reseal(folder, change)
    assert read_index(folder).entry(NAMES[0]) is not None


def test_blocks_are_summed_as_they_are_written(tmp_path, monkeypatch):
    """Writes of all sizes, some of which end in a block, and some of which are summed in parts."""
    monkeypatch.setattr(durable, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(durable, "PART_BYTES", 2000)
    parts = [torch.arange(n, dtype=torch.int64).to(torch.uint8).numpy().tobytes() for n in (10, 2990, 1, 9000, 2500, 0)]
    with open(tmp_path / "f", "wb") as file:
        writer = ChecksumWriter(file)
        for part in parts:
            writer.write(memoryview(part))
    whole = b"".join(parts)
    assert (tmp_path / "f").read_bytes() == whole
    expected = [f"{zlib.crc32(whole[start : start + 3000]):08x}" for start in range(0, len(whole), 3000)]
    assert writer.checksums() == checksums_of(tmp_path / "f") == expected


def test_damage_in_a_large_file_is_located(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "BLOCK_BYTES", 4096)
    state = {"module": {"w": torch.arange(4096.0)}, "dp_world_size": 1, "mp_world_size": 1}
    path = Checkpointer().save(tmp_path, "t", model_state=state, shard_state=None) / NAMES[0]
    content = bytearray(path.read_bytes())
    content[9000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its bytes 8192 to 12287 have the CRC-32"):
        Checkpointer().load(tmp_path, load_shard=False)
