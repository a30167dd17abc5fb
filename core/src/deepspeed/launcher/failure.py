"""The report on a failed job: which rank is the cause, and why.

`node_agent.py` calls `may_be_a_consequence` to decide which failure to blame. `launch.py` prints `describe_job` last,
so that the errors of the other ranks do not bury the cause. If the traceback is already on the console, the report
repeats only the exception.
"""

import os
import re
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from deepspeed.uncaught import Uncaught

_TRACEBACK = re.compile(
    r"^(?P<prefix>(\[rank\d+\]: ?)?)\s*[+|]?\s*(Exception Group )?Traceback \(most recent call last\):$"
)
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_ASIDE = re.compile(
    r"^(Exception ignored |Exception in thread )"
)  # a traceback under such a line did not end the process
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SHOWN_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in ')
_NUM_FRAMES = 12  # shown for a rank that was stopped
_LAST_LINES = 20  # shown for a rank that left no traceback
# Errors of a rank that lost a peer: ours, torch's, and messages of communication libraries.
_CONSEQUENCE = re.compile(
    r"^(\S+\.)?(CommError|PeerFailed|HeardFailure|PeerLeft|PeerGone|Dist\w*Error|ConnectionResetError|ConnectionAbortedError|BrokenPipeError)\b"
    r"|closed by peer|reset by peer|connection (was )?(likely )?closed|broken pipe|remote process exited"
    r"|timed out waiting|pair closure|socket timeout|peer process",
    re.IGNORECASE,
)

_LOCAL_RANK = re.compile(r"--local_rank\b")  # in the error of a script that does not accept the flag
_LOCAL_RANK_ADVICE = (
    ". The launcher adds --local_rank to the script's arguments: let the script take it "
    '(parser.add_argument("--local_rank", type=int)), or give `deepspeed` the flag --no_local_rank'
)


class RankEnd(NamedTuple):
    """A `RankEnd` says how one rank ended, and holds the last output of the rank.

    Args:
        rank: global rank.
        pid: process id of the rank.
        return_code: as in `subprocess`: negative for a signal.
        uncaught: the uncaught exception, if the rank reported one.
        stderr_tail: the end of stderr.
        shown: whether stderr went to the console.
        stacks: stacks of the rank's threads (lines of `faulthandler`), if requested before the rank was stopped.
    """

    rank: int
    pid: int
    return_code: int
    uncaught: Uncaught | None
    stderr_tail: str
    shown: bool
    stacks: Sequence[str] = ()

    @property
    def last_words(self) -> str:
        """The first line of the exception, or else the last line of stderr; "" if there is neither."""
        if self.uncaught is not None:
            return _first_line(self.uncaught.exception)
        return _last_words(find_traceback(self.stderr_tail), self.stderr_tail)


def may_be_a_consequence(end: RankEnd) -> bool:
    """Return whether `end` may be another rank's fault: a lost connection, or an error of a collective.

    A signal is always a cause, except SIGABRT: communication libraries abort a process after they lose a peer.
    """
    if end.return_code < 0 and end.return_code != -signal.SIGABRT:
        return False
    return _CONSEQUENCE.search(end.last_words) is not None


def describe_job(cause: RankEnd, others: Sequence[RankEnd]) -> str:
    """Return the report on a failed job: the stacks of ranks that were stopped, one line per other exception, and the
    cause last.

    A `ConfigError` takes one line, like the errors in the command line of `deepspeed`.
    """
    lines = [*describe_standing(others), *_describe_others(cause, others)]
    if cause.uncaught is not None and cause.uncaught.is_config_error:
        lines.append(f"deepspeed: error: {cause.uncaught.message} (rank {cause.rank})")
    elif cause.uncaught is not None:
        verdict = f"rank {cause.rank} (pid {cause.pid}) {_verdict(cause.return_code)}; the other ranks were stopped"
        lines.append(f"deepspeed: {verdict}. Its traceback:\n{cause.uncaught.traceback.rstrip()}")
    else:
        lines.append(describe_failure(cause.rank, cause.pid, cause.return_code, cause.stderr_tail, cause.shown))
    return "\n".join(lines)


