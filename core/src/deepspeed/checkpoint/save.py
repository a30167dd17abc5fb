"""A save: what goes into it, and its steps, which all ranks take together.

They take them here (`save_here`), or up to the copy, with writer processes for the rest (`save_in_background`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from deepspeed._version import CORE_VERSION
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.commit import put_in_place
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.index import FileEntry
from deepspeed.checkpoint.loadable import make_loadable
from deepspeed.checkpoint.location import is_remote, location
from deepspeed.checkpoint.prune import prune
from deepspeed.checkpoint.reports import COMMITTER
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tensor_index import file_entry
from deepspeed.checkpoint.tensors import compact
from deepspeed.errors import ConfigError


def merge_client_state(model_state: Mapping[str, Any], client_state: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a model file: the checkpoint's own keys and, beside them, the user's. Called before a save.

    `ConfigError` when a user's key is one of the checkpoint's own, or holds what could not be loaded again.
    """
    foreign = set(model_state) - layout.MODEL_STATE_KEYS
    assert not foreign, f"keys that a load would take for client state: {sorted(foreign)}"
    if not isinstance(client_state, Mapping):
        raise ConfigError(
            f"client_state: found a {type(client_state).__name__}; give a dict, which load_checkpoint returns"
        )
    taken = sorted(set(client_state) & layout.MODEL_STATE_KEYS)
    if taken:
        raise ConfigError(
            f"client_state: the keys {', '.join(map(repr, taken))} belong to the checkpoint itself. Use other names, "
            "for example with your project's name in front."
        )
    return {
        **make_loadable(dict(model_state), "the model state"),
        **make_loadable(dict(client_state), "client_state"),
    }


def describe_save(
    tag: str, model_state: Mapping[str, Any] | None, shard_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the index says of a save, as far as the rank knows it that has these states; see `Index.saved`."""
    shard = (shard_state or {}).get("optimizer_state_dict", {})
    return {
        "tag": tag,
        "at": datetime.now(timezone.utc).isoformat(),
        "ds_core": CORE_VERSION,
        "global_steps": (model_state or {}).get("global_steps"),
        "zero_stage": shard.get("zero_stage", 0),
    }


def save_state_dict_file(state: Mapping[str, Any], path: str | Path) -> None:
    """Write one plain file such as `pytorch_model.bin` with `torch.save`, atomically. For `save_16bit_model`.

    The folder is made when it is missing. `CheckpointError` when the disk refuses; a former file is then untouched.
    """
    target = location(path)
    content = compact(make_loadable(state, "the state dict"))
    try:
        if not is_remote(target):
            make_folder(target.parent)
        write_file(target, lambda file: torch.save(content, file))
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error("write", target, error) from error


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
