"""Importing and probing plugins with a limit on the time, so that a driver or file server that hangs stops no program.

Each of the two runs in a thread of its own. A process of its own could be killed, but costs more than all probes
together; a forked one inherits the locks of every library that runs threads already. What is left of a plugin that
hangs is a sleeping daemon thread: it does not keep the process from ending, and is not in its forked children. One that
hangs inside C code *and* holds the interpreter's lock cannot be timed out by anything in the process; ctypes and
blocking reads release that lock.
"""

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from deepspeed.errors import DeepSpeedError, PluginError, stated

TIMEOUT_VARIABLE = "DS_PROBE_TIMEOUT"
DEFAULT_TIMEOUT_S = 10.0
#: for feature plugins and modules of op builders, which may load large libraries from a slow file system
IMPORT_TIMEOUT_VARIABLE = "DS_IMPORT_TIMEOUT"
DEFAULT_IMPORT_TIMEOUT_S = 300.0


class _Call:
    """A `_Call` says whether the caller of `call_with_limit` still waits, and which of its locks the thread may use."""

    def __init__(self, lends: object) -> None:
        self.lends = lends
        self.awaited = True


_inside = threading.local()
#: modules whose import was given up and may still hang
_overdue: dict[str, TimeoutError] = {}


def inside_probe() -> bool:
    """Whether the caller is a plugin that is imported or probed: it must not ask what waits for its answer."""
    call: _Call | None = getattr(_inside, "call", None)
    return call is not None and call.lends is None


def is_lent(lock: object) -> bool:
    """Whether the caller is a thread of `call_with_limit` whose caller holds `lock` for it and still waits."""
    call: _Call | None = getattr(_inside, "call", None)
    return call is not None and call.lends is lock and call.awaited


def timeout_s(
    variable: str = TIMEOUT_VARIABLE, default_s: float = DEFAULT_TIMEOUT_S, error: type[DeepSpeedError] = PluginError
) -> float:
    """Return how many seconds the import of an accelerator's plugin, or its probe, may take: `DS_PROBE_TIMEOUT`, or 10.

    Args:
        variable, default_s, error: another limit, and what is raised for it.

    Raises:
        PluginError: the variable holds no positive number.
    """
    value = os.environ.get(variable, "").strip()
    if not value:
        return default_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise error(f"{stated(variable)}: it must be a number of seconds above 0")
    return seconds


def import_timeout_s() -> float:
    """Return how many seconds the import of a feature plugin or op builders may take: `DS_IMPORT_TIMEOUT`, or 300.

    Raises:
        PluginError: the variable holds no positive number.
    """
    return timeout_s(IMPORT_TIMEOUT_VARIABLE, DEFAULT_IMPORT_TIMEOUT_S)


def import_with_limit(module_name: str) -> Any:
    """The module of that name, imported within `import_timeout_s()`. Called for modules of op builders.

    Raises:
        TimeoutError: as `call_with_limit`.
        Anything that the import raises.
    """
    importing = is_being_imported(module_name)
    if importing and module_name in _overdue:  # to import it here would wait for the thread that hangs
        raise _overdue[module_name]
    if importing or module_name in sys.modules:
        return importlib.import_module(module_name)

    def load() -> Any:
        return importlib.import_module(module_name)

    try:
        return call_with_limit(
            load, import_timeout_s(), f"import of {module_name}", IMPORT_TIMEOUT_VARIABLE, lends=load
        )
    except TimeoutError as error:
        _overdue[module_name] = error
        raise


def call_with_limit(
    function: Callable[[], Any], seconds: float, name: str, variable: str = TIMEOUT_VARIABLE, lends: object = None
) -> Any:
    """Call `function` in a thread, and return its result. Called for imports and the `ds_probe` of plugins.

    Args:
        seconds: the limit.
        name: the name of the thread.
        variable: the environment variable that sets the limit, for the message.
        lends: a lock that the caller holds and `function` may use, see `is_lent`; None: `function` must not ask for a
            plugin or the accelerator (`inside_probe`).

    Raises:
        TimeoutError: no answer within `seconds`; its cause says where the function hangs.
        Anything that `function` raises, also what would end a process.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []
    call = _Call(lends)

    def run() -> None:
        _inside.call = call
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    call.awaited = False
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s ({variable}=<seconds> waits longer)") from _whereabouts(
            thread
        )
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
