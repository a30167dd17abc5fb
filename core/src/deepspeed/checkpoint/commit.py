"""The last steps of a save, on one rank: every file is there, so the checkpoint takes its place, `latest` names it, and
old tags are removed (`checkpoint.keep_last`; `ds_ckpt prune` does it by hand).

`zero_to_fp32.py`, which a save puts beside the tags, is one program out of several files of this folder. Imports no
torch: where saves are asynchronous, the writer process does this.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, write_file
from deepspeed.checkpoint.index import FileEntry
from deepspeed.checkpoint.layout import is_remote
from deepspeed.checkpoint.store import FolderStore, IndexedStore, Store
from deepspeed.checkpoint.tags import SavedTag, read_latest, saved_tags, write_latest
from deepspeed.checkpoint.tensor_index import index_of
from deepspeed.errors import CheckpointError
from deepspeed.log import logger, warn_once


def put_in_place(
    store: Store | FolderStore,
    folder: Path,
    entries: Sequence[FileEntry],
    facts: Mapping[str, Any],
    *,
    save_latest: bool,
) -> None:
    """Put the staged files of all ranks in the place of `folder`.

    Args:
        entries: the files of all ranks.
        facts: `Index.saved`.
    """
    write_script(folder)
    if isinstance(store, IndexedStore | FolderStore):
        store.write_index(folder, index_of(entries, facts))
    store.commit(folder, {entry.name: entry.num_bytes for entry in entries})
    if save_latest:
        write_latest(folder.parent, folder.name)


def write_script(folder: Path) -> None:
    """Put `zero_to_fp32.py` beside the tag's `folder`: a program that runs without this package."""
    source = script()
    target = folder.with_name(layout.SCRIPT_FILE)
    if target.is_file() and target.read_bytes() == source:
        return
    write_file(target, lambda file: file.write(source), layout.draft_file(folder))
    if is_remote(target):
        return
    try:
        target.chmod(0o755)
    except OSError as error:
        raise disk_error("make executable", target, error) from error


@dataclass(frozen=True)
class PrunePlan:
    """A `PrunePlan` lists the tags to remove and the tags to keep, in the order of their steps, first ones first."""

    removed: list[SavedTag]
    kept: dict[str, str]
    """Every other tag -> why it stays."""


def plan_prune(directory: Path, keep_last: int, newest: str | None = None) -> PrunePlan:
    """Find which tags of `directory` to remove such that the `keep_last` last complete ones stay. Changes nothing.

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
    """Return the paths that the symbolic links in `directory` lead to."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}


#: in the order in which the program has them; the first says what it is
_FILES = ("consolidate_files.py", "consolidate_join.py", "consolidate.py")
_OWN = "deepspeed.checkpoint.consolidate"


def script() -> bytes:
    """The program, which needs torch and the standard library: the files without their imports of each other."""
    folder = Path(__file__).parent
    texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES]
    about = ast.get_docstring(ast.parse(texts[-1]), clean=False)
    return "\n\n".join([f'#!/usr/bin/env python3\n"""{about}"""\n', *map(_without_imports, texts)]).encode()


def _without_imports(text: str) -> str:
    """A file without its imports of the others."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)
