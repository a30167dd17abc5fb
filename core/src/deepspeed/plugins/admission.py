"""The environment and a handshake on the API version decide which plugins may be loaded.

    DS_PLUGINS_BLOCK=a,b     these are never imported, whoever asks for them
    DS_PLUGINS_AUTOLOAD=0    nothing is imported because it is installed: only the plugins that DS_ACCELERATOR and
                             DS_PLUGINS=a,b name, and what the program registers itself

Asked by `manager.py` before each import, so the variables count at that moment.
"""

import operator
import os
import re
from typing import Any

from deepspeed._installation import pip_install
from deepspeed.errors import PluginError, stated
from deepspeed.plugins import hookspecs

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
