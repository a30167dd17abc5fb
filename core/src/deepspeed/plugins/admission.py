"""Reads the entry points of installed plugins and decides, by environment variables and API version, which may load.

    DS_PLUGINS_BLOCK=a,b     never import these plugins
    DS_PLUGINS_AUTOLOAD=0    do not import plugins just because they are installed: import only the plugins that
                             DS_ACCELERATOR and DS_PLUGINS=a,b name, and use those that the program registers

`manager.py` checks before each import, so the current values of the variables apply. Entry points are read with
`importlib_metadata`: each has `name`, `value` (the module), `dist` (the distribution, or None) and `load()`.

Plugins are imported and probed with a time limit, so that a hanging driver or file server does not block the program.
Each import and each probe runs in its own thread. A separate process could be killed, but it costs more than all probes
together, and a forked process inherits the locks of libraries that already run threads. A plugin that hangs leaves a
sleeping daemon thread: the thread does not prevent the process from exiting, and forked children do not have it. If a
plugin hangs in C code *and* holds the GIL, nothing in the process can time it out; ctypes and blocking reads release
the GIL.
"""

import difflib
import importlib
import operator
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import importlib_metadata

from deepspeed._installation import pip_install
from deepspeed.errors import DeepSpeedError, PluginError, counted, shown, stated
from deepspeed.plugins import hookspecs

TIMEOUT_VARIABLE = "DS_PROBE_TIMEOUT"
DEFAULT_TIMEOUT_S = 10.0
#: for feature plugins and modules of op builders, which may load large libraries from a slow file system
IMPORT_TIMEOUT_VARIABLE = "DS_IMPORT_TIMEOUT"
DEFAULT_IMPORT_TIMEOUT_S = 300.0


class _Call:
    """A call in progress: whether the caller of `call_with_limit` still waits, and which lock the thread may use."""

    def __init__(self, lends: object) -> None:
        self.lends = lends
        self.awaited = True


_inside = threading.local()
#: modules whose import timed out and may still hang
_overdue: dict[str, TimeoutError] = {}


def inside_probe() -> bool:
    """Return whether this thread imports or probes a plugin. It must not use the manager, which waits for it."""
    call: _Call | None = getattr(_inside, "call", None)
    return call is not None and call.lends is None


def is_lent(lock: object) -> bool:
    """Return whether this is a thread of `call_with_limit` whose caller holds `lock` on its behalf and still waits."""
    call: _Call | None = getattr(_inside, "call", None)
    return call is not None and call.lends is lock and call.awaited


