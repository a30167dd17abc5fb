"""Importing and probing an accelerator's plugin with a limit on the time, so that a driver that hangs stops no program.

Each of the two runs in a thread of its own. A process of its own could be killed, but costs more than all probes
together; a forked one inherits the locks of every library that runs threads already. What is left of a plugin that
hangs is a sleeping daemon thread: it does not keep the process from ending, and is not in its forked children. One that
hangs inside C code *and* holds the interpreter's lock cannot be timed out by anything in the process; ctypes and
blocking reads release that lock.
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
    """Whether the caller is a plugin that is imported or probed: it must not ask what waits for its answer."""
    return getattr(_inside, "value", False)


def timeout_s() -> float:
    """How long the import of an accelerator's plugin may take, and its probe, in seconds: `DS_PROBE_TIMEOUT`, or 10.

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
    """What `function` returns. Called by the manager, for the import and the `ds_probe` of each plugin.

    Args:
        name: what it is called in a list of threads.

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

    thread = threading.Thread(target=run, name=name, daemon=True)
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
    return TimeoutError(f"it hangs here:\n{stack}")


def is_being_imported(entry_value: str) -> bool:
    """Whether the module of an entry point, or a package that holds it, is being imported now.

    The caller is then inside that import, on whose lock another thread would wait.
    """
    parts = entry_value.partition(":")[0].split(".")
    modules = (sys.modules.get(".".join(parts[:end])) for end in range(1, 1 + len(parts)))
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)
