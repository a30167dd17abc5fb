"""`TorchStore`: each file by `torch.save`, each version of a folder whole or not there.

[Note: how a folder is replaced] The new version is written into a staging folder beside the old one, every file of it
fsynced, and takes its place by renames. Where a former version of the same tag exists, two renames are needed:

    global_step5  -> .global_step5.former       the former version, whole
    .global_step5.staging -> global_step5       the new version, whole
    delete .global_step5.former

A process killed before the first rename leaves the former version in its place; between the two it leaves it under its
second name, where loading finds it (`layout.whole_folder`); after the second the new version is in place. The next
`create` in the same directory puts everything in order. So at every moment one whole version can be loaded.
"""

import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, sync_folder, write_file
from deepspeed.checkpoint.tensors import compact
from deepspeed.errors import CheckpointError, first_line


class TorchStore:
    """Files in a directory that all ranks share. Synchronous: `save` returns when the bytes are on disk."""

    def create(self, folder: Path) -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _tidy(folder.parent)
            layout.staging_folder(folder).mkdir()
        except OSError as error:
            raise disk_error("prepare", folder, error) from error

    def save(self, state: Any, folder: Path, name: str) -> None:
        compacted = compact(state)
        with _without_checksums:
            write_file(layout.staging_folder(folder) / name, lambda file: torch.save(compacted, file))

    def wait(self) -> None:
        """Nothing is pending: `save` wrote and fsynced."""

    def commit(self, folder: Path) -> None:
        """Move the staged version to `folder`; see [Note: how a folder is replaced]."""
        staging, former = layout.staging_folder(folder), layout.former_folder(folder)
        try:
            sync_folder(staging)
            if folder.exists():
                os.rename(folder, former)
            os.rename(staging, folder)
            sync_folder(folder.parent)
            if former.exists():
                _retire(former, folder)
        except OSError as error:
            raise disk_error("replace", folder, error) from error

    def load(self, path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
        try:
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing. {_found_beside(path)}") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(path)) from error
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {first_line(error)} ({_size_bytes(path)} bytes). The file is cut short, "
                "damaged or was not written by torch.save. Load another tag, or copy the file again from where it came."
            ) from error


class _WithoutChecksums:
    """Inside, `torch.save` computes no CRC32, which costs up to half of the speed of a fast disk.

    `torch.load` never looks at these checksums; `unzip -t` does, and calls such files damaged. The option is one for
    the whole process, so the first to enter notes its value and the last to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._former = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._former = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(False)
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.serialization.set_crc32_options(self._former)


_without_checksums = _WithoutChecksums()


def _tidy(save_dir: Path) -> None:
    """Put in order what a killed save left in `save_dir`: finish or undo its renames, delete its staging folders."""
    staging, former = layout.leftovers_in(save_dir)
    for folder, place in former:
        if place.exists():
            _retire(folder, place)
        else:
            os.rename(folder, place)
    for folder in staging:
        shutil.rmtree(folder)


def _retire(former: Path, place: Path) -> None:
    """Delete a replaced version. What somebody else had put into it moves to the new version."""
    for path in former.iterdir():
        if not layout.is_checkpoint_file(path.name) and not (place / path.name).exists():
            os.rename(path, place / path.name)
    shutil.rmtree(former)


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
