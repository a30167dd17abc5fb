"""`TorchStore`: writes each file by `torch.save`, in folders that `FolderStore` creates and replaces.
`map_tensors` and `compact`: change the tensors inside nested containers, and drop storage that need not be saved.
`ObjectStore`: checkpoints in an object store such as S3, through fsspec. `create_store`: an engine's store, by name.
"""

import copy
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import DEEPSPEED_CLASSES
from deepspeed.checkpoint.durable import ChecksumWriter, write_file
from deepspeed.checkpoint.index import (
    DamagedCheckpoint,
    FileEntry,
    Index,
    check_checksums,
    check_regular,
    check_size,
    read_index,
)
from deepspeed.checkpoint.layout import is_remote, reason_of
from deepspeed.checkpoint.store import FolderStore, Store
from deepspeed.errors import CheckpointError, ConfigError, counted, first_line
from deepspeed.log import warn_once
from deepspeed.ops.op_builder.cache import owner_has_ended, owner_mark
from deepspeed.plugins import plugin_manager
from deepspeed.zero.redistribute import PendingTensor


class TorchStore(FolderStore):
    """Files in a directory that all ranks share. It is synchronous: `save` returns when the bytes are on disk."""

    # here, so that subclasses need no super().__init__()
    _checksums: Mapping[Path, list[str]] = MappingProxyType({})  # of the files that this process saved

    def save(self, state: Any, folder: Path, name: str) -> int:
        path = layout.staging_folder(folder) / name

        def write(file: BinaryIO) -> None:
            writer = ChecksumWriter(file)
            write_state(state, writer)
            self._checksums = {**self._checksums, path: writer.checksums()}

        return write_file(path, write)

    def wait(self) -> None:
        """Do nothing: `save` has written and fsynced."""

    def checksums(self, folder: Path, name: str) -> list[str] | None:
        path = layout.staging_folder(folder) / name
        found = self._checksums.get(path)
        self._checksums = {other: sums for other, sums in self._checksums.items() if other != path}
        return found

    def commit(self, folder: Path, sizes: Mapping[str, int | None]) -> None:
        super().commit(folder, sizes)
        super().discard(folder)

    def load(self, path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
        check_regular(path)
        try:
            with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
                return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} is missing. {_found_beside(path)}") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(path)) from error
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedCheckpoint(
                f"{path} cannot be read: {first_line(error)} ({counted(_size_bytes(path), 'byte')}). The file is cut "
                "short, damaged or was not written by torch.save. Load another tag, or copy the file again from where "
                "it came."
            ) from error


def write_state(state: Any, file: Any) -> None:
    """Run `torch.save` to `file` (`write` and `flush`), with no more of a storage than the tensors need."""
    compacted = compact(state)
    with _without_zip_checksums():
        torch.save(compacted, file)


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Inside the context, `torch.save` in this thread computes no CRC32, which costs a quarter of a fast disk's time.

    `torch.load` never checks these checksums; `unzip -t` does, and calls such files damaged. The checksums in
    `index.json` cover the whole file.
    """
    former = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(former)


def _refusal(path: Path) -> str:
    """Return the message for a file whose pickle asks for more than data. The pickle's opcodes are read, not run."""
    wants = ""
    try:
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            wants = f" It asks for {', '.join(names)}."
    except (ValueError, RuntimeError, pickle.PickleError):  # not torch's zip format
        wants = " It is not in torch's zip format."
    return (
        f"{path} was refused, because loading it could run code: it holds more than tensors and plain values.{wants} "
        "Nothing of it was run. If you made the file and trust it, admit these types with "
        "torch.serialization.add_safe_globals before loading; otherwise get a checkpoint that holds only data."
    )


def _found_beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    return f"Its folder holds: {', '.join(sorted(p.name for p in path.parent.iterdir())) or 'nothing'}."


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


_READ_BYTES = 8 * 2**20
_PREFIX = "deepspeed-checkpoint."  # of temporary folders


