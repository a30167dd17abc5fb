"""`SwapFolder`: a folder of one run on a local disk for what does not fit in memory, and its removal.

Made by the placements on NVMe, one per engine and rank, below `nvme_path`:

    <nvme_path>/ds_swap_<host>_<job>_rank<rank>_pid<pid>_<random>/      mode 0700
        owner.lock      locked as long as the process lives
        ...             swap files (`swap_file.py`)

Nothing in it outlives the run: it is removed when the engine is destroyed and at a normal exit. What a killed process
left is removed by the next one that makes a folder at the same place on the same host: a lock that can be taken has no
owner. A forked child, such as a worker of a DataLoader, does not keep the lock of a process that was killed. A resumed
run needs no old swap file; a checkpoint has everything.
"""

import fcntl
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed.errors import ConfigError, counted
from deepspeed.log import logger

PREFIX = "ds_swap_"
_LOCK = "owner.lock"
#: of folders that have no locked lock yet; `nvme_path` itself is locked meanwhile
_UNFINISHED = ".ds_new_swap_"
#: descriptors of the locks of this process
_locks: set[int] = set()


class SwapFolder:
    """A new folder below `nvme_path`; leftovers of dead processes of this host are removed first.

    Args:
        nvme_path: a folder that this user may write. Where it is missing it is made, with those above it, for this
            user alone; it outlives the run.
        rank: of this process, for the name.
        key: of the configuration, by which it was asked for.

    Attributes:
        path: of the folder.

    Raises:
        ConfigError: the folder cannot be made; names the key and why.
    """

    def __init__(self, nvme_path: str | os.PathLike[str], *, rank: int, key: str) -> None:
        parent = Path(nvme_path).absolute()
        if os.path.exists(parent) and not os.path.isdir(parent):
            raise ConfigError(f"{key}: {parent} is not a folder; name a folder on a local disk")
        try:
            _make_private(parent)
            sweep(parent)
            self.path, self._lock = _make(parent, rank)
        except (OSError, ValueError) as error:  # a ValueError: of a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{key}: no folder can be made in {parent}: {reason}; check its permissions and mount, or "
                "name another folder"
            ) from error
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and everything in it. Also called when the object is garbage, and at exit. Idempotent."""
        self._remove()


def _make_private(folder: Path) -> None:
    """Make the folder, and those above it, where they are missing; other ranks may make them at the same time."""
    for each in reversed([folder, *folder.parents]):
        if not each.is_dir():
            with suppress(FileExistsError):  # of a file, the next one is refused
                each.mkdir(mode=0o700)


def sweep(parent: Path) -> list[Path]:
    """Remove the folders below `parent` whose process is dead, of this host only; return them."""
    swept = []
    for folder in sorted(parent.glob(f"{PREFIX}{_host()}_*")):
        if (lock := _take_lock(folder)) is not None:
            if _delete(folder):
                swept.append(folder)
            os.close(lock)
    if swept:
        dead = counted(len(swept), "dead process", "dead processes")
        logger.info("nvme_path: removed what %s left in %s", dead, parent)
    return swept


def _make(parent: Path, rank: int) -> tuple[Path, int]:
    """A folder with a locked lock. It gets its name when it has that, so that no sweep finds it without."""
    prefix = f"{_UNFINISHED}{_host()}_"
    with _locked(parent) as is_alone:
        for left in parent.glob(f"{prefix}*") if is_alone else ():  # by a process that was killed in here
            _delete(left)
        unfinished = tempfile.mkdtemp(prefix=prefix, dir=parent)  # mode 0700
        lock = os.open(f"{unfinished}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locks.add(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        random = unfinished.rpartition(prefix)[2]
        path = parent / f"{PREFIX}{_host()}_{_job()}_rank{rank}_pid{os.getpid()}_{random}"
        os.rename(unfinished, path)
    return path, lock


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """One process of this host at a time is inside. False where the file system has no locks of folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    is_locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_locked = True
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough when a fork has the descriptor too
        os.close(descriptor)


def _take_lock(folder: Path) -> int | None:
    """The descriptor of the folder's lock, locked; None: its owner lives, or another process removes it."""
    lock = None
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    if lock is not None:
        os.close(lock)
    return None


def _remove(path: Path, lock: int, pid: int) -> None:
    """Delete the folder and close its lock; not in a child of the process, which has the finalizer but no right to."""
    if os.getpid() == pid:
        _delete(path)
        _locks.discard(lock)
        os.close(lock)


def _close_locks() -> None:
    """Close the locks in a forked child: a lock is held until all processes have closed it."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks)


def _delete(folder: Path) -> bool:
    """Delete the folder and return whether it is gone; else a warning says what is left."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return True
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
    logger.warning("cannot remove the swap folder %s, of %.1f MiB; remove it by hand", folder, num_bytes / 2**20)
    return False


def _host() -> str:
    return _plain(socket.gethostname())


def _job() -> str:
    """Return what the launcher or the scheduler calls the run, as part of a file name; else "run"."""
    return _plain(os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or "run")


def _plain(text: str) -> str:
    """`text` as part of a file name; without the underscore that ends it."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", text)[:40] or "unknown"
