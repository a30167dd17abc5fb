"""`ds_ckpt convert`: a checkpoint in the format of another program."""

from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.checkpoint import consolidate, layout
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.layout import local_folder
from deepspeed.cli.ckpt_result import Result, as_size, make_progress
from deepspeed.cli.console import make_table
from deepspeed.errors import CheckpointError


def run(source: Path, target: str, to: str, tag: str | None, max_shard_size: str, *, verify: bool) -> Result:
    """Convert one tag.

    The record: `directory`, `tag`, `to`, `output`, and `files`, of each `name` and `bytes`.
    """
    directory, output = local_folder(source, "convert"), local_folder(target, "write a converted checkpoint to")
    try:
        folder = consolidate.tag_folder(directory, tag)
        with make_progress() as bar:
            task = bar.add_task(f"verifying {folder.name}", total=sum(path.stat().st_size for path in folder.iterdir()))
            convert(
                directory,
                output,
                to,
                tag=tag,
                max_shard_size=max_shard_size,
                verify=verify,
                advance=lambda num_bytes: bar.advance(task, num_bytes),
            )
    except ValueError as error:  # max_shard_size
        raise CheckpointError(str(error)) from error
    paths = sorted(path for path in output.rglob("*") if path.is_file())
    files = [{"name": str(path.relative_to(output)), "bytes": path.stat().st_size} for path in paths]
    record = {
        "directory": str(directory),
        "tag": layout.tag_of(folder),
        "to": to,
        "output": str(output),
        "files": files,
    }
    return Result(record, lambda console: _show(record, console))


def _show(record: dict[str, Any], console: Console) -> None:
    rows = [(each["name"], as_size(each["bytes"])) for each in record["files"]]
    console.print(make_table(f"{record['tag']} as {record['to']} in {record['output']}", ("file", "size"), rows))
