"""`ds_ckpt convert`: a checkpoint in the format of another program."""

from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.checkpoint import consolidate, layout
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.location import local_folder
from deepspeed.cli.ckpt_result import Result, as_size
from deepspeed.cli.console import make_table
from deepspeed.errors import CheckpointError


def run(source: Path, target: str, to: str, tag: str | None, max_shard_size: str) -> Result:
    """Convert one tag.

    The record: `directory`, `tag`, `to`, `output`, and `files`, of each `name` and `bytes`.
    """
    directory, output = local_folder(source, "convert"), local_folder(target, "write a converted checkpoint to")
    try:
        name = layout.tag_of(consolidate.tag_folder(directory, tag))
        convert(directory, output, to, tag=tag, max_shard_size=max_shard_size)
    except ValueError as error:  # max_shard_size
        raise CheckpointError(str(error)) from error
    paths = sorted(path for path in output.rglob("*") if path.is_file())
    files = [{"name": str(path.relative_to(output)), "bytes": path.stat().st_size} for path in paths]
    record = {"directory": str(directory), "tag": name, "to": to, "output": str(output), "files": files}
    return Result(record, lambda console: _show(record, console))


def _show(record: dict[str, Any], console: Console) -> None:
    rows = [(each["name"], as_size(each["bytes"])) for each in record["files"]]
    console.print(make_table(f"{record['tag']} as {record['to']} in {record['output']}", ("file", "size"), rows))
