"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the folder."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.location import is_remote, reason_of
from deepspeed.checkpoint.sequential_file import SequentialFile
from deepspeed.errors import CheckpointError
from deepspeed.log import logger


def write_file(path: Path, write: Callable[[Any], Any], temporary: Path | None = None) -> int:
    """Write `path` through `write(file)` so that a crash leaves either its former content or the whole new one.

    Args:
        write: gets what `torch.save` needs of a file: `write` and `flush`.
        temporary: where it is written first, on the same file system, and by no other process at the same time;
            default: `.<name>.tmp` beside it. The name does not vary, so that a later save overwrites what a killed
            process left.

    Returns the number of bytes.

    The *name* is durable only after `sync_folder(path.parent)`, which the caller runs once for all files of a folder.
    `CheckpointError` when the disk refuses; nothing is then left behind.
    """
    if is_remote(path):
        return _write_object(path, write)
    temporary = path.with_name(f".{path.name}.tmp") if temporary is None else temporary
    try:
        with SequentialFile(temporary) as file:
            write(file)
            size = file.sync()
        os.replace(temporary, path)
        return size
    except (OSError, RuntimeError) as error:  # torch.save turns the file's OSError into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error("write", path, error) from error


def _write_object(path: Path, write: Callable[[Any], Any]) -> int:
    """In an object store: the object takes its place when it is complete. Closing the file does that, so what an error
    or an interrupt cuts short is discarded instead."""
    try:
        file = path.open("wb")
        try:
            write(file)
        except BaseException:
            _discard(file)
            raise
        file.close()
        return path.stat().st_size
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write {path}: {reason_of(error)}. Former checkpoints are untouched. Check the bucket and its "
            "permissions."
        ) from error


def _discard(file: Any) -> None:
    """Give up the upload of a file of fsspec, which else is completed when the file is collected."""
    try:
        file.discard()
    except Exception as error:  # noqa: BLE001 - any of the protocol's package; the one that led here is raised
        logger.warning("the parts of %s that were uploaded were not removed: %s", file.path, error)
    file.closed = True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (creations, renames, deletions) durable."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, where they are missing, and make their names durable. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room in that folder"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Give a folder, or a name that is not taken"),
    errno.ENOENT: "Give all ranks one tag, and a folder that every rank sees",
}


def disk_error(action: str, path: Path, error: BaseException) -> CheckpointError:
    """The error to raise when the disk refused to `action` ("write", "replace") `path`."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = reason_of(cause) if isinstance(cause, OSError) else str(error)
    code = cause.errno if isinstance(cause, OSError) else None
    advice = _ADVICE.get(code or 0, "Correct the permissions of that folder, which every rank must see")
    return CheckpointError(
        f"cannot {action} {path}: {reason}{_free_space(path)}. The former checkpoint is untouched. {advice}, then save "
        "again."
    )


def _free_space(path: Path) -> str:
    """How much room is left where `path` should lie, as a clause for an error message."""
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there)"
    return ""
