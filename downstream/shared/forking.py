"""Runs a recipe's script on several ranks, each forked from one process that has imported its libraries.

    python forking.py SCRIPT

Started by `launching.py`, once per script: importing a library takes far longer than training a tiny model. Every rank
is a fresh fork, so what a library keeps in its modules never reaches the next run. Reads one JSON job per line:

    {"arguments": [...], "environments": [{...} per rank], "directory": ..., "logs": [path per rank], "limit_s": ...}

and answers each with one line, {"codes": [exit code per rank], "late": [rank]}: those that ran longer than the limit.
These have written the stacks of all their threads into their logs, and were killed. When a rank fails, the others get
some seconds to end. Ends its ranks and itself when the standard input closes.
"""

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_GRACE_S = 10.0  # for the errors of the other ranks, once one has failed, and for the stacks of late ones
_LOOK_S = 0.05  # between two looks for them
_STACKS = b"Timeout ("  # begins what `faulthandler` writes at the limit


def main() -> None:
    script = Path(sys.argv[1])
    sys.path.insert(0, str(script.parent))
    entry = importlib.import_module(script.stem).main
    gc.freeze()  # or the first collection of each rank would copy every page
    _answer("ready")
    for line in sys.stdin:
        _answer(json.dumps(run(entry, json.loads(line))))


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(entry: Callable[[], None], job: dict[str, Any]) -> dict[str, list[int]]:
    """The exit codes of a job's ranks, negative for a signal, and the ranks that reached its limit."""
    limit = time.monotonic() + job["limit_s"]
    pids = [fork(entry, job, rank) for rank in range(len(job["environments"]))]
    running = {os.pidfd_open(pid): pid for pid in pids}
    codes: dict[int, int] = {}
    deadline, late = limit, []
    while running:
        ready = select.select([sys.stdin, *running], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready or sys.stdin in ready:  # out of time, or the tests have ended
            if not ready and deadline == limit:
                late = [rank for rank, pid in enumerate(pids) if pid in running.values()]
                _await_stacks([Path(job["logs"][rank]) for rank in late])
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
            ready = list(running)
        for descriptor in ready:
            pid = running.pop(descriptor)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(descriptor)
            if codes[pid] != 0 and deadline == limit:
                deadline = min(limit, time.monotonic() + _GRACE_S)
    return {"codes": [codes[pid] for pid in pids], "late": late}


def _await_stacks(logs: Sequence[Path]) -> None:
    """Return when the ranks have written their stacks, as they do by themselves at the limit."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(_STACKS not in log.read_bytes() for log in logs):
        time.sleep(_LOOK_S)


def fork(entry: Callable[[], None], job: dict[str, Any], rank: int) -> int:
    """Start one rank; gives its process id. The rank itself does not return."""
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        log = os.open(job["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.dump_traceback_later(job["limit_s"], file=2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environments"][rank])
        os.chdir(job["directory"])
        sys.argv[1:] = job["arguments"]
        entry()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a rank ends here, whatever it is
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> None:
    """End as an interpreter does, but without what the parent process registered to run at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