class ObjectStore:
    """An `IndexedStore` over paths of `layout.location`. Files that a rank loads go through its temporary folder.

    An object store has no renames and no locks, but an object is whole or not there. So files are written under their
    own names, and `index.json` comes last: a tag without it was not completed, and the next save under that tag
    replaces it. A complete tag is not replaced, since it would be broken meanwhile.
    """

    def __init__(self) -> None:
        self._entries: dict[Path, FileEntry] = {}  # of the files that this process saved
        self._created: Path | None = None  # the folder that this process has created and not completed
        self._index = b""  # written by `commit`
        self._fetched: dict[Path, Path] = {}  # local copies that are verified
        self._temporary: str | None = None

    def create(self, folder: Path) -> None:
        if (folder / layout.INDEX_FILE).exists():
            raise CheckpointError(
                f"cannot save {folder}: there is a complete checkpoint, and an object store cannot replace it in one "
                "act. Save under another tag, or remove that one first."
            )
        self._delete(folder)
        self._created = folder

    def save(self, state: Any, folder: Path, name: str) -> int:
        sums: list[str] = []

        def write(file: BinaryIO) -> None:
            writer = ChecksumWriter(file)
            write_state(state, writer)
            sums.extend(writer.checksums())

        num_bytes = write_file(folder / name, write)
        self._entries[folder / name] = FileEntry(name, num_bytes, sums)
        return num_bytes

    def wait(self) -> None:
        """Do nothing: an object is durable when it is written."""

    def checksums(self, folder: Path, name: str) -> list[str] | None:
        return list(self._entries.pop(folder / name).checksums or ())

    def write_index(self, folder: Path, content: bytes) -> None:
        self._index = content

    def commit(self, folder: Path, sizes: Mapping[str, int | None]) -> None:
        for name, size in sizes.items():
            check_size(folder / name, FileEntry(name, size, None))
        write_file(folder / layout.INDEX_FILE, lambda file: file.write(self._index))
        self._created = None

    def discard(self, folder: Path) -> None:
        if self._created != folder:
            return  # `create` refused: what is there is another save's
        self._created = None
        try:
            self._delete(folder)
        except CheckpointError as error:  # the failure that led here is the one to raise
            warn_once(str(error), (-1,))

    def remove(self, folder: Path) -> None:
        self._delete(folder)

    def read_index(self, folder: Path) -> Index | None:
        return read_index(folder)

    def verify(self, path: Path, index: Index, *, content: bool) -> None:
        entry = index.entry(path.name)
        if entry is None:
            raise DamagedCheckpoint(f"{path} is not listed in {layout.INDEX_FILE} beside it. Load another tag.")
        check_size(path, entry)
        if content and entry.checksums is not None:
            local, found = self._fetch(path)
            try:
                check_checksums(path, entry, index, found)
            except CheckpointError:
                local.unlink()
                raise
            self._fetched[path] = local

    def load(self, path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
        local = self._fetched.pop(path, None) or self._fetch(path)[0]
        try:
            return TorchStore().load(local, map_location, mmap)
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(local), str(path))) from error
        finally:
            local.unlink()  # what is mapped stays readable

    def _fetch(self, path: Path) -> tuple[Path, list[str]]:
        """Return a copy on the disk, and its checksums."""
        if self._temporary is None:
            self._temporary = _temporary_folder()
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        local = Path(self._temporary, path.name)
        try:
            with path.open("rb") as source, open(local, "wb") as file:
                target = ChecksumWriter(file)
                while data := source.read(_READ_BYTES):
                    target.write(data)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} is missing. Load another tag.") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}, or copy it to {local}: {reason_of(error)}") from error
        return local, target.checksums()

    def _delete(self, folder: Path) -> None:
        """Delete the files of a tag, the index first: without it a tag is not complete."""
        try:
            names = sorted(
                (path.name for path in folder.iterdir() if layout.is_own_file(path.name)),
                key=lambda name: name != layout.INDEX_FILE,
            )
            for name in names:
                (folder / name).unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # there is nothing of it
        except OSError as error:
            raise CheckpointError(
                f"cannot remove {folder}: {reason_of(error)}. Check the permissions of its bucket."
            ) from error


