"""`Report`: how the writer processes of an asynchronous save learn from each other that their files are written.

Training may be in a collective of its own meanwhile, or may have ended, so they agree through files. Each writer has
one in the folder `.<tag>.writers`, locked with `flock` while the process lives, and writes its result into it, after a
line that names its machine. A free lock shows that a process of this machine has ended; of another machine's locks some
file systems know nothing, so a process there has ended when nothing was heard of it for long. Imports no torch.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.claim import machine
from deepspeed.errors import CheckpointError

COMMITTER = "committer"  # the name of the report of the rank that commits
_LONGEST_PAUSE_S = 0.05  # between two looks at a report


def create_folder(folder: Path) -> None:
    """Make the folder of the reports of a save of `folder`, which this process has claimed and tidied."""
    place = layout.writers_folder(folder)
    try:
        place.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"cannot save {folder}: writer processes of an earlier save are still in {place}. End them (fuser names "
            "them), or save under another tag."
        ) from None


def remove_folder(place: Path) -> None:
    """Delete a folder of reports, unless a living process has one in it."""
    with suppress(FileNotFoundError):
        reports = list(place.iterdir())
        if not any(map(_is_held, reports)):
            for path in reports:
                path.unlink(missing_ok=True)
            place.rmdir()


class Report:
    """This process's report on a save.

    Args:
        folder: of the tag.
        name: of the report: `COMMITTER`, or the number of the rank.
        limit_s: a writer of which nothing is heard for so long is taken for dead: its machine may be.

    Raises:
        CheckpointError: the folder of the reports is not there.
    """

    def __init__(self, folder: Path, name: str, limit_s: float) -> None:
        self._folder = layout.writers_folder(folder)
        self._path = self._folder / f"{name}.json"
        self._limit_s = limit_s
        self._has_failed = False
        self._lost: set[Path] = set()  # reports of writers that have ended without a result
        self._head = machine().encode() + b"\n"
        try:
            self._descriptor = self._create()
        except FileNotFoundError:
            raise CheckpointError(
                f"cannot save {folder}: this rank does not see {self._folder}, which the committing rank has made. "
                "Save into a folder that every rank sees."
            ) from None

    def _create(self) -> int:
        """The report gets its name when it is locked and names its machine, so that none is seen without."""
        draft = self._path.with_name(f".{self._path.stem}.{os.getpid()}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # a file system without locks: then only the limit tells
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, self._head, 0)
        os.rename(draft, self._path)
        return descriptor

    def write(self, result: Mapping[str, Any]) -> None:
        """Let the other writers know the result of this one. The first one stays."""
        if os.fstat(self._descriptor).st_size == len(self._head):
            self._has_failed = "error" in result
            os.pwrite(self._descriptor, json.dumps(result).encode(), len(self._head))
            os.fsync(self._descriptor)  # other clients of NFS see it then

    @contextmanager
    def kept_fresh(self) -> Iterator[None]:
        """Inside, the report's time shows that this process lives, also where locks are not shared."""
        ends = Event()

        def touch() -> None:
            while not ends.wait(self._limit_s / 10):
                with suppress(OSError):
                    os.utime(self._descriptor)

        thread = Thread(target=touch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def wait_for(self, name: str) -> dict[str, Any]:
        """The result of the writer `name`. It is an `{"error": ...}` too where that process has ended without one."""
        path = self._folder / f"{name}.json"
        for _ in _looks(self._limit_s, lambda: _touched_ns(path)):
            is_dead = _is_dead(path)  # before its content is read: it may have just written it
            if (result := _result(path)) is not None:
                return result
            if is_dead:
                self._lost.add(path)
                return {"error": "its writer process ended before its files were written"}
        self._lost.add(path)
        return {"error": f"nothing was heard of its writer process for {self._limit_s:g} s"}

    def leave(self) -> None:
        """Remove the report. The committer waits until the others have removed theirs: they have read it by then. A
        report of a failure stays for the committer, which may look later, and removes the folder."""
        is_committer = self._path.stem == COMMITTER
        for _ in _looks(self._limit_s) if is_committer else ():
            if all(map(_is_over, set(self._folder.glob("*.json")) - {self._path} - self._lost)):
                break
        os.close(self._descriptor)
        if is_committer or (self._has_failed and not _is_held(self._folder / f"{COMMITTER}.json")):
            remove_folder(self._folder)
        elif not self._has_failed:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # others are in it
                self._folder.rmdir()


def _looks(limit_s: float, sign: Any = lambda: None) -> Iterator[None]:
    """Yields, with growing pauses, until `sign()` has not changed for `limit_s`."""
    last, since_s, pause_s = sign(), time.monotonic(), 0.001
    while time.monotonic() - since_s < limit_s:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if (now := sign()) != last:
            last, since_s = now, time.monotonic()


def _is_held(path: Path) -> bool:
    """Whether a living process has the report; True where that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_dead(path: Path) -> bool:
    """Whether the report is of a process of this machine that has ended."""
    with suppress(FileNotFoundError):
        return path.read_bytes().partition(b"\n")[0] == machine().encode() and not _is_held(path)
    return False


def _is_over(path: Path) -> bool:
    """Whether the process of a report reads no other ones any more."""
    result = _result(path)
    has_failed = result is not None and "error" in result
    return (has_failed and not _is_held(path)) or _is_dead(path)


def _result(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes().partition(b"\n")[2]))
    except (FileNotFoundError, ValueError):  # not there yet, or not all of it
        return None


def _touched_ns(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0
