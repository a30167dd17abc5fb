"""`ObjectStore`: checkpoints in an object store such as S3, through fsspec.

There is no rename there and no lock, but an object is there as a whole or not at all. So files are written under their
own names, and `index.json` comes last: a tag without it was not completed, and the next save under that tag replaces
it. A complete tag is not replaced, since it would be broken meanwhile.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import ChecksumWriter
from deepspeed.checkpoint.durable import write_file
from deepspeed.checkpoint.index import DamagedCheckpoint, FileEntry, Index, read_index
from deepspeed.checkpoint.location import reason_of
from deepspeed.checkpoint.torch_store import TorchStore, write_state
from deepspeed.checkpoint.verify import check_checksums, check_size
from deepspeed.errors import CheckpointError
from deepspeed.log import warn_once
from deepspeed.ops.op_builder.lock import owner_has_ended, owner_mark

_READ_BYTES = 8 * 2**20
_PREFIX = "deepspeed-checkpoint."  # of temporary folders


class ObjectStore:
    """An `IndexedStore` over paths of `location.location`. What a rank loads goes through its temporary folder."""

    def __init__(self) -> None:
        self._entries: dict[Path, FileEntry] = {}  # of the files that this process saved
        self._created: Path | None = None  # by this process, and not complete
        self._index = b""  # is written by `commit`
        self._fetched: dict[Path, Path] = {}  # verified already
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
        """Nothing is pending: an object is durable when it is written."""

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
        """A copy on the disk, and its checksums."""
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
        """The index first: without it a tag is not complete."""
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
    """A new one, after what processes left that were killed while they loaded."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if owner_has_ended(left.name):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{owner_mark()}.")
