"""`ds_ckpt prune`: old tags are removed, as `checkpoint.keep_last` does after a save."""

from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.checkpoint import TorchStore
from deepspeed.checkpoint.commit import plan_prune
from deepspeed.checkpoint.stores import built_in_store
from deepspeed.cli.ckpt_result import Result, as_size
from deepspeed.cli.console import make_table
from deepspeed.errors import CheckpointError


def run(directory: Path, keep_last: int, *, dry_run: bool) -> Result:
    """Remove the tags that `plan_prune` names.

    The record: `directory`, `dry_run`, `removed` (tag -> bytes), `failed` (tag -> why it could not be removed), `kept`
    (tag -> why it stays).
    """
    store = built_in_store(directory)
    if not dry_run and isinstance(store, TorchStore):
        store.finish_removals(directory)
    plan = plan_prune(directory, keep_last)
    removed: dict[str, int] = {}
    failed: dict[str, str] = {}
    for tag in plan.removed:
        num_bytes = tag.num_bytes
        try:
            if not dry_run:
                store.remove(tag.folder)
            removed[tag.name] = num_bytes
        except CheckpointError as error:
            failed[tag.name] = str(error)
    record = {"directory": str(directory), "dry_run": dry_run, "removed": removed, "failed": failed, "kept": plan.kept}
    return Result(record, lambda console: _show(record, console), bool(failed))


def _show(record: dict[str, Any], console: Console) -> None:
    done = "would be removed" if record["dry_run"] else "removed"
    rows = [(tag, done, "older than the tags that stay") for tag in record["removed"]]
    rows += [(tag, "failed", why) for tag, why in record["failed"].items()]
    rows += [(tag, "kept", why) for tag, why in record["kept"].items()]
    console.print(make_table(f"Checkpoints in {record['directory']}", ("tag", "what", "why"), rows))
    console.print(f"{as_size(sum(record['removed'].values()))} {done}", markup=False, highlight=False)
