"""The writer process of a rank writes to disk what the rank has staged in shared memory, and commits.

`background.py` starts it, sends one order per line on stdin, as JSON, and reads one answer per line from stdout.
Each order also has a `"number"`, which its answer repeats: `{"number": 3}`, or `{"number": 3, "error": text}`, with
`"is_known": false` if the save may be complete all the same. The process does not import torch.

    {"do": "create", "folder": ...}             make the staging folder; on the committing rank
    {"do": "join", "folder": ..., "name": ...}  open this writer's report, see `locks.py`
    {"do": "write", "files": [...], "ending": {...}, "commit": {...} or null}    write the staged files; the answer
                                                comes when the checkpoint is in its place or has failed, on all ranks
    {"do": "cancel"}                            give up what was begun
    {"do": "end"}                               end; there is no answer

The process runs in a session of its own, so that signals that end the rank do not end it: it completes its order, then
reads the end of stdin, and ends. If a process that the rank forked (a worker of a data loader) has inherited the pipe,
stdin does not end: then the rank sends "end", or the writer finds that its parent has changed.
"""

import json
import mmap
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import SequentialFile, write_file
from deepspeed.checkpoint.index import BlockSums, FileEntry
from deepspeed.checkpoint.locks import Ending, Report, create_reports
from deepspeed.checkpoint.store import FolderStore, prune, put_in_place
from deepspeed.checkpoint.tensor_index import file_entry
from deepspeed.checkpoint.torch_file import MemoryFile
from deepspeed.errors import CheckpointError

_NICENESS = 10  # training goes first
_LOOK_MS = 2_000  # how often a writer without orders checks whether its rank still runs


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
                self._end({"error": reason_of(error)})
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
    ) -> None:
        assert self._report is not None
        results = {name: self._report.wait_for(name) for name in others}
        failed = [f"rank {name}: {result['error']}" for name, result in results.items() if "error" in result]
        if failed:
            raise CheckpointError(f"cannot save {self._folder}: {'; '.join(failed)}")
        for result in results.values():
            entries.extend(map(FileEntry.parse, result["files"]))
        put_in_place(self._store, self._folder, entries, facts, save_latest=save_latest)
        if keep_last is not None and os.getppid() == self._trainer:  # else another run may be loading an older tag
            prune(self._folder.parent, keep_last, self._store, newest=self._folder.name)

    def _end(self, result: Mapping[str, Any]) -> None:
        """End the save, whatever its outcome: report the result to the others, and leave nothing behind."""
        report, self._report = self._report, None
        if report is not None:
            report.write(result)
            report.leave()
        if self._creates:
            self._store.discard(self._folder)
        self._creates = False


def reason_of(error: Exception) -> str:
    """Return the text of an error for another process."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _answer(writer: Writer, order: dict[str, Any]) -> dict[str, Any]:
    number = order.pop("number")
    try:
        result = getattr(writer, order.pop("do"))(**order)
    except (CheckpointError, OSError) as error:  # the rank raises it
        return {"number": number, "error": reason_of(error)}
    return {"number": number, **(result or {})}


def _orders() -> Iterator[dict[str, Any]]:
    """Yield the orders that the rank sends on stdin, until it sends "end", closes the pipe, or has ended."""
    rank, pipe, unread = os.getppid(), sys.stdin.fileno(), b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        while not poll.poll(_LOOK_MS):
            if os.getppid() != rank:
                return
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
    for order in _orders():
        answer = _answer(writer, order)
        try:
            sys.stdout.write(json.dumps(answer) + "\n")  # one call: PYTHONUNBUFFERED makes two of print's
            sys.stdout.flush()
        except BrokenPipeError:  # the rank has ended
            sys.stdout = None  # type: ignore[assignment]  # else the interpreter flushes it again at its end
            break
    writer.cancel("its training process ended during save_checkpoint")
