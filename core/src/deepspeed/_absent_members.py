"""Members of DeepSpeed's classes that a class here lacks: reading one raises an error with the reason.

    @absent_members("runtime.pipe.module:PipelineModule")
    class PipelineModule(nn.Module): ...

    module.partitions        AbsentMemberError, an AttributeError, with the reason of the table

`hasattr` is False for them. The table is `compatibility.differences`; existing members are found as before. May import
`errors` and `compatibility`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from deepspeed.compatibility import ENGINE_METHODS, differences
from deepspeed.errors import AbsentMemberError

_Class = TypeVar("_Class", bound=type)
_ENGINE = "runtime.engine:DeepSpeedEngine"


def absent_members(*addresses: str) -> Callable[[_Class], _Class]:
    """Make a class raise for the members that it lacks.

    Args:
        addresses: DeepSpeed's classes that the class replaces, below `deepspeed`, with the table's spelling.
    """

    def give(cls: _Class) -> _Class:
        said = {name: text for address in addresses for name, text in _sentences(address).items()}
        said = {name: text for name, text in said.items() if not hasattr(cls, name)}
        for name, text in said.items():
            setattr(cls, name, _Refusal(text))
        if hasattr(cls, "__getattr__"):  # Python calls it after an AttributeError and would raise its error
            cls.__getattr__ = _explaining(cls.__getattr__, said)  # type: ignore[attr-defined]
        return cls

    return give


class _Refusal:
    """`_Refusal` stands for an absent member of a class, and raises when the member is read from class or object.

    An object may be given an attribute of this name.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, owner: object, cls: type | None = None) -> NoReturn:
        raise AbsentMemberError(self._text)


def _explaining(former: Callable[[Any, str], Any], said: Mapping[str, str]) -> Callable[[Any, str], Any]:
    @functools.wraps(former)
    def get(self: Any, name: str) -> Any:
        try:
            return former(self, name)
        except AttributeError:
            if name in said:
                raise AbsentMemberError(said[name]) from None
            raise

    return get


def _sentences(address: str) -> dict[str, str]:
    """Return the error text for each absent member of DeepSpeed's class at `address`, by the member's name."""
    names, reason = differences().get(address, ((), ""))
    cls = address.rpartition(":")[2]
    said = {
        name: f"{name}: this member of DeepSpeed's {cls} is not in this version of ds-core. {reason}" for name in names
    }
    if address == _ENGINE:
        said |= {name: method.explain() for name, method in ENGINE_METHODS.items()}
    return said