def timeout_s(
    variable: str = TIMEOUT_VARIABLE, default_s: float = DEFAULT_TIMEOUT_S, error: type[DeepSpeedError] = PluginError
) -> float:
    """Return the time limit, in seconds, for the import or probe of an accelerator plugin: `DS_PROBE_TIMEOUT`, or 10.

    Args:
        variable, default_s, error: the variable, default and exception class of another limit.

    Raises:
        PluginError: the variable is not a positive number.
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
    """Return the time limit, in seconds, to import a feature plugin or op builders: `DS_IMPORT_TIMEOUT`, or 300.

    Raises:
        PluginError: the variable is not a positive number.
    """
    return timeout_s(IMPORT_TIMEOUT_VARIABLE, DEFAULT_IMPORT_TIMEOUT_S)


def import_with_limit(module_name: str) -> Any:
    """Import a module within `import_timeout_s()` and return it. Called for modules of op builders.

    Raises:
        TimeoutError: the import exceeds the limit, now or in an earlier call.
        Anything that the import raises.
    """
    importing = is_being_imported(module_name)
    if importing and module_name in _overdue:  # a second import would wait for the hanging thread
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
    """Call `function` in a thread, and return its result. Used for imports and the `ds_probe` of plugins.

    Args:
        seconds: the time limit.
        name: the name of the thread.
        variable: the environment variable of the limit, for the error message.
        lends: a lock that the caller holds and `function` may use (see `is_lent`). If None, `function` must not use
            the plugin manager or the accelerator (see `inside_probe`).

    Raises:
        TimeoutError: no result within `seconds`. The cause shows where the function hangs.
        Anything that `function` raises, including `SystemExit`.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []
    call = _Call(lends)

    def run() -> None:
        _inside.call = call
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
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
    """Return an error whose text is the current stack of `thread`."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "  it has just ended\n"
    return TimeoutError(f"it hangs here:\n{stack}")


def is_being_imported(entry_value: str) -> bool:
    """Return whether the module of an entry point, or one of its parent packages, is being imported now.

    The caller is then inside this import, and another thread would wait for the import lock.
    """
    parts = entry_value.partition(":")[0].split(".")
    modules = (sys.modules.get(".".join(parts[:end])) for end in range(1, 1 + len(parts)))
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
#: the value of DS_ACCELERATOR for the CPU through torch alone, which is not a plugin
PLAIN = "plain"
BLOCK_VARIABLE = "DS_PLUGINS_BLOCK"
AUTOLOAD_VARIABLE = "DS_PLUGINS_AUTOLOAD"
NAMES_VARIABLE = "DS_PLUGINS"

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
_CLAUSE = re.compile(r"\s*(>=|<=|>|<|==)\s*(\d+)(?:\.(\d+))?\s*")


def named() -> list[str]:
    """Return the sorted names in `DS_PLUGINS`. A named plugin that is missing or broken is an error."""
    return sorted(_listed(NAMES_VARIABLE))


def blocked() -> set[str]:
    """Return the names in `DS_PLUGINS_BLOCK`."""
    return _listed(BLOCK_VARIABLE)


def refusal(name: str, is_accelerator: bool, is_registered: bool = False) -> str | None:
    """Return why the environment excludes the plugin `name`, or None.

    Args:
        is_accelerator: the plugin is an accelerator, which `DS_ACCELERATOR` may name. With the value "plain", which is
            torch alone, it excludes all of them, also one whose kernels would serve host memory.
        is_registered: the program registered the plugin itself, so `DS_PLUGINS_AUTOLOAD` does not apply.

    Raises:
        PluginError: `DS_PLUGINS_AUTOLOAD` is neither 0 nor 1.
    """
    if name in blocked():
        return f"blocked by {BLOCK_VARIABLE}; take it out to use it"
    if is_accelerator and os.environ.get(ACCELERATOR_VARIABLE, "").strip() == PLAIN:
        return f"not loaded because of {ACCELERATOR_VARIABLE}={PLAIN}; unset it to use this one"
    if is_registered or _autoloads() or name in _listed(NAMES_VARIABLE):
        return None
    if is_accelerator and name == os.environ.get(ACCELERATOR_VARIABLE, "").strip():
        return None
    variable = ACCELERATOR_VARIABLE if is_accelerator else NAMES_VARIABLE
    return f"not loaded because of {AUTOLOAD_VARIABLE}=0; {variable}={name} loads it"


def check_api(plugin: object, label: str) -> None:
    """Refuse a plugin that requires another version of the plugin API. Called before any of the plugin's hooks.

    Args:
        plugin: may have `DS_PLUGIN_API`, a version range such as ">=1,<2". Without it, any version is accepted.
        label: the plugin's name for the error message.

    Raises:
        PluginError: the range does not include this core's version, or is not a version range.
    """
    stated = getattr(plugin, "DS_PLUGIN_API", None)
    if stated is None or _fits_plainly(stated):
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # late: this import costs more than all probes

    try:
        wanted = SpecifierSet(stated)
    except (InvalidSpecifier, TypeError, AttributeError) as error:
        message = f"{label} states DS_PLUGIN_API = {stated!r}; a version range such as '>=1,<2' is expected"
        raise PluginError(message) from error
    if hookspecs.PLUGIN_API not in wanted:
        major = hookspecs.PLUGIN_API.partition(".")[0]
        raise PluginError(
            f"{label} was made for plugin API {stated!r}, and this ds-core speaks {hookspecs.PLUGIN_API} (for plugins "
            f"made for '>={major},<={hookspecs.PLUGIN_API}'); {_remedy(wanted)}"
        )


def _fits_plainly(stated: object) -> bool:
    """Return True if `stated` is simple comparisons that this core's version meets. If False, ask `packaging`."""
    clauses = [_CLAUSE.fullmatch(clause) for clause in stated.split(",")] if isinstance(stated, str) else []
    spoken = tuple(map(int, hookspecs.PLUGIN_API.split(".")))
    return bool(clauses) and all(
        clause is not None and _COMPARE[clause[1]](spoken, (int(clause[2]), int(clause[3] or 0))) for clause in clauses
    )