def describe_standing(ends: Sequence[RankEnd]) -> list[str]:
    """Return the innermost frames of each rank that still ran when another rank failed because a peer was missing, in
    the format of a traceback. The last frame shows where the rank waits or hangs. The heading names the line of the
    script's own code, which may be far up the stack."""
    found = []
    for end in ends:
        if end.uncaught is None and (frames := _frames_of_script(end.stacks)):
            left_out = [f"  ... {len(frames) - _NUM_FRAMES} calls"] if len(frames) > _NUM_FRAMES else []
            stack = "\n".join([*left_out, *frames[-_NUM_FRAMES:]])
            line = _line_of_script(frames)
            at = f" ({line} in the script's own code)" if line else ""
            found.append(f"deepspeed: rank {end.rank} (pid {end.pid}) had not ended; it was here{at}:\n{stack}")
    return found


def _line_of_script(frames: Sequence[str]) -> str:
    """Return the innermost frame outside installed packages and the standard library, as "train.py:7"; else ""."""
    installed = (os.path.dirname(os.path.dirname(__file__)), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    for frame in reversed(frames):
        match = _SHOWN_FRAME.match(frame)
        assert match is not None, frame
        file = match["file"]
        packages = {"site-packages", "dist-packages"} & set(PurePath(file).parts)  # per user or per distribution
        if not packages and not file.startswith(("<", *(folder + os.sep for folder in installed))):
            return f"{file}:{match['line']}"
    return ""


def _frames_of_script(stacks: Sequence[str]) -> list[str]:
    """Return the frames of the thread that runs the script, outermost first.

    `faulthandler` writes a heading per thread, then the frames, innermost first: `  File "a.py", line 3 in f`.
    The script's thread is the thread that started in a module, or else the last thread: threads come newest first.
    """
    threads: list[list[str]] = []
    for line in stacks:
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(f'  File "{match["file"]}", line {match["line"]}, in {match["function"]}')
    threads = [frames for frames in threads if frames]
    own = [frames for frames in threads if frames[-1].endswith(", in <module>")] or threads[-1:]
    return own[0][::-1] if own else []


def _describe_others(cause: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """Return one line per exception that differs from the cause, with the ranks that raised it."""
    ranks_of: dict[str, list[str]] = {}
    for end in others:
        if end.uncaught is not None and end.last_words != cause.last_words:
            ranks_of.setdefault(end.last_words, []).append(str(end.rank))
    return [f"deepspeed: rank {', '.join(ranks)} failed as well: {words}" for words, ranks in ranks_of.items()]


def exit_code_of(return_code: int) -> int:
    """Return the exit code for the shell: the rank's own code, or 128 + the number of the signal that killed it."""
    return 128 - return_code if return_code < 0 else return_code


def describe_failure(rank: int, pid: int, return_code: int, stderr_tail: str, shown: bool = False) -> str:
    """Return the report on the rank that ended first with a failure.

    `return_code` is as in `subprocess`: negative for a signal. The traceback comes last; without a traceback the exit
    code or signal comes last. `shown`: stderr is on the console already.
    """
    traceback = find_traceback(stderr_tail) if return_code > 0 else ""
    advice = _LOCAL_RANK_ADVICE if _LOCAL_RANK.search(_last_words(traceback, stderr_tail)) else ""
    verdict = f"rank {rank} (pid {pid}) {_verdict(return_code)}; the other ranks were stopped{advice}"
    if shown:
        return f"deepspeed: {verdict}.{_shown_above(traceback, stderr_tail)}"
    if traceback:
        return f"deepspeed: {verdict}. Its traceback:\n{traceback}"
    last = "\n".join(stderr_tail.rstrip().splitlines()[-_LAST_LINES:])
    if not last:
        return f"deepspeed: {verdict}. It wrote nothing to stderr."
    return f"deepspeed: the last lines of rank {rank} on stderr:\n{last}\ndeepspeed: {verdict}."


def find_traceback(text: str) -> str:
    """Return the last traceback in `text` together with its chained exceptions; "" if there is none."""
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


def _shown_above(traceback: str, stderr_tail: str) -> str:
    """Return a sentence that repeats the exception, or else the last line of stderr; "" if there is neither."""
    words = _last_words(traceback, stderr_tail)
    return f" Its last words on stderr, shown above: {words}" if words else ""


def _last_words(traceback: str, stderr_tail: str) -> str:
    return _exception_of(traceback) if traceback else stderr_tail.rstrip().rpartition("\n")[2].strip()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _exception_of(traceback: str) -> str:
    """Return the line after the indented frames: the exception and the first line of its message."""
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
    """Return whether a traceback ends before `line`: the line has another prefix, or is a remark of the teardown."""
    return _ASIDE.match(line) is not None or not line.startswith(prefix.rstrip())
