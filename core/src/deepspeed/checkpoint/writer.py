"""The writer process of a rank writes to disk what the rank has staged in shared memory, and commits.

`background.py` starts it, sends one order per line on stdin, as JSON, and reads one answer per line from stdout.
Each order also has a `"number"`, which its answer repeats: `{"number": 3}`, or `{"number": 3, "error": text}`, with
`"is_known": false` if the save may be complete all the same. The process does not import torch.

    {"do": "create", "folder": ...}             make the staging folder; on the committing rank
    {"do": "join", "folder": ..., "name": ...}  open this writer's report
    {"do": "write", "files": [...], "ending": {...}, "commit": {...} or null}    write the staged files; the answer
                                                comes when the checkpoint is in its place or has failed, on all ranks
    {"do": "cancel"}                            give up what was begun
    {"do": "persist"}                           copy the newest tag to the farther tier now (`persistence.py`)
    {"do": "end"}                               end; there is no answer

The process runs in a session of its own, so that signals that end the rank do not end it: it completes its order, then
reads the end of stdin, and ends. If a process that the rank forked (a worker of a data loader) has inherited the pipe,
stdin does not end: then the rank sends "end", or the writer finds that its parent has changed.

`Report`: the writer processes of a save report to each other when their files are written. `Ending`: they and a rank
whose writer was killed find the outcome of the save. Training may be in a collective of its own meanwhile, or may have
ended, so they agree through files. Each writer has a file in the folder `.<tag>.writers`, locked while its process
lives: one line that names its machine, and then its result. A free lock shows that a process of this machine has ended.
Some file systems do not share locks between machines, so a process of another machine counts as ended when it has been
silent for long.
"""

import fcntl
import json
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, cast

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import BlockSums, SequentialFile, sync_folder, write_file
from deepspeed.checkpoint.index import FileEntry, read_index
from deepspeed.checkpoint.persistence import Persistence, error_text
from deepspeed.checkpoint.store import (
    FolderStore,
    is_held,
    machine,
    prune,
    put_in_place,
    remove_reports,
)
from deepspeed.checkpoint.tags import read_latest
from deepspeed.checkpoint.tensor_index import MemoryFile, file_entry
from deepspeed.errors import CheckpointError
from deepspeed.log import logger

_NICENESS = 10  # training goes first
_LOOK_MS = 2_000  # how often a writer without orders checks whether its rank still runs, and whether a copy is due


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
        if is_committer or (self._has_failed and not is_held(self._folder / f"{COMMITTER}.json")):
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


def _is_dead(path: Path) -> bool:
    """Whether the report belongs to a process of this machine that has ended."""
    with suppress(FileNotFoundError):
        return path.read_bytes().partition(b"\n")[0] == machine().encode() and not is_held(path)
    return False


def _is_over(path: Path) -> bool:
    """Whether the process of a report does not read other reports any more."""
    result = _result(path)
    has_failed = result is not None and "error" in result
    return (has_failed and not is_held(path)) or _is_dead(path)


def _result(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes().partition(b"\n")[2]))
    except (FileNotFoundError, ValueError):  # not there yet, or not all of it
        return None


