"""The last steps of a save, on one rank: every file is there, so the checkpoint takes its place and `latest` names it.

Imports no torch: where saves are asynchronous, the writer process does this.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, write_file
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.index import FileEntry
from deepspeed.checkpoint.location import is_remote
from deepspeed.checkpoint.standalone import script
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tags import write_latest
from deepspeed.checkpoint.tensor_index import index_of


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
