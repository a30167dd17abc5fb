"""An accelerator whose class does not derive from DeepSpeedAccelerator: it is wrapped in one that does.

The wrapper asks the object first, for methods, properties and private names such as `_compile_backend`; the base
answers what the object lacks. The object itself is left as it was.
"""

import inspect
from typing import Any

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from deepspeed.accelerator.building import builders_beside
from deepspeed.errors import PluginError

# What a class that does not derive from DeepSpeedAccelerator must answer itself; the base answers the rest.
_OWN_ANSWERS = ("device_name", "current_device_name", "device_count", "is_available", "communication_backend_name")
_MISSING = object()


def as_accelerator(candidate: Any) -> DeepSpeedAccelerator:
    """`candidate` itself, or its wrapper when its class does not derive from the base.

    Called for the argument of `set_accelerator` and for what a plugin's `ds_accelerator` returns.

    Raises:
        PluginError: it is a class, lacks the methods that every device answers, or has no `_name`.
    """
    kind = type(candidate)
    if isinstance(candidate, type):
        raise PluginError(f"an accelerator object is required, not the class; call it: {candidate.__name__}()")
    accelerator = candidate if isinstance(candidate, DeepSpeedAccelerator) else _wrap(candidate)
    if not accelerator._name:
        raise PluginError(f"{kind.__name__} has no `_name`; set it to the device type of torch, for example 'cpu'")
    return accelerator


class WrappedAccelerator(DeepSpeedAccelerator):
    """The base of all wrappers; each wrapped class gets a subclass with its name, made by `_wrap`.

    Names that the base does not know are looked up on the object, when they are asked.
    """

    _wrapped: Any

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped" or name.startswith("__"):  # a copy that is still empty
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def op_builder_dir(self) -> str:
        return builders_beside(type(self._wrapped))


class _Delegated:
    """A name that the wrapped object has: read from it, and written to it."""

    def __init__(self, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: WrappedAccelerator | None, owner: type) -> Any:
        return self if instance is None else getattr(instance._wrapped, self._attribute)

    def __set__(self, instance: WrappedAccelerator, value: Any) -> None:
        setattr(instance._wrapped, self._attribute, value)


def _wrap(candidate: Any) -> DeepSpeedAccelerator:
    kind = type(candidate)
    missing = [name for name in _OWN_ANSWERS if not _has(candidate, name)]
    if missing:
        raise PluginError(
            f"{candidate!r} ({kind.__name__}) is no accelerator: it lacks {', '.join(missing)}; "
            "derive its class from deepspeed.accelerator.DeepSpeedAccelerator"
        )
    known = [*documented_names(), "_communication_backend_name", "_compile_backend"]
    members: dict[str, Any] = {name: _Delegated(name) for name in known if _has(candidate, name)}
    # The vendor's names of class and module, so that logs and reports show them.
    members.update(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    wrapper_class = type(kind.__name__, (WrappedAccelerator,), members)
    accelerator: DeepSpeedAccelerator = wrapper_class(candidate)
    accelerator._name = getattr(candidate, "_name", None) or candidate.device_name()
    return accelerator


def _has(candidate: Any, name: str) -> bool:
    """Whether the object has the name. A property is not read: `Stream` may start the device."""
    return inspect.getattr_static(candidate, name, _MISSING) is not _MISSING
