"""The entry points of installed plugins, and which of them may be loaded: the environment and the API version decide.

    DS_PLUGINS_BLOCK=a,b     these are never imported, whoever asks for them
    DS_PLUGINS_AUTOLOAD=0    nothing is imported because it is installed: only the plugins that DS_ACCELERATOR and
                             DS_PLUGINS=a,b name, and what the program registers itself

Asked by `manager.py` before each import, so the variables count at that moment. Entry points are read with
`importlib_metadata`: one has `name`, `value` (the module), `dist` (the distribution, or None) and `load()`.
"""

import difflib
import operator
import os
import re
from typing import Any

import importlib_metadata

from deepspeed._installation import pip_install
from deepspeed.errors import PluginError, counted, shown, stated
from deepspeed.plugins import hookspecs
from deepspeed.plugins.probing import IMPORT_TIMEOUT_VARIABLE, call_with_limit, is_being_imported

ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
#: what DS_ACCELERATOR calls the CPU by torch alone, which is no plugin
PLAIN = "plain"
BLOCK_VARIABLE = "DS_PLUGINS_BLOCK"
AUTOLOAD_VARIABLE = "DS_PLUGINS_AUTOLOAD"
NAMES_VARIABLE = "DS_PLUGINS"

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
_CLAUSE = re.compile(r"\s*(>=|<=|>|<|==)\s*(\d+)(?:\.(\d+))?\s*")


def named() -> list[str]:
    """The plugins that `DS_PLUGINS` asks for by name, sorted: that one is missing or broken is an error then."""
    return sorted(_listed(NAMES_VARIABLE))


def blocked() -> set[str]:
    """The names in `DS_PLUGINS_BLOCK`."""
    return _listed(BLOCK_VARIABLE)


def refusal(name: str, is_accelerator: bool, is_registered: bool = False) -> str | None:
    """Return why the environment keeps the plugin `name` from being loaded, or None.

    Args:
        is_accelerator: `DS_ACCELERATOR` may have named it.
        is_registered: the program added it itself; that it is not loaded automatically says nothing then.

    Raises:
        PluginError: `DS_PLUGINS_AUTOLOAD` is neither 0 nor 1.
    """
    if name in blocked():
        return f"blocked by {BLOCK_VARIABLE}; take it out to use it"
    if is_registered or _autoloads() or name in _listed(NAMES_VARIABLE):
        return None
    if is_accelerator and name == os.environ.get(ACCELERATOR_VARIABLE, "").strip():
        return None
    variable = ACCELERATOR_VARIABLE if is_accelerator else NAMES_VARIABLE
    return f"not loaded because of {AUTOLOAD_VARIABLE}=0; {variable}={name} loads it"


def check_api(plugin: object, label: str) -> None:
    """Refuse a plugin that was made for other versions of the plugin API. Called before any hook of it is.

    Args:
        plugin: may state `DS_PLUGIN_API`, a version range such as ">=1,<2"; without it any version will do.
        label: the plugin, for the message.

    Raises:
        PluginError: the range leaves out the version that this core speaks, or is no range.
    """
    stated = getattr(plugin, "DS_PLUGIN_API", None)
    if stated is None or _fits_plainly(stated):
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # late: it costs more than all probes together

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
    """Whether `stated` is a range of plain comparisons, such as ">=1,<2", that holds our version; else look closer."""
    clauses = [_CLAUSE.fullmatch(clause) for clause in stated.split(",")] if isinstance(stated, str) else []
    spoken = tuple(map(int, hookspecs.PLUGIN_API.split(".")))
    return bool(clauses) and all(
        clause is not None and _COMPARE[clause[1]](spoken, (int(clause[2]), int(clause[3] or 0))) for clause in clauses
    )


def _remedy(wanted: Any) -> str:
    """Say which of the two is older, by the versions that the range mentions, and what to install."""
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
    """The entry points of `group` in this environment, by name; no plugin is imported. Called once per group."""
    return sorted(importlib_metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def distribution_of(entry: Any) -> str:
    """Name and version of the package that announces `entry`, for messages."""
    dist = getattr(entry, "dist", None)
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "an unnamed distribution"


def import_plugin(name: str, group: str, announced: list[Any], seconds: float, lock: object) -> object:
    """The plugin called `name` among the entry points `announced` in `group`. Called once per plugin.

    Args:
        seconds: a limit on the import, which runs in a thread of its own, unless the caller is inside the import of
            that package.
        lock: the manager's, which the caller holds: a feature plugin may use the manager while it is imported.

    Raises:
        PluginError: none has the name, or several, or the import failed.
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
    """Type and text of what a plugin raised, for a message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _missing(name: str, group: str, installed: list[str]) -> str:
    """The message for a name that no installed package announces."""
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
    """Device name -> the distribution that brings it, from the extras of ds-core; empty when ds-core is not installed.

    Only its metadata names devices: no module of the core does.
    """
    try:
        required = importlib_metadata.requires("ds-core") or []
    except importlib_metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"ds-ext-(\w+)", requirement) for requirement in required]
    return {match[1]: match[0] for match in matches if match}
