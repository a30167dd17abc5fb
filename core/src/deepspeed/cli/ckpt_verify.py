"""`ds_ckpt verify`: every file of the tags is read and compared with the index beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.tags import SavedTag, read_latest
from deepspeed.cli.ckpt_result import Result, as_size, asked_tags, make_progress, warn
from deepspeed.cli.console import make_table
from deepspeed.errors import CheckpointError

_COLUMNS = ("tag", "state", "files", "size")


def run(directory: Path, names: list[str]) -> Result:
    """Verify the tags `names` of `directory`, or all of them and the file `latest`.

    The record: `directory`; `tags`, of each `tag`, `state` ("whole", "damaged", "no index": there is nothing to compare
    its files with), `bytes`, `files`, `faults` (name of a file -> what is wrong); `latest`: what is wrong with it, or
    null.
    """
    tags = asked_tags(directory, names)
    if not tags:
        raise CheckpointError(
            f"{directory} holds no tag that save_checkpoint saved, so there is nothing to verify; give the directory "
            "that save_checkpoint was given"
        )
    with make_progress() as bar:
        task = bar.add_task("", total=sum(tag.num_bytes for tag in tags))
        rows = []
        for tag in tags:
            bar.update(task, description=tag.name)
            rows.append(_verified(tag, lambda num_bytes: bar.advance(task, num_bytes)))
    latest = None if names else _fault_in_latest(directory)
    record = {"directory": str(directory), "tags": rows, "latest": latest}
    has_faults = latest is not None or any(row["faults"] for row in rows)
    return Result(record, lambda console: _show(record, console), has_faults)


def _verified(tag: SavedTag, advance: Callable[[int], object]) -> dict[str, Any]:
    faults = tag.faults(content=True, advance=advance)
    if tag.index is not None:
        listed = {layout.INDEX_FILE, *(entry.name for entry in tag.index.files)}
        names = sorted(path.name for path in tag.folder.iterdir() if layout.is_checkpoint_file(path.name))
        unlisted = [name for name in names if name not in listed]
        faults.update({name: f"{tag.folder / name} is not listed in the index beside it" for name in unlisted})
    state = "damaged" if faults else "whole" if tag.index is not None else "no index"
    num_files = len(tag.index.files) if tag.index is not None else None
    return {"tag": tag.name, "state": state, "bytes": tag.num_bytes, "files": num_files, "faults": faults}


def _fault_in_latest(directory: Path) -> str | None:
    try:
        latest = read_latest(directory)
    except CheckpointError as error:
        return str(error)
    if latest is None or layout.whole_folder(directory / latest) is not None:
        return None
    return (
        f"{directory / layout.LATEST_FILE} names {latest!r}, which is not there. Write one of "
        f"{layout.tags_in(directory)} into it."
    )


def _show(record: dict[str, Any], console: Console) -> None:
    rows = [
        (row["tag"], row["state"], "" if row["files"] is None else str(row["files"]), as_size(row["bytes"]))
        for row in record["tags"]
    ]
    console.print(make_table(f"Checkpoints in {record['directory']}", _COLUMNS, rows))
    for fault in (fault for row in record["tags"] for fault in row["faults"].values()):
        warn(console, fault)
    if record["latest"] is not None:
        warn(console, record["latest"])
