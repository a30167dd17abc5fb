"""Before the interpreter ends, let the threads of collectives come to rest.

[Note: threads at exit] A gloo thread that has just completed a collective still holds its tensors for a moment. If the
main thread ends the interpreter in that moment, letting go of them asks for Python's lock, which ends the thread in a
way that C++ answers with `terminate called without an active exception`: the process dies of SIGABRT after all its
work was done (pytorch/pytorch issue 190489). Scripts rarely call `destroy_process_group()`, and it does not help while
an engine holds the group. On a loaded machine 2 of 5 jobs of four ranks died so, and 1 of 19 of two; with the wait 0 of
12. It narrows the race and cannot close it.
"""

import atexit
import functools
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LIMIT_S = 0.5
_PAUSE_S = 0.001
_NUM_QUIET = 3  # looks in a row; between two of them a thread that waited for Python's lock has got it


@functools.cache
def settle_at_exit() -> None:
    """Wait for threads to settle when the process ends. Called by `init_distributed`; the first call counts."""
    atexit.register(settle)


def settle(limit_s: float = _LIMIT_S) -> bool:
    """Wait until no other thread of this process is running or ready to run; returns whether it came to that.

    The wait leaves Python's lock to the other threads. Without /proc it is a fixed pause.

    Args:
        limit_s: longest wait, for programs whose threads never rest.
    """
    if not _TASKS.is_dir():
        time.sleep(min(limit_s, 0.05))
        return True
    deadline = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _NUM_QUIET:
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
        num_quiet = 0 if _is_another_thread_running() else num_quiet + 1
    return True


def _is_another_thread_running() -> bool:
    me = str(threading.get_native_id())
    for task in _TASKS.iterdir():
        if task.name == me:
            continue
        try:
            # "tid (name) state ...", where the name may hold anything
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if state == "R":
            return True
    return False
