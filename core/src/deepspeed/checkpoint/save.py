"""A save: its contents, and its steps, which all ranks take together.

`save_here` takes all steps; `save_in_background` takes the steps up to the copy, and writer processes do the rest.

Only values that `torch.load(weights_only=True)` gives back can be saved (`make_loadable`). Checkpoints are loaded
without running code from them, so an object that only a full pickle can carry could be saved but never loaded again.
It is refused at the first save, not at the resume a week later.

Allowed: tensors, numbers, strings, bytes, None, torch dtypes, devices and sizes; in dicts, OrderedDicts, Counters,
lists, tuples and sets; and types that the user admitted through `torch.serialization.add_safe_globals`. Converted to an
equal plain value: numpy scalars, defaultdicts, and tensors that carry Python attributes. Refused: everything else.
"""

import collections
import io
import json
import operator
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepspeed._version import CORE_VERSION
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.consolidate_files import DEEPSPEED_CLASSES
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.index import FileEntry
from deepspeed.checkpoint.layout import is_remote, location
from deepspeed.checkpoint.store import FolderStore, IndexedStore, Store, prune, put_in_place
from deepspeed.checkpoint.stores import compact
from deepspeed.checkpoint.tensor_index import file_entry
from deepspeed.checkpoint.writer import COMMITTER
from deepspeed.errors import ConfigError
from deepspeed.zero.redistribute import PendingTensor

if TYPE_CHECKING:
    from deepspeed.checkpoint.checkpointer import Ranks

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter, collections.defaultdict})
_SHOWN = 5  # offending places in one message


def make_loadable(state: Any, name: str) -> Any:
    """Return `state` with only values that load again; the same object if nothing had to change.

    Called before a file is written. `name` is the name of the whole in messages ("client_state"). Raises `ConfigError`,
    which names each place that cannot be saved, its type, and what to store in its place.
    """
    walk = _Walk()
    result = walk.visit(state, name)
    if walk.refused:
        more = f" and {len(walk.refused) - _SHOWN} more" if len(walk.refused) > _SHOWN else ""
        raise ConfigError(
            f"{'; '.join(walk.refused[:_SHOWN])}{more}: such objects cannot be loaded again, because checkpoints are "
            "loaded with weights_only=True. Store plain values in their place (for example vars(args), value.item(), "
            "torch.from_numpy(array), str(path)), or admit the type with torch.serialization.add_safe_globals, also "
            "where you load."
        )
    return result


class _Walk:
    """`_Walk` is one pass over a state; it collects what must be refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._done: dict[int, Any] = {}  # id of a container -> its result: shared containers stay shared, cycles end

    def visit(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in _ATOMS or kind is PendingTensor:
            return value
        if kind in (Tensor, torch.nn.Parameter):
            bare = kind is Tensor and not value.requires_grad and not value.__dict__
            return value if bare else value.detach()  # attributes of a tensor may be anything, also hooks
        if isinstance(value, np.generic):
            return self.visit(value.item(), place)
        if kind in _MAPPINGS or kind in (list, tuple, set):
            if id(value) not in self._done:
                self._done[id(value)] = value
                self._done[id(value)] = self._container(value, place)
            return self._done[id(value)]
        if not _loads_again(value):
            self.refused.append(f"{place} is a {kind.__module__}.{kind.__qualname__}")
        return value

    def _container(self, value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, place)
        if isinstance(value, set):
            plain = {self.visit(item, f"an item of {place}") for item in value}
            return plain if any(isinstance(item, np.generic) for item in value) else value
        items = [self.visit(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else type(value)(items)

    def _mapping(self, value: dict[Any, Any], place: str) -> Any:
        attributes = getattr(value, "__dict__", {})  # a module's `state_dict()` has `_metadata` there
        if attributes:
            self.visit(attributes, f"{place}.__dict__")
        keys = [self.visit(key, f"the key {key!r} of {place}") for key in value]
        items = [self.visit(item, f"{place}[{key!r}]") for key, item in value.items()]
        plain = type(value) is not collections.defaultdict
        if plain and all(map(operator.is_, keys, value)) and all(map(operator.is_, items, value.values())):
            return value
        changed: dict[Any, Any] = type(value)() if plain else {}
        changed.update(dict(zip(keys, items, strict=True)))
        if attributes:
            changed.__dict__.update(attributes)
        return changed


def _loads_again(value: Any) -> bool:
    """Whether one object of an unusual type survives a save and a `weights_only` load here and now."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
            torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError):
        return False
    return True


def merge_client_state(model_state: Mapping[str, Any], client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a model file: the checkpoint's own keys and the user's. Called before a save.

    Raises `ConfigError` if a user's key is one of the checkpoint's own, or has a value that could not be loaded again.
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
    """Return the facts of a save for the index, as far as a rank with these states knows them; see `Index.saved`."""
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

    A missing folder is created. Raises `CheckpointError` if the disk refuses; a former file is then untouched.
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


def save_here(save: Save, ranks: "Ranks", store: Store) -> None:
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


def _write(save: Save, ranks: "Ranks", store: Store) -> None:
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
    """Return the index entry of a file that this rank wrote."""
    path = layout.staging_folder(folder) / name
    checksums = store.checksums(folder, name) if isinstance(store, IndexedStore) else None
    if not (isinstance(store, FolderStore) and path.is_file()):  # a remote file would have to be read back
        return FileEntry(name, num_bytes, checksums)
    with path.open("rb") as file:
        return file_entry(name, num_bytes, checksums, file)


def save_in_background(save: Save, ranks: "Ranks", background: BackgroundWriter) -> None:
    """Return when every rank has copied its states; the writer processes agree about the rest (`writer.py`)."""
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
