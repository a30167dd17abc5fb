"""Who implements an op for the current accelerator: one frozen record for each place that may have a builder of it.

    current accelerator  ->  host extension  ->  feature plugins

Called by `registry.py`, which chooses. The places are read at each call: nothing is bound to the accelerator that came
first, and no plugin is loaded before its builders are needed. May import `accelerator` and below, not `op_builder`.
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

#: the entry point whose extension has the ops that compute in host memory, for every device
HOST = "cpu"
_ON_HOST = {op.builder for op in OPS.values() if op.on_host}


@dataclass(frozen=True)
class Implementation:
    """`Implementation` says which class one place has under a builder's name, or why it has none.

    Attributes:
        where: the place, for messages: `"accelerator 'xyz' (XYZ_Accelerator)"`.
        source: its kind.
        builder_class: the class; None: the place has none.
        reason: why there is none; "" when there is.
        failed: the place could not be read (its package cannot be imported, for example), so that it is unknown
            whether it has one.
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
    """The record of every place for the builder called `class_name`, the preferred first, each class once."""
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
    """Builder name -> class, of those that the current accelerator itself has. For the conformance suite."""
    records = {name: next(implementations(name)) for name in builder_names()}
    return {name: record.builder_class for name, record in records.items() if record.builder_class is not None}


def builder_names() -> list[str]:
    """Every builder name that is documented, or implemented for the current accelerator, sorted."""
    names = {op.builder for op in OPS.values()}
    for place in _places(get_accelerator()):
        try:
            names.update(place.names())
        except Exception:  # noqa: BLE001, S112 - its reason is in each `Implementation`
            continue
    return sorted(names)


def is_host(accelerator: DeepSpeedAccelerator) -> bool:
    """Whether the memory of `accelerator` is the host's, so that host kernels serve its tensors too."""
    return accelerator._name == "cpu"


def lacks_host_extension(accelerator: DeepSpeedAccelerator) -> bool:
    """Whether ops in host memory run without kernels because the host extension is not installed beside a device's."""
    return not is_host(accelerator) and HOST not in plugin_manager().names()


# ----- a vendor's class, whatever it raises --------------------------------------------------------------------------


def construct(builder_class: Any, *args: Any, **kwargs: Any) -> tuple[Any | None, str | None]:
    """(an instance, None), or (None, why there is none)."""
    try:
        return builder_class(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001
        return None, f"{getattr(builder_class, '__name__', builder_class)}() failed: {describe_error(error)}"


def incompatible(builder: Any) -> str | None:
    """Return why `builder` cannot serve this machine, in one line; None when it can. Nothing is compiled."""
    try:
        if call_quietly(builder.is_compatible):
            return None
    except Exception as error:  # noqa: BLE001
        return f"is_compatible failed: {describe_error(error)}"
    reason = getattr(builder, "reason", None) or getattr(builder, "error_log", None)  # the second: DeepSpeed's name
    return f"not compatible: {reason or 'its builder gives no reason'}"


def call_quietly(method: Any) -> Any:
    """`method(verbose=False)`, or `method()` for a builder written before that argument existed."""
    if "verbose" in inspect.signature(method).parameters:
        return method(verbose=False)
    return method()


def describe_error(error: BaseException) -> str:
    """The first line of what a vendor's code raised, with its type unless it is an error of ours."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, DeepSpeedError) or line == kind else f"{kind}: {line}"


# ----- the places ----------------------------------------------------------------------------------------------------


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
            # a class with a get_op_builder of its own may not know the hook beside it
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
    """Whether `found` is no builder, but an answer that leads nowhere.

    DeepSpeed's vendors answer an unknown name with a class whose `load()` fails; and one that answers from the core's
    own package gives a `BuilderName`, which would look here again.
    """
    if found is None:
        return False
    if getattr(found, "__module__", None) == "deepspeed.ops.op_builder":
        return True
    named = getattr(found, "__name__", class_name)
    return named != class_name and "NotImplemented" in named
