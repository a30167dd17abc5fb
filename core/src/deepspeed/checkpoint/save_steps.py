"""The steps of a save, which all ranks take together: here, or up to the copy, with writer processes for the rest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.commit import put_in_place
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.index import FileEntry
from deepspeed.checkpoint.prune import prune
from deepspeed.checkpoint.reports import COMMITTER
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tensor_index import file_entry


@dataclass(frozen=True)
class Save:
    """One save, as one rank knows it."""

    folder: Path
    files: Mapping[str, Any]
    """Name -> state, of this rank; checked, so that it loads again."""
    facts: Mapping[str, Any]
    """`Index.saved`."""
    save_latest: bool
    keep_last: int | None
    what: str
    """Completes "cannot ..."."""


def save_here(save: Save, ranks: Ranks, store: Store) -> None:
    """Return when the checkpoint is in its place. After a failure nothing of it is left."""
    try:
        _write(save, ranks, store)
    except BaseException:
        if ranks.commits:
            store.discard(save.folder)
        raise
    if ranks.commits and save.keep_last is not None:
        assert isinstance(store, IndexedStore)
        prune(save.folder.parent, save.keep_last, store, newest=save.folder.name)


def _write(save: Save, ranks: Ranks, store: Store) -> None:
    folder = save.folder

    def create() -> None:
        if ranks.commits:
            store.create(folder)

    def write() -> list[FileEntry]:
        sizes = {name: store.save(state, folder, name) for name, state in save.files.items()}
        store.wait()
        return [_entry(store, folder, name, size) for name, size in sizes.items()]

    def commit() -> None:
        if ranks.commits:
            others = [FileEntry.parse(each) for text in written if text for each in json.loads(text)]
            put_in_place(store, folder, [*own, *others], save.facts, save_latest=save.save_latest)

    ranks.together(create, save.what)
    own = ranks.together(write, save.what)
    written = ranks.gather(None if ranks.commits else json.dumps([entry.as_message() for entry in own]))
    ranks.together(commit, save.what)


def _entry(store: Store, folder: Path, name: str, num_bytes: int | None) -> FileEntry:
    """What the index says of a file that this rank wrote."""
    path = layout.staging_folder(folder) / name
    checksums = store.checksums(folder, name) if isinstance(store, IndexedStore) else None
    if not (isinstance(store, FolderStore) and path.is_file()):  # a remote one would be read from where it went
        return FileEntry(name, num_bytes, checksums)
    with path.open("rb") as file:
        return file_entry(name, num_bytes, checksums, file)


def save_in_background(save: Save, ranks: Ranks, background: BackgroundWriter) -> None:
    """Return when every rank has copied its states; the writer processes agree about the rest (`reports.py`)."""
    rank = str(ranks.position.rank)
    name = COMMITTER if ranks.commits else rank
    others = [other for other in map(str, range(ranks.position.world_size)) if other != rank]
    commit = {
        "others": others,
        "facts": save.facts,
        "save_latest": save.save_latest,
        "keep_last": save.keep_last,
    }

    def create() -> None:
        if ranks.commits:
            background.create(save.folder)

    def stage() -> list[dict[str, Any]]:
        return background.stage(save.folder, name, save.files)

    try:
        ranks.together(create, save.what)
        staged = ranks.together(stage, save.what)
        (began,) = filter(None, ranks.gather(save.facts["at"] if ranks.commits else None))
        background.write(
            staged,
            commit if ranks.commits else None,
            folder=save.folder,
            name=name,
            began=began,
            save_latest=save.save_latest,
        )
    except Exception:
        background.cancel()
        raise
    except BaseException:  # an interrupt
        background.kill()
        raise
