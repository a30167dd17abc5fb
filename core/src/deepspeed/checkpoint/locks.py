"""Locked files through which the processes that save into one directory know of each other. Imports no torch.

`Claim`: this process is saving one tag now. Through claims, jobs that share a directory leave each other's saves alone.
A claim is a file `.<tag>.lock` beside the tag's folder, locked with `flock`, that names its holder. The system drops
the lock when the holder dies, however it dies. A holder whose death cannot be seen (a lock of another machine, or of a
file system without locks) counts as alive for a day.

`Report`: the writer processes of an asynchronous save report to each other when their files are written. `Ending`: they
and a rank whose writer was killed find the outcome of the save. Training may be in a collective of its own meanwhile,
or may have ended, so they agree through files. Each writer has a file in the folder `.<tag>.writers`, locked while its
process lives: one line that names its machine, and then its result. A free lock shows that a process of this machine
has ended. Some file systems do not share locks between machines, so a process of another machine counts as ended when
it has been silent for long.
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import sync_folder
from deepspeed.checkpoint.index import read_index
from deepspeed.checkpoint.tags import read_latest
from deepspeed.errors import CheckpointError

_IDLE_S = 24 * 3600.0  # a save that has touched no file for so long has ended
_TIDIES = ", removing what an earlier save left"  # in the lock file of a job that does so
_BRIEF_S = 0.02  # between two looks at a lock file
_MAX_LOOKS = 250  # at a lock file that is locked for a moment


class Claim:
    """`Claim` is held from `TorchStore.create` to the end of the save; `take` and `abandoned` create claims."""

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
            OSError: the lock file cannot be created.
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
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough if a fork has the descriptor too
        os.close(self._descriptor)

    def is_of_this_machine(self) -> bool:
        """Whether the last holder ran on this machine, so that a free lock proves that its save has ended."""
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
    """Yield whether the save that left files of `folder` behind has ended; if so, it is claimed inside the context."""
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
    """Open and lock the file at `path`, which is created if need be; return None if a living process has it."""
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
    """Whether the job that locks `path`, if any, only removes what an earlier save left. Wait a little: such a job may
    not have written its name yet, or is about to be done."""
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
    """Return the id of one running system: containers on it share its locks; its next boot has another id."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def _idle_s(folder: Path) -> float:
    """Return the seconds since a file of an unfinished save was touched; files that are being renamed do not count."""
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


COMMITTER = "committer"  # the name of the report of the rank that commits
_LONGEST_PAUSE_S = 0.05  # between two looks at a report


def create_reports(folder: Path) -> None:
    """Create the folder of the reports of a save of `folder`, which this process has claimed and tidied."""
    place = layout.writers_folder(folder)
    try:
        place.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"cannot save {folder}: writer processes of an earlier save are still in {place}. End them (fuser names "
            "them), or save under another tag."
        ) from None


def remove_reports(place: Path) -> None:
    """Delete a folder of reports, unless a living process has a report in it."""
    with suppress(FileNotFoundError):
        reports = list(place.iterdir())
        if not any(map(_is_held, reports)):
            for path in reports:
                path.unlink(missing_ok=True)
            place.rmdir()


