"""Check whether this version supports a config: refuse keys that would change the result, warn about other keys.

`engine/build.py` calls `DeepSpeedConfig.check_supported()` after parsing. It is a separate step, because zero.Init and
the command line tools parse configs that cannot be trained here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.config.base import Section, Support, declared, default_of, is_same
from deepspeed.config.read import cut, redacted
from deepspeed.config.training import OptimizerConfig, switched_on
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once


@dataclass(frozen=True)
class Objection:
    """One key that requests an unsupported feature."""

    where: str
    found: Any
    support: Support
    default: Any

    def sentence(self) -> str:
        """Return the message "key: found X, but ...; what to do"."""
        remedy = "" if ";" in self.support.note else f"; leave it at {shown(self.default)}"
        found = cut(shown(redacted(self.found, self.where)))
        return f"{self.where}: found {found}, but {self.support.note}{remedy}"


def check_supported(root: Section) -> None:
    """Warn once per ignored key; raise ConfigError if a key must not be ignored."""
    objected = list(objections(root))
    for objection in objected:
        if objection.support.action == "warned":
            found = cut(shown(redacted(objection.found, objection.where)))
            warn_once(f"{objection.where}: found {found}, ignored: {objection.support.note}")
    refusals = [objection for objection in objected if objection.support.action == "refused"]
    if refusals:
        others = ", ".join(objection.where for objection in refusals[1:])
        raise ConfigError(refusals[0].sentence() + (f" (not in this version either: {others})" if others else ""))


def objections(section: Section, path: str = "") -> Iterator[Objection]:
    """Yield every unsupported key under `section` that the user switched on, in the order of declaration."""
    for name, info in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        where = ".".join(filter(None, (path, info.alias or name)))
        support, _ = declared(info)
        if support.action in ("warned", "refused") and _asks(value, default_of(info), support):
            yield Objection(where, value, support, default_of(info))
        elif isinstance(value, Section):
            yield from objections(value, where)
    if isinstance(section, OptimizerConfig) and section.refusal():
        note = section.refusal() or ""
        yield Objection(f"{path}.type", section.type, Support("refused", note), None)


def _asks(value: Any, default: Any, support: Support) -> bool:
    if any(is_same(value, silent) for silent in (default, *support.off)):
        return False
    return switched_on(value) if isinstance(value, dict) else True


def shown(value: Any) -> str:
    """Format a value for messages: null, true and false as in JSON, other values by repr."""
    if value is None:
        return "null"
    return repr(value).lower() if isinstance(value, bool) else repr(value)
