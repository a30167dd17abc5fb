"""Lists the builders of an op for the current accelerator: one frozen record for each source that may have a builder.

    current accelerator  ->  host extension  ->  feature plugins

`registry.py` calls this and chooses. Each call reads the sources again, so the result follows the current accelerator,
and a plugin is loaded only when its builders are needed. May import `accelerator` and below, not `op_builder`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed._installation import pip_install
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.current import plugin_of
from deepspeed.errors import DeepSpeedError, OpUnavailable, first_line
from deepspeed.ops.documented import OPS
from deepspeed.plugins import ACCELERATORS, FEATURES, plugin_manager
from deepspeed.plugins.admission import KINDS

Source = Literal["device", "host", "plugin", "reference"]

#: the entry point of the host extension, whose ops compute in host memory for every device
HOST = "cpu"
_ON_HOST = {op.builder for op in OPS.values() if op.on_host}


@dataclass(frozen=True)
class Implementation:
    """`Implementation` holds the builder class that one source has under a name, or the reason why it has none.

    Attributes:
        where: a description of the source for messages: `"accelerator 'xyz' (XYZ_Accelerator)"`.
        source: the kind of source.
        builder_class: the class, or None.
        reason: why `builder_class` is None; else "".
        failed: the source could not be read (for example, its package cannot be imported), so that it is unknown
            whether it has a builder.
    """

    where: str
    source: Source
    builder_class: Any | None
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True)
class _Place:
    where: str
    source: Source
    find: Callable[[str], Any]
    names: Callable[[], Iterable[str]]

    def look_up(self, class_name: str) -> Implementation:
        try:
            found = self.find(class_name)
        except OpUnavailable as error:  # the place is absent, or kept out by the environment
            return Implementation(self.where, self.source, None, describe_error(error))
        except Exception as error:  # noqa: BLE001 - a vendor's package, whatever it raises
            return Implementation(self.where, self.source, None, describe_error(error), failed=True)
        return Implementation(self.where, self.source, found, "" if found is not None else f"has no {class_name}")


def implementations(class_name: str) -> Iterator[Implementation]:
    """Yield the record of every source for the builder `class_name`, in order of preference, each class once."""
    accelerator = get_accelerator()
    seen: list[Any] = []
    for place in _places(accelerator):
        if place.source == "host" and class_name not in _ON_HOST and not is_host(accelerator):
            elsewhere = f"serves tensors in host memory, and these are on {accelerator._name!r}"
            yield Implementation(place.where, place.source, None, elsewhere)
            continue
        found = place.look_up(class_name)
        if found.builder_class is None or found.builder_class not in seen:  # CPU_Accelerator may be set by hand
            seen.append(found.builder_class)
            yield found


def implemented(class_name: str) -> list[Implementation]:
    """Return the records of `implementations` that have a class."""
    return [found for found in implementations(class_name) if found.builder_class is not None]


def own_builders() -> dict[str, Any]:
    """Return builder name -> class of the current accelerator's own builders. For the conformance suite."""
    records = {name: next(implementations(name)) for name in builder_names()}
    return {name: record.builder_class for name, record in records.items() if record.builder_class is not None}


def builder_names() -> list[str]:
    """Return the sorted names of all builders that are documented or implemented for the current accelerator."""
    names = {op.builder for op in OPS.values()}
    for place in _places(get_accelerator()):
        try:
            names.update(place.names())
        except Exception:  # noqa: BLE001, S112 - each `Implementation` holds the reason
            continue
    return sorted(names)


def is_host(accelerator: DeepSpeedAccelerator) -> bool:
    """Return whether `accelerator` computes in host memory, so that host kernels accept its tensors."""
    return accelerator._name == "cpu"


def lacks_host_extension(accelerator: DeepSpeedAccelerator) -> bool:
    """Return whether the accelerator is a device and the host extension, with the host-memory kernels, is missing."""
    return not is_host(accelerator) and HOST not in plugin_manager().names()


# ----- calls into a vendor's class, with any exception converted to a reason -----------------------------------------


def construct(builder_class: Any, *args: Any, **kwargs: Any) -> tuple[Any | None, str | None]:
    """Return (instance, None), or (None, reason)."""
    try:
        return builder_class(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001
        return None, f"{getattr(builder_class, '__name__', builder_class)}() failed: {describe_error(error)}"


def incompatible(builder: Any) -> str | None:
    """Return in one line why `builder` is not compatible with this machine, or None. Compiles nothing."""
    try:
        if call_quietly(builder.is_compatible):
            return None
    except Exception as error:  # noqa: BLE001
        return f"is_compatible failed: {describe_error(error)}"
    reason = getattr(builder, "reason", None) or getattr(builder, "error_log", None)  # DeepSpeed's name is error_log
    return f"not compatible: {reason or 'its builder gives no reason'}"


def call_quietly(method: Any) -> Any:
    """Call `method(verbose=False)`, or `method()` for a builder written before this argument existed."""
    if "verbose" in inspect.signature(method).parameters:
        return method(verbose=False)
    return method()


def describe_error(error: BaseException) -> str:
    """Return the first line of an exception's text, with its type unless the exception is a `DeepSpeedError`."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, DeepSpeedError) or line == kind else f"{kind}: {line}"


# ----- the sources ---------------------------------------------------------------------------------------------------


def _places(accelerator: DeepSpeedAccelerator) -> list[_Place]:
    found = [_device(accelerator)]
    if plugin_of(accelerator) != HOST:
        found.append(_plugin(HOST, f"host extension {HOST!r}", "host", ACCELERATORS))
    found.extend(_plugin(name, f"plugin {name!r}", "plugin", FEATURES) for name in plugin_manager().names(FEATURES))
    return found


def _device(accelerator: DeepSpeedAccelerator) -> _Place:
    plugin = plugin_of(accelerator)

    def find(class_name: str) -> Any:
        found = accelerator.get_op_builder(class_name)
        if _is_placeholder(found, class_name):
            found = None
        if found is None and plugin is not None:
            # an accelerator that overrides get_op_builder may not read the hook
            found = plugin_manager().op_builders(plugin).get(class_name)
        return found

    where = f"accelerator {accelerator._name!r} ({type(accelerator).__name__})"
    return _Place(where, "device", find, accelerator._builder_names)


def _plugin(name: str, where: str, source: Source, group: str) -> _Place:
    def builders() -> dict[str, type]:
        if source == "host" and name not in plugin_manager().names():
            raise OpUnavailable(f"not installed; {pip_install('ds-ext-cpu')}")
        if reason := plugin_manager().refusal(name, group):
            raise OpUnavailable(f"{KINDS[group]} {name!r} is {reason}")
        return plugin_manager().op_builders(name, group)

    return _Place(where, source, lambda class_name: builders().get(class_name), builders)


def _is_placeholder(found: Any, class_name: str) -> bool:
    """Return whether `found` is not a real builder.

    DeepSpeed's vendors return a class whose `load()` fails for an unknown name. A vendor that returns a name of the
    core's own package returns a `BuilderName`, which would search here again.
    """
    if found is None:
        return False
    if getattr(found, "__module__", None) == "deepspeed.ops.op_builder":
        return True
    named = getattr(found, "__name__", class_name)
    return named != class_name and "NotImplemented" in named
