"""`Orders`: this rank's end of the pipes to its writer process (`writer.py`)."""

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from typing import Any


class Orders:
    """Orders are numbered, and an answer has the number of its order: an answer that nobody waits for any more, since
    Ctrl-C ended the wait, is not taken for that of a later order.

    Args:
        process: has binary pipes as stdin and stdout.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._number = 0  # of the last order
        self._read: list[bytes] = []  # what came from the pipe; an empty item: it has ended

    def send(self, order: Mapping[str, Any]) -> int:
        """Give an order; returns its number. Answers to earlier ones are dropped. If the process has ended, `receive`
        gives None."""
        assert self._process.stdin is not None
        self._number += 1
        self._read = list(filter(None, [b"".join(self._read).rpartition(b"\n")[2]]))
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({**order, "number": self._number}).encode() + b"\n")
            self._process.stdin.flush()
        return self._number

    def receive(self, number: int) -> dict[str, Any] | None:
        """The answer to an order; None where the process has ended without one. Waits. May be asked again."""
        while self._answer(number) is None and not self._has_ended():
            self._poll(None)
        if (answer := self._answer(number)) is None:
            self._process.wait()  # it has closed the pipe, and changes nothing on disk from here on
        return answer

    def has_answer(self, number: int, within_s: float = 0) -> bool:
        """Whether `receive` will not wait. Waits for so long itself, for each part of an answer."""
        while self._answer(number) is None and not self._has_ended():
            if not self._poll(int(within_s * 1000)):
                return False
        return True

    def error_of_end(self, reason: str = "") -> str:
        """What a process that has ended without an answer is reported as; `reason` says what came of the order."""
        why = reason and f": {reason.rstrip('.')}"
        return (
            f"the writer process of this rank has ended with exit code {self._process.wait()}{why}. What it printed is "
            "above; the next save starts another one."
        )

    def _answer(self, number: int) -> dict[str, Any] | None:
        """The answer, as far as the pipe was read."""
        for line in b"".join(self._read).splitlines(keepends=True):
            if line.endswith(b"\n") and (answer := json.loads(line))["number"] == number:
                return dict(answer)
        return None

    def _has_ended(self) -> bool:
        return bool(self._read) and not self._read[-1]

    def _poll(self, timeout_ms: int | None) -> bool:
        """Wait for the pipe and read some of it; False when nothing came in time."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()  # not select, which takes no descriptors above 1023
        poll.register(pipe, select.POLLIN)
        if not poll.poll(timeout_ms):
            return False
        self._read.extend(map(os.read, [pipe], [2**16]))  # one call: an interrupt cannot lose what was read
        return True
