"""`TorchStore`: each file by `torch.save`, in folders that `FolderStore` makes and replaces."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import ChecksumWriter
from deepspeed.checkpoint.consolidate_files import DEEPSPEED_CLASSES
from deepspeed.checkpoint.durable import write_file
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.index import DamagedCheckpoint, check_regular
from deepspeed.checkpoint.tensors import compact
from deepspeed.errors import CheckpointError, counted, first_line


class TorchStore(FolderStore):
    """Files in a directory that all ranks share. Synchronous: `save` returns when the bytes are on disk."""

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
        """Nothing is pending: `save` wrote and fsynced."""

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
    """`torch.save` to a file, or what has its `write` and `flush`, with no more of a storage than its tensors need."""
    compacted = compact(state)
    with _without_zip_checksums():
        torch.save(compacted, file)


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Inside, `torch.save` in this thread computes no CRC32, which costs a quarter of the time of a fast disk.

    `torch.load` never looks at these checksums; `unzip -t` does, and calls such files damaged. Those in `index.json`
    cover the whole file.
    """
    former = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(former)


def _refusal(path: Path) -> str:
    """The message for a file whose pickle asks for more than data. Reads the pickle's opcodes, runs none of them."""
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