def _touched_ns(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


class Writer:
    """`Writer` has the orders as methods.

    Args:
        memory: descriptor of the shared memory.
        limit_s: how long the writers wait for one that is silent.
    """

    def __init__(self, memory: int, limit_s: float) -> None:
        self._memory = memory
        self._limit_s = limit_s
        self._trainer = os.getppid()
        self._store = FolderStore()
        self._folder = Path()
        self._creates = False
        self._report: Report | None = None
        self._persistence: Persistence | None = None  # from the first commit on

    def create(self, folder: str) -> None:
        self._folder, self._creates = Path(folder), True
        self._store.create(self._folder)
        create_reports(self._folder)

    def join(self, folder: str, name: str) -> None:
        self._folder = Path(folder)
        self._report = Report(self._folder, name, self._limit_s)

    def cancel(self, reason: str = "the save was given up") -> None:
        self._end({"error": reason})

    def write(
        self, files: Sequence[Mapping[str, Any]], ending: Mapping[str, Any], commit: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        assert self._report is not None, "write before join"
        assert self._creates == (commit is not None), "the rank that creates commits"
        with self._report.kept_fresh():
            try:
                entries = self._write_files(files)
                result: dict[str, Any] = {}
                if commit is None:
                    self._report.write({"files": [entry.as_message() for entry in entries]})
                    result = Ending(**ending).wait_for_committer()
                else:
                    self._commit(entries, **commit)
            except Exception as error:
                self._end({"error": error_text(error)})
                raise
        self._end(result)
        return result

    def _write_files(self, files: Sequence[Mapping[str, Any]]) -> list[FileEntry]:
        if not files:
            return []
        staged = memoryview(mmap.mmap(self._memory, 0, prot=mmap.PROT_READ))  # unmapped with the last view of it
        return [self._write_file(each["name"], staged[each["offset"] :][: each["bytes"]]) for each in files]

    def _write_file(self, name: str, content: memoryview) -> FileEntry:
        sums = BlockSums()

        def write(file: SequentialFile) -> None:
            file.write_lasting(content)
            sums.add(content)  # while the thread writes

        num_bytes = write_file(layout.staging_folder(self._folder) / name, write)
        return file_entry(name, num_bytes, sums.as_text(), cast(BinaryIO, MemoryFile(content)))

    def _commit(
        self,
        entries: list[FileEntry],
        *,
        others: Sequence[str],
        facts: Mapping[str, Any],
        save_latest: bool,
        keep_last: int | None,
        persistent: Mapping[str, Any] | None = None,
    ) -> None:
        assert self._report is not None
        results = {name: self._report.wait_for(name) for name in others}
        failed = [f"rank {name}: {result['error']}" for name, result in results.items() if "error" in result]
        if failed:
            raise CheckpointError(f"cannot save {self._folder}: {'; '.join(failed)}")
        for result in results.values():
            entries.extend(map(FileEntry.parse, result["files"]))
        put_in_place(self._store, self._folder, entries, facts, save_latest=save_latest)
        if persistent is not None and self._persistence is None:
            self._persistence = Persistence(**persistent, may_prune=self._is_attended)
        if keep_last is not None and self._is_attended():
            needed = self._persistence.copied if self._persistence is not None else ()
            prune(self._folder.parent, keep_last, self._store, newest=self._folder.name, needed=needed)
        if self._persistence is not None:
            self._persistence.offer(self._folder, save_latest=save_latest)

    def _is_attended(self) -> bool:
        """Whether the rank still runs; else another run may be loading an older tag."""
        return os.getppid() == self._trainer

    def look(self) -> None:
        """Begin the copy to the farther tier that is due."""
        if self._persistence is not None:
            self._persistence.look()

    def persist(self) -> None:
        """Return when the newest tag is in the farther tier.

        Raises:
            CheckpointError: it cannot be copied.
        """
        if self._persistence is not None:
            self._persistence.finish()

    def _end(self, result: Mapping[str, Any]) -> None:
        """End the save, whatever its outcome: report the result to the others, and leave nothing behind."""
        report, self._report = self._report, None
        if report is not None:
            report.write(result)
            report.leave()
        if self._creates:
            self._store.discard(self._folder)
        self._creates = False


def _answer(writer: Writer, order: dict[str, Any]) -> dict[str, Any]:
    number = order.pop("number")
    try:
        result = getattr(writer, order.pop("do"))(**order)
    except (CheckpointError, OSError) as error:  # the rank raises it
        return {"number": number, "error": error_text(error)}
    return {"number": number, **(result or {})}


def _orders(idle: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield the orders that the rank sends on stdin, until it sends "end", closes the pipe, or has ended.

    Args:
        idle: called every `_LOOK_MS` while there is no order.
    """
    rank, pipe, unread = os.getppid(), sys.stdin.fileno(), b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        while not poll.poll(_LOOK_MS):
            if os.getppid() != rank:
                return
            idle()
        data = os.read(pipe, 2**16)
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["do"] == "end":
                return
            yield order
        if not data:
            return


def main() -> None:
    """Run the process. Its arguments are the descriptor of the shared memory, and `limit_s` in seconds."""
    memory, limit_s = sys.argv[-2:]
    os.nice(_NICENESS)
    writer = Writer(int(memory), float(limit_s))
    for order in _orders(writer.look):
        answer = _answer(writer, order)
        try:
            sys.stdout.write(json.dumps(answer) + "\n")  # one call: PYTHONUNBUFFERED makes two of print's
            sys.stdout.flush()
        except BrokenPipeError:  # the rank has ended
            sys.stdout = None  # type: ignore[assignment]  # else the interpreter flushes it again at its end
            break
    writer.cancel("its training process ended during save_checkpoint")
    try:
        writer.persist()
    except CheckpointError as error:
        logger.error("%s", error)
