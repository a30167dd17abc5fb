"""`Report`: how the writer processes of an asynchronous save learn from each other that their files are written.
`Ending`: how they, and a rank whose writer was killed, learn what came of the save.

Training may be in a collective of its own meanwhile, or may have ended, so they agree through files. Each writer has
one in the folder `.<tag>.writers`, locked with `flock` while the process lives, and writes its result into it, after a
line that names its machine. A free lock shows that a process of this machine has ended; of another machine's locks some
file systems know nothing, so a process there has ended when nothing was heard of it for long. Imports no torch.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.claim import machine
from deepspeed.checkpoint.durable import sync_folder
from deepspeed.checkpoint.index import read_index
from deepspeed.checkpoint.tags import read_latest
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


@dataclass(frozen=True)
class Ending:
    """What came of one asynchronous save, for who does not commit it, and for a rank whose writer was killed.

    The result of the committing writer says it. Where that writer has died without one, or has removed it, the
    checkpoint in its place does: its index has the moment of the save.

    A result is `{}` where the save is complete, or has an `"error"`; `"is_known": False` is in it too where the save
    may be complete all the same.
    """

    folder: str
    """Of the tag."""
    name: str
    """Of this rank's report."""
    began: str
    """`Index.saved["at"]` of this save, which no other save of the tag has: one begins after the other has ended."""
    save_latest: bool
    limit_s: float
    """As for `Report`."""

    def as_message(self) -> dict[str, Any]:
        """The arguments of `Ending`, as JSON has them."""
        return asdict(self)

    def wait_for_committer(self) -> dict[str, Any]:
        """The result; a living writer calls it when its files are written and its report says so."""
        return self._wait(self._look_at_committer)

    def wait_without_writer(self) -> dict[str, Any]:
        """The result; a rank calls it whose writer process has ended without an answer."""
        return self._wait(self.look_without_writer)

    def look_without_writer(self) -> dict[str, Any] | None:
        """As `wait_without_writer`, but None while it is not known."""
        own = _result(self._report(self.name))
        if own is not None and "error" in own:
            return own
        if self.name == COMMITTER:
            return self._found("the checkpoint was not in its place yet", was_committed=own is not None)
        if own is None and self._report(self.name).exists():
            return {"error": "its files were not written yet"}
        return self._look_at_committer()

    def _look_at_committer(self) -> dict[str, Any] | None:
        path = self._report(COMMITTER)
        is_dead = _is_dead(path)  # before its content is read: it may have just written it
        result = _result(path)
        if result is not None and "error" in result:
            return {"error": f"the committing rank: {result['error']}"}
        if result is None and not is_dead and path.exists():
            return None
        if is_dead and result is None:
            return self._found("the committing rank: its writer process ended before its files were written")
        return self._found("the committing rank has given the save up", was_committed=result is not None)

    def _wait(self, look: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        path = self._report(COMMITTER)
        for _ in _looks(self.limit_s, lambda: _touched_ns(path)):
            if (result := look()) is not None:
                return result
        unheard = f"the committing rank: nothing was heard of its writer process for {self.limit_s:g} s"
        return self._found(unheard, may_come=True)

    def _found(self, otherwise: str, *, was_committed: bool = False, may_come: bool = False) -> dict[str, Any]:
        """The result as far as the checkpoint in its place shows it.

        Args:
            otherwise: why the save has failed, where the checkpoint is not there.
            was_committed: the committing writer has said so.
            may_come: it may commit later.
        """
        folder = Path(self.folder)
        try:
            index = read_index(folder, with_tensors=False)
            is_there = index is not None and index.saved.get("at") == self.began
            if not (is_there or was_committed or may_come):
                return {"error": otherwise}
            latest = read_latest(folder.parent)
            if is_there and (was_committed or not self.save_latest or latest == folder.name):
                sync_folder(folder.parent)  # the committing writer may have died before it did
                return {}
        except (CheckpointError, OSError) as error:
            return {"error": f"{otherwise}; whether it was committed is not known: {error}", "is_known": False}
        names = f"`latest` names {latest}" if latest else "there is no `latest`"
        if is_there:
            whole = f"{otherwise}. {folder} is whole, but {names}: load it by its tag, or save again"
            return {"error": whole, "is_known": not may_come}
        if was_committed:
            unclear = f"it was committed, but {folder} is of another save now, or gone; {names}"
            return {"error": unclear, "is_known": False}
        return {"error": f"{otherwise}; whether it was committed is not known; {names}", "is_known": False}

    def _report(self, name: str) -> Path:
        return layout.writers_folder(Path(self.folder)) / f"{name}.json"


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