def _remedy(wanted: Any) -> str:
    """Return what to install: the versions in the range show whether the core or the plugin is older."""
    from packaging.version import Version

    spoken = Version(hookspecs.PLUGIN_API)
    mentioned = [Version(each.version.removesuffix(".*")) for each in wanted if each.operator != "==="]
    if not mentioned:
        return "install versions of the two that fit"
    if min(mentioned) > spoken:
        return f"this ds-core is too old for it: {pip_install('ds-core')} --upgrade"
    if max(mentioned) <= spoken:
        return "the plugin is too old: upgrade its package, or install an older ds-core"
    return "install versions of the two that fit"


def _autoloads() -> bool:
    value = os.environ.get(AUTOLOAD_VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise PluginError(f"{stated(AUTOLOAD_VARIABLE)}: 0 (load only plugins that are named) or 1 is expected")
    return value != "0"


def _listed(variable: str) -> set[str]:
    return {name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()}


ACCELERATORS = "deepspeed.accelerators"
FEATURES = "deepspeed.plugins"

KINDS = {ACCELERATORS: "accelerator", FEATURES: "plugin"}


def read_entry_points(group: str) -> list[Any]:
    """Return the entry points of `group`, sorted by name, without importing a plugin. Called once per group."""
    return sorted(importlib_metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def distribution_of(entry: Any) -> str:
    """Return name and version of the package that declares `entry`, for messages."""
    dist = getattr(entry, "dist", None)
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "an unnamed distribution"


def import_plugin(name: str, group: str, announced: list[Any], seconds: float, lock: object) -> object:
    """Import the plugin `name` from the entry points `announced` of `group`. Called once per plugin.

    Args:
        seconds: the time limit. The import runs in its own thread, unless the caller is already inside the import of
            the same package.
        lock: the manager's lock, which the caller holds. A feature plugin may use the manager during its import.

    Raises:
        PluginError: no entry point or several have the name, or the import failed.
    """
    entries = {entry.value: entry for entry in announced if entry.name == name}
    if not entries:
        raise PluginError(_missing(name, group, sorted({entry.name for entry in announced})))
    if len(entries) > 1:
        where = ", ".join(f"{entry.value} ({distribution_of(entry)})" for entry in entries.values())
        raise PluginError(
            f"{KINDS[group]} {name!r} is announced by {counted(len(entries), 'package')}: {where}; keep one"
        )
    (entry,) = entries.values()
    try:
        if is_being_imported(entry.value):
            return entry.load()
        if group == ACCELERATORS:
            return call_with_limit(entry.load, seconds, f"import of {name}")
        return call_with_limit(entry.load, seconds, f"import of {name}", IMPORT_TIMEOUT_VARIABLE, lock)
    except (Exception, SystemExit) as error:  # some packages end the process when their driver is missing
        label = f"{KINDS[group]} {name!r} of {distribution_of(entry)}"
        raise PluginError(f"{label} cannot be imported from {entry.value}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return type and text of a plugin's exception in one line, for a message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _missing(name: str, group: str, installed: list[str]) -> str:
    """Return the error message for a name that no installed package declares."""
    found = f"no {KINDS[group]} named {shown(name)} is installed; installed: {', '.join(installed) or 'none'}; "
    to_install = _own_extensions() if group == ACCELERATORS else {}
    if name in to_install:
        return f"{found}{pip_install(to_install[name])}"
    names = [*installed, *to_install, *([PLAIN] if group == ACCELERATORS else [])]
    lowered = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    hint = ""
    if close:
        meant = lowered[close[0]]
        remedy = f" ({pip_install(to_install[meant])})" if meant in to_install and meant not in installed else ""
        hint = f"did you mean {meant!r}{remedy}? Otherwise: "
    return (
        f"{found}{hint}install the package that announces it (entry-point group {group!r}; this project calls its own "
        "ds-ext-<device>)"
    )


def _own_extensions() -> dict[str, str]:
    """Return device name -> its distribution, from the extras of ds-core; empty if ds-core is not installed.

    The metadata is the only place in the core that names devices.
    """
    try:
        required = importlib_metadata.requires("ds-core") or []
    except importlib_metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"ds-ext-(\w+)", requirement) for requirement in required]
    return {match[1]: match[0] for match in matches if match}
