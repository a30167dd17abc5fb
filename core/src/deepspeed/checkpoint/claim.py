"""`Claim`: this process is saving one tag now. Jobs that share a directory leave each other's saves alone by it.

A claim is a file `.<tag>.lock` beside the tag's folder, locked with `flock` and naming its holder. The system drops the
lock when the holder dies, however it dies. What is not known to be dead counts as alive for a day: a lock of another
machine, or of a file system without locks.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.checkpoint import layout
from deepspeed.errors import CheckpointError

_IDLE_S = 24 * 3600.0  # a save that has not touched a file for so long has ended
_TIDIES = ", removing what an earlier save left"  # in the lock file of a job that does so
_BRIEF_S = 0.02  # between two looks at a lock file
_MAX_LOOKS = 250  # at one that is held for a moment


class Claim:
    """Held from `TorchStore.create` to the end of the save; `take` and `abandoned` make them."""

    def __init__(self, path: Path, descriptor: int, has_lock: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._has_lock = has_lock
        self._text = b""

    @classmethod
    def take(cls, folder: Path) -> "Claim":
        """Claim `folder`.

        Raises:
            CheckpointError: a living process is saving this folder; the message names it.
            OSError: the lock file cannot be made.
        """
        path = layout.lock_file(folder)
        num_looks = 0
        while (claim := _open(path)) is None:
            num_looks += 1
            if num_looks < _MAX_LOOKS and _is_brief(path):
                continue
            raise CheckpointError(
                f"cannot save {folder}: {_holder(path)} is saving it now. Let each job save into a directory of its "
                "own, or under tags of its own."
            )
        try:
            claim._sign()
        except OSError:
            claim.release()
            raise
        return claim

    def check(self) -> None:
        """Raise CheckpointError if another job has claimed the folder since; possible where `flock` does not work."""
        if self._read() != self._text:
            raise CheckpointError(
                f"{_holder(self.path)} began to save the same tag (see {self.path}), so this save is given up. Let "
                "each job save into a directory of its own, or under tags of its own."
            )

    def release(self, removes_file: bool = True) -> None:
        """End the claim and remove its file."""
        if removes_file and _is_open_file(self._descriptor, self.path):
            self.path.unlink(missing_ok=True)
        if self._has_lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough when a fork has the descriptor too
        os.close(self._descriptor)

    def is_of_this_machine(self) -> bool:
        """Whether the last holder ran here, so that a free lock proves that its save has ended."""
        return self._has_lock and os.pread(self._descriptor, 200, 0).split(b"\n")[0] == machine().encode()

    def _sign(self, purpose: str = "") -> None:
        holder = f"process {os.getpid()} on {os.uname().nodename}{purpose}"
        self._text = f"{machine()}\n{holder}\n{secrets.token_hex(8)}\n".encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._text, 0)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""


@contextmanager
def abandoned(folder: Path) -> Iterator[bool]:
    """Whether the save that left something of `folder` behind has ended; if so, it stays claimed inside the context."""
    idle_s = _idle_s(folder)
    claim = _open(layout.lock_file(folder))
    if claim is None:
        yield False
        return
    is_over = claim.is_of_this_machine() or idle_s > _IDLE_S
    try:
        if is_over:
            claim._sign(_TIDIES)
        yield is_over
    finally:
        claim.release(removes_file=is_over)


def _open(path: Path) -> Claim | None:
    """The lock file at `path`, made if need be, and locked; None when a living process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            return Claim(path, descriptor, has_lock=False)
        if _is_open_file(descriptor, path):
            return Claim(path, descriptor, has_lock=True)
        os.close(descriptor)  # its former holder has just removed the file


def _is_brief(path: Path) -> bool:
    """Whether `path` is locked by a job that only removes what an earlier save left, if anything. Waits a little: such
    a job has not written yet who it is, or is about to be done."""
    before = _text(path)
    time.sleep(_BRIEF_S)
    return _text(path) != before or not before or f"{_TIDIES}\n" in before


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _is_open_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return path.read_text(errors="replace").splitlines()[1]
    return "another process"


def machine() -> str:
    """One running system: containers on it share its locks, its next boot does not."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def _idle_s(folder: Path) -> float:
    """Seconds since anything of an unfinished save was touched; what another job is just renaming does not count."""
    staging = layout.staging_folder(folder)
    paths = [staging, layout.former_folder(folder), layout.lock_file(folder), layout.draft_file(folder)]
    paths += [layout.pruned_folder(folder), layout.writers_folder(folder)]
    with contextlib.suppress(FileNotFoundError):
        paths += staging.iterdir() if staging.is_dir() else ()
    touched = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            touched.append(path.lstat().st_mtime)
    return time.time() - max(touched)
