"""Which tags are old enough to be removed, and their removal: `checkpoint.keep_last`, and `ds_ckpt prune`."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.store import IndexedStore
from deepspeed.checkpoint.survey import SavedTag, saved_tags
from deepspeed.checkpoint.tags import read_latest
from deepspeed.errors import CheckpointError
from deepspeed.log import logger, warn_once


@dataclass(frozen=True)
class PrunePlan:
    """What `plan_prune` found; tags are in the order of their steps, the first ones first."""

    removed: list[SavedTag]
    kept: dict[str, str]
    """Every other tag -> why it stays."""


def plan_prune(directory: Path, keep_last: int, newest: str | None = None) -> PrunePlan:
    """Which tags of `directory` to remove such that the `keep_last` last complete ones stay. Changes nothing.

    The last ones are those of the most global steps, and among those of as many, or where steps are not known, those
    that were saved last: clocks may be set back. A tag is complete when every file of its index is there with its size,
    and, of those that stay, when the lists of tensors in the index fit. Never removed: what `latest` names, what a
    symbolic link in the directory leads to, links, folders without a readable index (other programs' and older
    checkpoints), and folders that hold other files too.

    Args:
        newest: a tag that was saved just now, whatever the steps of others are; it is one of those that stay.

    Raises `CheckpointError` when `latest` cannot be read.
    """
    assert keep_last >= 1
    latest, linked = read_latest(directory), _linked_in(directory)
    removed: list[SavedTag] = []
    kept: dict[str, str] = {}
    num_complete = 0
    for tag in sorted(saved_tags(directory), key=lambda tag: _place(tag, newest), reverse=True):
        is_recent = num_complete < keep_last
        if is_recent and tag.index is not None and not tag.faults(content=False):
            num_complete += tag.name == newest or not tag.fault_in_table
        why = _why_never(tag, directory)
        if not why and tag.name == latest:
            why = "named by latest"
        elif not why and is_recent:
            why = f"one of the last {keep_last}"
        elif not why and tag.folder.resolve() in linked:
            why = "a link leads to it"
        if why:
            kept[tag.name] = why
        else:
            removed.append(tag)
    return PrunePlan(removed[::-1], dict(reversed(kept.items())))


def prune(directory: Path, keep_last: int, store: IndexedStore | FolderStore, newest: str | None = None) -> None:
    """Remove old tags after a save of the tag `newest`. What cannot be removed is a warning: the save has succeeded."""
    try:
        plan = plan_prune(directory, keep_last, newest)
    except (CheckpointError, OSError) as error:
        warn_once(f"checkpoint.keep_last: nothing was removed from {directory}: {error}", (-1,))
        return
    for tag in plan.removed:
        try:
            store.remove(tag.folder)
            logger.info("checkpoint.keep_last: %d: removed %s", keep_last, tag.folder)
        except CheckpointError as error:
            warn_once(f"checkpoint.keep_last: {error}", (-1,))


def _place(tag: SavedTag, newest: str | None) -> tuple[bool, int, datetime]:
    steps = tag.index.saved.get("global_steps") if tag.index is not None else None
    return tag.name == newest, -1 if steps is None else steps, tag.saved_at


def _why_never(tag: SavedTag, directory: Path) -> str:
    if tag.folder != directory / tag.name or tag.folder.is_symlink():
        return "a link, or a save that is not finished"
    if tag.index is None:
        return tag.trouble or f"it has no {layout.INDEX_FILE}"
    listed = {entry.name for entry in tag.index.files}
    names = [path.name for path in tag.folder.iterdir()]
    foreign = [name for name in names if name not in listed and not layout.is_own_file(name)]
    return f"it holds other files: {', '.join(sorted(foreign))}" if foreign else ""


def _linked_in(directory: Path) -> set[Path]:
    """What the symbolic links in `directory` lead to."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}