class Report:
    """`Report` is this process's report on a save.

    Args:
        folder: the folder of the tag.
        name: name of the report: `COMMITTER`, or the number of the rank.
        limit_s: a writer that has been silent for so long counts as dead: its machine may be dead.

    Raises:
        CheckpointError: the folder of the reports does not exist.
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
        """Create the report under a draft name; it is renamed once it is locked and names its machine."""
        draft = self._path.with_name(f".{self._path.stem}.{os.getpid()}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # a file system without locks: then only the limit counts
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, self._head, 0)
        os.rename(draft, self._path)
        return descriptor

    def write(self, result: Mapping[str, Any]) -> None:
        """Show the result of this writer to the other writers. The first result stays."""
        if os.fstat(self._descriptor).st_size == len(self._head):
            self._has_failed = "error" in result
            os.pwrite(self._descriptor, json.dumps(result).encode(), len(self._head))
            os.fsync(self._descriptor)  # then other clients of NFS see it

    @contextmanager
    def kept_fresh(self) -> Iterator[None]:
        """Touch the report inside the context, which shows that this process lives even if locks are not shared."""
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
        """Wait for the result of the writer `name`: an `{"error": ...}` too if its process has ended without one."""
        path = self._folder / f"{name}.json"
        for _ in _looks(self._limit_s, lambda: _touched_ns(path)):
            is_dead = _is_dead(path)  # before the content is read: the process may have just written it
            if (result := _result(path)) is not None:
                return result
            if is_dead:
                self._lost.add(path)
                return {"error": "its writer process ended before its files were written"}
        self._lost.add(path)
        return {"error": f"nothing was heard of its writer process for {self._limit_s:g} s"}

    def leave(self) -> None:
        """Remove the report. The committer first waits until the others, who have read its report by then, have removed
        theirs. A report of a failure stays for the committer, which may look later, and which removes the folder."""
        is_committer = self._path.stem == COMMITTER
        for _ in _looks(self._limit_s) if is_committer else ():
            if all(map(_is_over, set(self._folder.glob("*.json")) - {self._path} - self._lost)):
                break
        os.close(self._descriptor)
        if is_committer or (self._has_failed and not _is_held(self._folder / f"{COMMITTER}.json")):
            remove_reports(self._folder)
        elif not self._has_failed:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # others are in it
                self._folder.rmdir()


@dataclass(frozen=True)
class Ending:
    """`Ending` finds the outcome of an asynchronous save for a rank that does not commit it or whose writer was killed.

    The result of the committing writer decides. If the committing writer has died without a result, or has removed its
    result, the checkpoint in its place decides: its index has the moment of the save.

    A result is `{}` if the save is complete, or has an `"error"`; it also has `"is_known": False` if the save may be
    complete all the same.
    """

    folder: str
    """The folder of the tag."""
    name: str
    """The name of this rank's report."""
    began: str
    """`Index.saved["at"]` of this save, which no other save of the tag has: one begins after the other has ended."""
    save_latest: bool
    limit_s: float
    """The time after which a silent writer is taken for dead, as for `Report`."""

    def as_message(self) -> dict[str, Any]:
        """Return the arguments of `Ending` as JSON values."""
        return asdict(self)

    def wait_for_committer(self) -> dict[str, Any]:
        """Wait for the result and return it; called by a living writer that has written its files and its report."""
        return self._wait(self._look_at_committer)

    def wait_without_writer(self) -> dict[str, Any]:
        """Wait for the result and return it; called for a rank whose writer process has ended without an answer."""
        return self._wait(self.look_without_writer)

    def look_without_writer(self) -> dict[str, Any] | None:
        """Return the result as `wait_without_writer` does, or None while the result is not known."""
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
        is_dead = _is_dead(path)  # before the content is read: the process may have just written it
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
        """Return the result that the checkpoint in its place shows.

        Args:
            otherwise: why the save has failed, if the checkpoint is not there.
            was_committed: the committing writer has reported the commit.
            may_come: the commit may still come.
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
    """Yield, with growing pauses, until `sign()` has not changed for `limit_s`."""
    last, since_s, pause_s = sign(), time.monotonic(), 0.001
    while time.monotonic() - since_s < limit_s:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if (now := sign()) != last:
            last, since_s = now, time.monotonic()


def _is_held(path: Path) -> bool:
    """Whether a living process holds the report; True if that cannot be known."""
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
    """Whether the report belongs to a process of this machine that has ended."""
    with suppress(FileNotFoundError):
        return path.read_bytes().partition(b"\n")[0] == machine().encode() and not _is_held(path)
    return False


def _is_over(path: Path) -> bool:
    """Whether the process of a report does not read other reports any more."""
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
