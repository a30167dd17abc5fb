"""Asking a probe with a limit on its time, so that a driver that hangs stops no program.

The probe runs in a thread of its own. A process of its own could be killed, but costs more than all probes together;
a forked one inherits the locks of every library that runs threads already. What is left of a probe that hangs is a
sleeping daemon thread: it does not keep the process from ending, and is not in its forked children. A probe that hangs
inside C code *and* holds the interpreter's lock cannot be timed out by anything in the process; ctypes and blocking
reads release that lock.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from deepspeed.errors import PluginError

TIMEOUT_VARIABLE = "DS_PROBE_TIMEOUT"
DEFAULT_TIMEOUT_S = 10.0

_inside = threading.local()


def inside_probe() -> bool:
    """Whether the caller is a probe: it must not ask what waits for its answer."""
    return getattr(_inside, "value", False)


def timeout_s() -> float:
    """How long a probe may take, in seconds: `DS_PROBE_TIMEOUT`, or 10.

    Raises:
        PluginError: the variable holds no positive number.
    """
    stated = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not stated:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(stated)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise PluginError(f"{TIMEOUT_VARIABLE}={stated}: a number of seconds above 0 is meant")
    return seconds


def call_with_limit(function: Callable[[], Any], seconds: float, name: str) -> Any:
    """What `function` returns. Called by the manager for each `ds_probe`, once per process.

    Raises:
        TimeoutError: no answer within `seconds`; its cause says where the function hangs.
        Anything that `function` raises, also what would end a process.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        _inside.value = True
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            failures.append(error)

    thread = threading.Thread(target=run, name=f"ds_probe of {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError(
            f"no answer within {seconds:g} s ({TIMEOUT_VARIABLE}=<seconds> waits longer)"
        ) from _whereabouts(thread)
    return answers[0]


def _whereabouts(thread: threading.Thread) -> TimeoutError:
    """An error whose text is the stack of `thread`, as a traceback would show it."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "  it has just ended\n"
    return TimeoutError(f"the probe hangs here:\n{stack}")
