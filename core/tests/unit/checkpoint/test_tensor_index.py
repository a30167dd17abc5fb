"""The tensors of an index: found with nothing but the index and the bytes of the files."""

import dataclasses
import json
import math
import re
import struct

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, TorchStore, layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.index import Index, TensorTable, read_index
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.checkpoint.tensor_index import file_entry, sorted_entries, tensor_table
from deepspeed.cli.ckpt import main
from deepspeed.errors import CheckpointError


def read_plainly(folder, index, entry, value):
    """As a program without torch and without this package reads a value: JSON, seek and read."""
    key, parts = entry["weight"].values() if value == "weight" else (None, entry["parts"])
    key = key or index["tensors"]["groups"][entry["group"]][value]
    left, found = math.prod(entry["shape"]), b""
    for file, count, start, numel in parts:
        for each in index["files"][file : file + count]:
            dtype, _, offset = next(about for its_key, *about in each["tensors"] if its_key == key)
            itemsize = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype]
            with open(folder / each["name"], "rb") as source:
                source.seek(offset + start * itemsize)
                found += source.read(min(numel, left) * itemsize)
            left -= min(numel, left)
    return found


def stage3(training, rank):
    """A shard in which each parameter is divided."""
    state = training.shard_state(rank)
    shard = state["optimizer_state_dict"]
    del shard["single_partition_of_fp32_groups"]

    def part(weight):
        size = -(-weight.numel() // training.world_size)
        return torch.cat([weight.reshape(-1), torch.zeros(size * training.world_size)])[rank * size :][:size]

    flat = [torch.cat([part(weight) for weight in group.values()]) for group in training.groups]
    states = {index: {"exp_avg": values / 2} for index, values in enumerate(flat)}
    base = {"state": states, "param_groups": [{}, {}]}
    shard.update(zero_stage=3, fp32_flat_groups=flat, base_optimizer_state=base)
    return state


@pytest.fixture(params=[("divided", 2), ("divided", 3), ("sharded", 2), ("sharded", 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def saved(request, make_ranks, make_training, tmp_path):
    kind, world_size = request.param
    training = make_training(world_size=world_size)
    shard = stage3 if kind == "sharded" else type(training).shard_state

    def save(checkpointer, rank):
        model_state = training.model_state() if checkpointer.writes_model else None
        return checkpointer.save(tmp_path, "t", model_state=model_state, shard_state=shard(training, rank))

    assert make_ranks(world_size)(save) == [tmp_path / "t"] * world_size
    return training, tmp_path / "t"


def test_every_value_is_read_with_json_and_seek(saved):
    training, folder = saved
    index = json.loads((folder / layout.INDEX_FILE).read_text())
    entries = {entry["name"]: entry for entry in index["tensors"]["entries"]}
    trained = {name: weight for group in training.groups for name, weight in group.items()}
    assert entries.pop("head.weight") == {"name": "head.weight", "same_as": "embed.weight"}
    assert entries.keys() == training.weights.keys() - {"head.weight"}
    for name, entry in entries.items():
        weight = training.weights[name]
        half = weight.bfloat16() if weight.is_floating_point() else weight
        assert entry["shape"] == list(weight.shape)
        assert read_plainly(folder, index, entry, "weight") == half.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert ("group" in entry) == (name in trained)
        if name in trained:
            floats = struct.pack(f"<{weight.numel()}f", *weight.flatten().tolist())
            assert read_plainly(folder, index, entry, "fp32") == floats
            halves = struct.pack(f"<{weight.numel()}f", *(weight / 2).flatten().tolist())
            assert read_plainly(folder, index, entry, "exp_avg") == halves


def test_the_table_gives_files_keys_and_bytes(saved):
    training, folder = saved
    table = TensorTable(read_index(folder))
    assert [entry.name for entry in table] == list(training.weights)
    weight = training.weights["embed.weight"]
    for name in ("embed.weight", "head.weight"):
        entry = table.entry(name)
        assert (entry.name, entry.shape, set(entry.values)) == (name, weight.shape, {"weight", "fp32", "exp_avg"})
        pieces = entry.values["fp32"]
        assert sum(piece.numel for piece in pieces) == weight.numel()
        for piece in pieces:
            tensor = torch.load(folder / piece.file, weights_only=True)
            for step in piece.key:
                tensor = tensor[step]
            flat = tensor[piece.start : piece.start + piece.numel]
            content = (folder / piece.file).read_bytes()[piece.offset :][: flat.nbytes]
            assert content == flat.view(torch.uint8).numpy().tobytes()


def test_show_lists_the_pieces(saved, capsys):
    training, folder = saved
    arguments = ["show", str(folder.parent), "t", "--tensors"]
    assert main([*arguments, "--json"]) == 0
    tensors = {each["name"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert tensors.keys() == training.weights.keys()
    for name, weight in training.weights.items():
        for pieces in tensors[name]["values"].values():
            assert sum(piece["numel"] for piece in pieces) == weight.numel()
            assert [piece["dp_rank"] for piece in pieces] == sorted(piece["dp_rank"] for piece in pieces)
    assert main(arguments) == 0
    assert "exp_avg" in capsys.readouterr().out


def test_an_asynchronous_save_lists_the_same(make_training, tmp_path):
    training = make_training(world_size=1)
    tables = []
    for name, background in (("sync", None), ("async", BackgroundWriter())):
        checkpointer = Checkpointer(background=background)
        states = {"model_state": training.model_state(), "shard_state": training.shard_state(0)}
        folder = checkpointer.save(tmp_path / name, "t", **states)
        checkpointer.wait_for_save()
        checkpointer.close()
        index = read_index(folder)
        tables.append((index.tensors, [entry.tensors for entry in index.files]))
    assert tables[0] == tables[1]


def test_states_of_torchs_optimizer_are_found_by_name(make_training, tmp_path):
    training = make_training(world_size=1, stage=0)
    trained = {name: weight for group in training.groups for name, weight in group.items()}
    numbers = {name: number for number, name in enumerate(trained)}
    state = {
        numbers[name]: {"step": torch.tensor(3.0), "exp_avg": weight / 2, "row": weight.reshape(-1)[:1].clone()}
        for name, weight in trained.items()
    }
    names = [list(group) for group in training.groups]
    groups = [{"params": [numbers[name] for name in its]} for its in names]
    optimizer = {"state": state, "param_groups": groups, "param_names": names}
    model_state = {**training.model_state(), "optimizer": optimizer}
    folder = Checkpointer().save(tmp_path, "t", model_state=model_state, shard_state=None)
    table = TensorTable(read_index(folder))
    for name in ("embed.weight", "lin.bias"):
        assert set(table.entry(name).values) == {"weight", "exp_avg"}
        (piece,) = table.entry(name).values["exp_avg"]
        assert piece.key == ("optimizer", "state", numbers[name], "exp_avg")
        assert piece.numel == trained[name].numel()
    assert set(table.entry("running").values) == {"weight"}


def entries_of(folder, states):
    """The index's entries of files that are written here."""
    entries = []
    for name, state in states.items():
        torch.save(state, folder / name)
        with open(folder / name, "rb") as file:
            entries.append(file_entry(name, None, None, file))
    return entries


def test_each_model_parallel_rank_has_its_own(make_training, tmp_path):
    states = {}
    for mp_rank in (1, 0):
        training = make_training(world_size=2, seed=mp_rank)
        states[layout.model_file(mp_rank)] = training.model_state()
        states.update({layout.shard_file(rank, mp_rank): training.shard_state(rank) for rank in (1, 0)})
    entries = sorted_entries(entries_of(tmp_path, states))
    table = TensorTable(Index(tuple(entries), {}, json.loads(json.dumps(tensor_table(entries)))))
    for mp_rank in range(2):
        entry = table.entry("embed.weight", mp_rank)
        assert entry.mp_rank == mp_rank
        for pieces in entry.values.values():
            assert {layout.ranks_of(piece.file)[1] for piece in pieces} == {mp_rank}


def test_frozen_parameters_of_stage_3_are_in_the_model_files_of_all_ranks(tmp_path):
    whole = torch.arange(7.0)
    parts = list(torch.cat([whole, torch.zeros(2)]).chunk(3))
    states = {
        layout.model_file(0, rank): {
            "module": {"frozen": torch.empty(0), "count": torch.tensor(4)},
            "frozen_param_shapes": {"frozen": torch.Size([7])},
            "frozen_param_fragments": {"frozen": parts[rank]},
        }
        for rank in range(3)
    }
    entries = sorted_entries(entries_of(tmp_path, states))
    table = tensor_table(entries)
    assert table["entries"][1]["weight"]["parts"] == [(0, 3, 0, 3)]
    frozen = TensorTable(Index(tuple(entries), {}, table)).entry("frozen")
    assert [piece.numel for piece in frozen.values["weight"]] == [3, 3, 1]


def test_a_table_is_small(tmp_path):
    """Under 150 bytes per parameter and file, however many ranks there are."""
    shapes = {f"model.layers.{index}.self_attn.q_proj.weight": torch.Size([4, 4]) for index in range(1000)}
    module = {name: torch.empty(0) for name in shapes}
    states = {layout.model_file(0, rank): {"module": module, "param_shapes": [shapes]} for rank in range(8)}
    flat = torch.zeros(2 * len(shapes))
    shard = {"fp32_flat_groups": [flat], "base_optimizer_state": {"state": {0: {"exp_avg": flat}}}}
    states |= {layout.shard_file(rank, 0): {"optimizer_state_dict": shard} for rank in range(8)}
    entries = sorted_entries(entries_of(tmp_path, states))
    content = Index(tuple(entries), {}, tensor_table(entries)).to_bytes()
    assert len(content) < 150 * len(shapes)


def test_a_store_that_writes_files_of_its_own_has_an_index_without_tensors(make_training, tmp_path):
    class Bytes(TorchStore):
        def save(self, state, folder, name):
            return (layout.staging_folder(folder) / name).write_bytes(b"mine")

    states = {"model_state": make_training(world_size=1).model_state(), "shard_state": None}
    folder = Checkpointer(store=Bytes()).save(tmp_path, "t", **states)
    index = read_index(folder)
    assert (index.tensors, index.files[0].tensors) == (None, None)
    with pytest.raises(CheckpointError, match="lists no tensors"):
        TensorTable(index)


class Unknown(TorchStore):
    """Writes files of torch.save whose pickle no version of torch makes."""

    class Value:
        def __reduce__(self):
            return torch._utils._rebuild_parameter, ()

    def save(self, state, folder, name):
        torch.save(self.Value(), layout.staging_folder(folder) / name)


ODD = {  # plain data that the table cannot be made of
    "shapes": {"param_shapes": ["odd"]},
    "groups": {"optimizer": {"param_names": [["w"]], "param_groups": []}},
    "names": {"shared_params": {("a", "b"): "w"}},
    "text": {"frozen_param_fragments": {"\ud800": torch.ones(2)}},  # not to be encoded
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("odd", ODD)
def test_a_save_whose_tensors_cannot_be_listed_is_whole(tmp_path, odd, is_async, capfd):
    state = {"module": {"w": torch.ones(2)}, "dp_world_size": 1, "mp_world_size": 1, **ODD[odd]}
    checkpointer = Checkpointer(background=BackgroundWriter() if is_async else None)
    folder = checkpointer.save(tmp_path, "t", model_state=state, shard_state=None)
    checkpointer.wait_for_save()
    checkpointer.close()
    assert saved_tags(tmp_path)[0].faults(content=True) == {}
    index = read_index(folder)
    assert (index.tensors, [entry.tensors for entry in index.files]) == (None, [None])
    assert capfd.readouterr().err.count("lists no tensors") == 1


def test_a_file_with_a_pickle_that_is_not_known_does_not_fail_the_save(tmp_path, capfd):
    states = {"model_state": {"module": {}, "dp_world_size": 1, "mp_world_size": 1}, "shard_state": None}
    folder = Checkpointer(store=Unknown()).save(tmp_path, "t", **states)
    assert read_index(folder).tensors is None
    assert re.search(r"mp_rank_00_model_states.pt: TypeError: .*argument", capfd.readouterr().err)


def test_show_says_why_there_are_no_tensors(make_training, tmp_path, capsys):
    training = make_training(world_size=1)
    states = {"model_state": training.model_state(), "shard_state": None}
    folder = Checkpointer().save(tmp_path, "t", **states)
    index = read_index(folder)
    files = [dataclasses.replace(entry, tensors=None) for entry in index.files]
    (folder / layout.INDEX_FILE).write_bytes(
        Index(tuple(files), index.saved).to_bytes()
    )  # as earlier versions wrote it
    assert Checkpointer().load(tmp_path, load_shard=False).tag == "t"
    assert main(["show", str(tmp_path), "t", "--tensors"]) == 2
    assert "an earlier version" in capsys.readouterr().err
    (folder / layout.INDEX_FILE).unlink()
    assert main(["show", str(tmp_path), "t", "--tensors"]) == 2
    assert "has no index.json" in capsys.readouterr().err
    assert main(["show", str(tmp_path), "--tensors"]) == 2
    assert "found no TAG" in capsys.readouterr().err
