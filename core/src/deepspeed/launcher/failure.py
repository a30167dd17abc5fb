"""The last words of a job that failed: which rank was first, and why.

`launch.py` prints `describe_failure` after everything else, so that the cause is not buried under what the other ranks
said when it took them down. Of what stands on the console already only the exception is
told again.
"""

import re
import signal

_TRACEBACK = re.compile(
    r"^(?P<prefix>(\[rank\d+\]: ?)?)\s*[+|]?\s*(Exception Group )?Traceback \(most recent call last\):$"
)
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_ASIDE = re.compile(
    r"^(Exception ignored |Exception in thread )"
)  # a traceback under such a line is not why a process ended
_LAST_LINES = 20  # shown of a rank that left no traceback


def exit_code_of(return_code: int) -> int:
    """What the shell is to see: the rank's own code, or 128 + the number of the signal that killed it."""
    return 128 - return_code if return_code < 0 else return_code


def describe_failure(rank: int, pid: int, return_code: int, stderr_tail: str, shown: bool = False) -> str:
    """The report on the rank that ended first with a failure.

    `return_code` is as in `subprocess`: negative for a signal. A traceback stands last; a signal's name stands last
    where there is no traceback, for then it is the whole story. `shown`: stderr was passed on to the console.
    """
    verdict = f"rank {rank} (pid {pid}) {_verdict(return_code)}; the other ranks were stopped"
    traceback = find_traceback(stderr_tail) if return_code > 0 else ""
    if shown:
        return f"deepspeed: {verdict}.{_told_above(traceback, stderr_tail)}"
    if traceback:
        return f"deepspeed: {verdict}. Its traceback:\n{traceback}"
    last = "\n".join(stderr_tail.rstrip().splitlines()[-_LAST_LINES:])
    if not last:
        return f"deepspeed: {verdict}. It wrote nothing to stderr."
    return f"deepspeed: the last lines of rank {rank} on stderr:\n{last}\ndeepspeed: {verdict}."


def find_traceback(text: str) -> str:
    """The last traceback in `text` with the exceptions that led to it; empty if there is none."""
    lines = text.rstrip().splitlines()
    starts = [n for n, line in enumerate(lines) if _TRACEBACK.match(line) and not _is_aside(lines, n)]
    if not starts:
        return ""
    start = starts[-1]
    match = _TRACEBACK.match(lines[start])
    assert match is not None
    prefix = match["prefix"]
    for earlier in reversed(starts[:-1]):
        if not _is_chained(lines[earlier:start]):
            break
        start = earlier
    end = next((n for n in range(start, len(lines)) if _ends(lines[n], prefix)), len(lines))
    return "\n".join(lines[start:end]).rstrip()


def _told_above(traceback: str, stderr_tail: str) -> str:
    """One line that points back: the exception, else the last words; "" when there are none."""
    told = _exception_of(traceback) if traceback else stderr_tail.rstrip().rpartition("\n")[2].strip()
    return f" Its last words on stderr, shown above: {told}" if told else ""


def _exception_of(traceback: str) -> str:
    """The line after the frames, which are indented; the first of a message of several."""
    lines = traceback.splitlines()
    start = max(n for n, line in enumerate(lines) if _TRACEBACK.match(line))
    match = _TRACEBACK.match(lines[start])
    assert match is not None
    below = [line.removeprefix(match["prefix"]) for line in lines[start + 1 :]]
    return next((line for line in below if line and not line[0].isspace()), lines[-1].strip())


def _verdict(return_code: int) -> str:
    if return_code >= 0:
        return f"ended with exit code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-return_code}"
    return f"was killed by {name}"


def _is_aside(lines: list[str], number: int) -> bool:
    return number > 0 and _ASIDE.match(lines[number - 1]) is not None


def _is_chained(lines: list[str]) -> bool:
    return any(phrase in line for line in lines for phrase in _CHAIN)


def _ends(line: str, prefix: str) -> bool:
    """After a traceback come remarks of the teardown: another prefix, or an exception that was ignored."""
    return _ASIDE.match(line) is not None or not line.startswith(prefix.rstrip())
