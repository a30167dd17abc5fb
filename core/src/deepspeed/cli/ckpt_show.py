"""`ds_ckpt show`: list the tags in a directory, the files and parameters of a tag, or the positions of its tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import merged, naming_files
from deepspeed.checkpoint.index import TensorEntry, TensorTable, read_index
from deepspeed.checkpoint.layout import store_failures
from deepspeed.checkpoint.load import check_types
from deepspeed.checkpoint.stores import built_in_store
from deepspeed.checkpoint.tags import SavedTag, read_latest, saved_tags
from deepspeed.checkpoint.tensors import StackedTensor, StoredTensor
from deepspeed.cli.ckpt_commands import Result, as_size, asked_tags, no_tags, warn
from deepspeed.cli.console import make_table
from deepspeed.comm.values import dtype_name
from deepspeed.errors import CheckpointError

_COLUMNS = ("tag", "step", "stage", "ranks", "size", "date", "complete", "latest")


def run(directory: Path, persistent: Path | None = None) -> Result:
    """List the tags of `directory`, oldest first, and with `persistent` those of that farther tier.

    The record: `directory`, `latest`, and `tags`, each with `tag`, `global_steps`, `zero_stage`, `ranks` (data parallel
    x model parallel), `bytes`, `date` (ISO 8601), `complete` (by names and sizes) and `faults`. Values that only an
    index holds are null for a checkpoint without an index. With `persistent`: the path too, `persistent_latest`, and of
    each tag the `tier`, "near" or "persistent"; a tag that is in both has two entries.
    """
    latest = read_latest(directory)
    record: dict[str, Any] = {"directory": str(directory), "latest": latest}
    if persistent is None:
        rows = [_about(tag) for tag in saved_tags(directory)]
    else:
        with store_failures(persistent):
            record |= {"persistent": str(persistent), "persistent_latest": read_latest(persistent)}
            tiers = (("near", saved_tags(directory)), ("persistent", saved_tags(persistent)))
            found = [(tag.saved_at, {**_about(tag), "tier": tier}) for tier, tags in tiers for tag in tags]
            rows = [row for _, row in sorted(found, key=lambda each: each[0])]
    record["tags"] = rows
    if not rows:
        hint = no_tags(directory, "show")
        return Result(record, lambda console: warn(console, hint))
    return Result(record, lambda console: _show_tags(record, console), any(row["faults"] for row in rows))


def run_tag(directory: Path, name: str) -> Result:
    """List the files of one tag, and the module's parameters and buffers according to its first model file.

    The record: the tag's entry in the record of `run`, `files` (`name`, `bytes`, `crc32`) and `parameters` (`name`,
    `shape`, and `dtype`, which is null if the file does not hold it).
    """
    (tag,) = asked_tags(directory, [name])
    about = _about(tag)
    listed = [(each.name, each.num_bytes, each.checksums) for each in tag.index.files] if tag.index is not None else []
    files = [dict(zip(("name", "bytes", "crc32"), each, strict=True)) for each in listed] or _files_in(tag.folder)
    parameters, trouble = _parameters(tag)
    record = {**about, "files": files, "parameters": parameters}
    if trouble:
        record["faults"] = {**about["faults"], "parameters": trouble}
    return Result(record, lambda console: _show_tag(record, console), bool(record["faults"]))


def run_tensors(directory: Path, name: str) -> Result:
    """List the positions in the files of each parameter and buffer of one tag.

    The record: `directory`, `tag` and `tensors`, each with `name`, `shape`, `mp_rank` and `values`. `values` maps
    `weight` (the module's), `fp32` (the master weights) and each optimizer state to a list of pieces, in the order of
    elements: `file`, `dp_rank`, `key` (path of keys to a tensor in the file), `dtype`, `start` and `numel` (elements of
    that tensor), `offset` (first byte in the file; null unless the tensor's elements are in row-major order).

    Raises:
        CheckpointError: the tag has no index, or its index lists no tensors.
    """
    (tag,) = asked_tags(directory, [name])
    index = read_index(tag.folder)
    if index is None:
        raise CheckpointError(f"{tag.folder} has no {layout.INDEX_FILE}, which says where tensors are")
    table = TensorTable(index)
    record = {"directory": str(directory), "tag": name, "tensors": [_tensor(entry) for entry in table]}
    return Result(record, lambda console: _show_tensors(record, console))


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    values = {
        value: [{**piece._asdict(), "key": list(piece.key), "dp_rank": layout.ranks_of(piece.file)[0]} for piece in its]
        for value, its in entry.values.items()
    }
    return {"name": entry.name, "shape": list(entry.shape), "mp_rank": entry.mp_rank, "values": values}


def _about(tag: SavedTag) -> dict[str, Any]:
    saved: Mapping[str, Any] = tag.index.saved if tag.index is not None else {}
    faults = tag.faults(content=False)
    sizes = [saved.get("dp_world_size"), saved.get("mp_world_size")]
    return {
        "tag": tag.name,
        "global_steps": saved.get("global_steps"),
        "zero_stage": saved.get("zero_stage"),
        "ranks": math.prod(sizes) if None not in sizes else None,
        "bytes": tag.num_bytes,
        "date": tag.saved_at.isoformat(timespec="seconds"),
        "complete": None if tag.index is None and not faults else not faults,
        "faults": faults,
    }


def _files_in(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(path for path in folder.iterdir() if layout.is_checkpoint_file(path.name))
    return [{"name": path.name, "bytes": path.stat().st_size, "crc32": None} for path in paths]


def _parameters(tag: SavedTag) -> tuple[list[dict[str, Any]], str]:
    """Return the module's parameters and buffers, and an error message ("" if they can be read)."""
    models = sorted(path for path in tag.folder.iterdir() if layout.is_model_file(path.name))
    if not models:
        return [], f"{tag.folder} holds no model file (*_model_states.pt)"
    try:
        store = built_in_store(models[0])

        def load(name: str) -> Any:
            return store.load(tag.folder / name, mmap=True)

        state = load(models[0].name)
        state = naming_files(state, models[0], load) if isinstance(state, dict) else state
        check_types(state, models[0])
        state = merged(state, load, StackedTensor)
    except CheckpointError as error:
        return [], str(error)
    module = {n: value for n, value in state["module"].items() if isinstance(value, torch.Tensor | StoredTensor)}
    shapes = {name: value.shape for name, value in module.items()}
    for group in state.get("param_shapes") or []:
        shapes.update(group)  # at stage 3 the module's entries may be empty
    dtypes = {name: dtype_name(value.dtype) for name, value in module.items()}
    return [{"name": name, "shape": list(shape), "dtype": dtypes.get(name)} for name, shape in shapes.items()], ""


def _show_tags(record: Mapping[str, Any], console: Console) -> None:
    latest = {"near": record["latest"], "persistent": record.get("persistent_latest")}
    rows = [_row(row, latest[row.get("tier", "near")]) for row in record["tags"]]
    if "persistent" not in record:
        console.print(make_table(f"Checkpoints in {record['directory']}", _COLUMNS, rows))
    else:
        tiered = [[*row, each["tier"]] for row, each in zip(rows, record["tags"], strict=True)]
        title = f"Checkpoints in {record['directory']} (near) and {record['persistent']} (persistent)"
        console.print(make_table(title, (*_COLUMNS, "tier"), tiered))
    _show_faults([fault for row in record["tags"] for fault in row["faults"].values()], console)


def _show_tag(record: Mapping[str, Any], console: Console) -> None:
    console.print(make_table(f"Tag {record['tag']}", _COLUMNS[:-1], [_row(record)[:-1]]))
    files = [
        (each["name"], as_size(each["bytes"] or 0), "none" if each["crc32"] is None else ", ".join(each["crc32"][:2]))
        for each in record["files"]
    ]
    console.print(make_table("Files", ("name", "size", "CRC-32 of the first blocks"), files))
    parameters = [
        (each["name"], " x ".join(map(str, each["shape"])) or "scalar", each["dtype"] or "")
        for each in record["parameters"]
    ]
    console.print(make_table("Parameters and buffers", ("name", "shape", "dtype"), parameters))
    _show_faults(record["faults"].values(), console)


def _show_tensors(record: Mapping[str, Any], console: Console) -> None:
    rows = [
        (
            *(each["name"], " x ".join(map(str, each["shape"])) or "scalar", value, piece["dtype"], piece["file"]),
            *("/".join(map(str, piece["key"])), f"{piece['start']} + {piece['numel']}"),
            "" if piece["offset"] is None else str(piece["offset"]),
        )
        for each in record["tensors"]
        for value, pieces in each["values"].items()
        for piece in pieces
    ]
    columns = ("name", "shape", "value", "dtype", "file", "key", "elements", "byte")
    console.print(make_table(f"Tensors of {record['tag']}", columns, rows))


def _row(row: Mapping[str, Any], latest: str | None = None) -> list[str]:
    told = ["" if row[key] is None else str(row[key]) for key in ("global_steps", "zero_stage", "ranks")]
    complete = {True: "yes", False: "no", None: "no index"}[row["complete"]]
    return [row["tag"], *told, as_size(row["bytes"]), row["date"], complete, "latest" if row["tag"] == latest else ""]


def _show_faults(faults: Any, console: Console) -> None:
    for fault in faults:
        warn(console, fault)