def _temporary_folder() -> str:
    """Create a temporary folder, and remove those of processes that were killed while they loaded."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if owner_has_ended(left.name):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{owner_mark()}.")


BUILT_IN = "torch"

_METHODS = ("create", "save", "wait", "commit", "discard", "load")


def built_in_store(path: Path) -> TorchStore | ObjectStore:
    """Return the built-in store for a path from `layout.location`: `ObjectStore` for a URL, else `TorchStore`."""
    return ObjectStore() if is_remote(path) else TorchStore()


def create_store(name: str, arguments: Mapping[str, Any]) -> Store:
    """Return the store called `name`, for one engine. Plugins are asked first, so one may replace the built-in store.

    Args:
        name: `checkpoint.store.type` of the configuration.
        arguments: `checkpoint.store.params`.

    Raises:
        ConfigError: no plugin knows the name, a plugin's object is no store, or the built-in store got arguments.
    """
    where = "checkpoint.store"
    store = plugin_manager().hook.ds_checkpoint_store(name=name, arguments=dict(arguments))
    if store is None:
        if name != BUILT_IN:
            asked = ", ".join(plugin_manager().providers("ds_checkpoint_store")) or "none has stores"
            raise ConfigError(
                f"{where}.type: found {name!r}, which no plugin knows (asked: {asked}); use {BUILT_IN!r}, or install "
                "the plugin that has it"
            )
        if arguments:
            raise ConfigError(
                f"{where}.params: found {', '.join(arguments)}, and the store {BUILT_IN!r} takes none; take them out"
            )
        return TorchStore()
    missing = [method for method in _METHODS if not callable(getattr(store, method, None))]
    if isinstance(store, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if missing else "an object is expected, not the class"
        raise ConfigError(
            f"{where}.type: a plugin gave {store!r} as the store {name!r}; {lacks} (see deepspeed.checkpoint.store)"
        )
    return store  # type: ignore[no-any-return]


# A storage is saved as it is if at least this part of it is wanted: copying costs as much memory as it saves disk.
_WORTH_SAVING_WHOLE = 0.9


def map_tensors(item: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return `item` with `change(t)` in place of each tensor `t` in dicts, lists and tuples (named ones too), rebuilt.
    A dict or list that occurs in several places, or in itself, does so in the result.

    Args:
        kind: type that is changed in place of tensors.
    """
    made: dict[int, Any] = {}  # by id of a dict or list

    def walk(item: Any) -> Any:
        if isinstance(item, kind):
            return change(item)
        if id(item) in made:
            return made[id(item)]
        if isinstance(item, dict):
            mapped = made[id(item)] = copy.copy(item)  # keeps the type, and a module's `state_dict()._metadata`
            for key, value in item.items():
                mapped[key] = walk(value)
            return mapped
        if isinstance(item, list):
            items = made[id(item)] = type(item)()
            items.extend(walk(value) for value in item)
            return items
        if isinstance(item, tuple) and not isinstance(item, torch.Size):
            values = [walk(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        return item

    return walk(item)


def with_placeholders(state: Any, change: Callable[[PendingTensor], Tensor]) -> Any:
    """Return `state` with `change(t)` in place of each `PendingTensor`; the same object if it has none."""
    found: list[PendingTensor] = []
    map_tensors(state, found.append, PendingTensor)
    return map_tensors(state, change, PendingTensor) if found else state


def compact(state: Any) -> Any:
    """Return `state` with copies of tensors that are small views of large storages. Called before `torch.save`.

    `torch.save` writes the whole storage behind a tensor, so a shard that is a view of a flat buffer would drag in the
    whole buffer. Views that together cover their storage are not copied; views of the same elements (tied weights) stay
    one tensor.
    """
    views: dict[int, set[tuple[Any, ...]]] = {}
    sizes: dict[int, int] = {}
    for tensor in _dense_tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        views.setdefault(storage.data_ptr(), set()).add(_view(tensor))
    wasteful = {
        pointer
        for pointer, size in sizes.items()
        if sum(nbytes for nbytes, *_ in views[pointer]) < _WORTH_SAVING_WHOLE * size
    }
    if not wasteful:
        return state
    copies: dict[tuple[Any, ...], Tensor] = {}

    def separate(tensor: Tensor) -> Tensor:
        if not _is_dense(tensor) or tensor.untyped_storage().data_ptr() not in wasteful:
            return tensor
        key = (tensor.untyped_storage().data_ptr(), *_view(tensor))
        if key not in copies:
            copies[key] = tensor.detach().clone()
        return copies[key]

    return map_tensors(state, separate)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is a plain view of bytes somewhere (not sparse, quantized, meta, nor a subclass's facade)."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


def _dense_tensors(item: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    map_tensors(item, lambda tensor: found.append(tensor) if _is_dense(tensor) else None)
    return iter(found)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of `item` (nested dicts, lists, tuples) whose tensors have storages of their own, on `device`.

    Users and Accelerate call it on a `state_dict` before `torch.save`: a weight that is a view of a flat buffer would
    otherwise bring the whole buffer into the file. Values that are no tensors are passed through.
    """
    target = torch.device(device)

    return map_tensors(item, lambda tensor: tensor.detach().to(target, copy=True))
