"""Who offers op builders for the accelerator in force: the accelerator, the host extension, the feature plugins.

Asked by `registry.py` for one name at a time, and late: nothing is bound at import. A provider that cannot be asked
raises, and the registry turns that into a reason: `OpUnavailable` where that is no fault, else it counts as broken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.current import plugin_of
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.names import BuilderName
from deepspeed.plugins import ACCELERATORS, FEATURES, plugin_manager
from deepspeed.plugins.entry_points import KINDS

Source = Literal["device", "host", "plugin", "reference"]

# The entry point whose extension carries the ops that compute in host memory, for every device.
HOST = "cpu"


@dataclass(frozen=True)
class Provider:
    """One place that may have a builder.

    Fields:
        where: for messages, for example "accelerator 'xyz' (XYZ_Accelerator)".
        source: its kind.
        find: builder name -> class, or None when it has no such builder.
        names: the builder names it has beyond the documented ones, for reports.
    """

    where: str
    source: Source
    find: Callable[[str], Any]
    names: Callable[[], Iterable[str]]


def providers(accelerator: DeepSpeedAccelerator) -> list[Provider]:
    """Those to ask for `accelerator`, in that order. Loads no plugin by itself."""
    found = [_device(accelerator)]
    if plugin_of(accelerator) != HOST:
        found.append(_plugin(HOST, f"host extension {HOST!r}", "host"))
    found.extend(_plugin(name, f"plugin {name!r}", "plugin", FEATURES) for name in plugin_manager().names(FEATURES))
    return found


def lacks_host_extension(accelerator: DeepSpeedAccelerator) -> bool:
    """Whether ops in host memory run without kernels because nobody installed them, beside a device with its own."""
    return not is_host(accelerator) and HOST not in plugin_manager().names()


def is_host(accelerator: DeepSpeedAccelerator) -> bool:
    """Whether the memory of `accelerator` is the host's, so that host kernels serve its tensors too."""
    return accelerator._name == "cpu"


def _device(accelerator: DeepSpeedAccelerator) -> Provider:
    plugin = plugin_of(accelerator)

    def find(class_name: str) -> Any:
        builder_class = accelerator.get_op_builder(class_name)
        if _is_placeholder(builder_class, class_name):
            builder_class = None
        if builder_class is None and plugin is not None:
            # a class with a get_op_builder of its own may know nothing of the hook beside it
            builder_class = plugin_manager().op_builders(plugin).get(class_name)
        return builder_class

    where = f"accelerator {accelerator._name!r} ({type(accelerator).__name__})"
    return Provider(where, "device", find, accelerator._builder_names)


def _plugin(name: str, where: str, source: Source, group: str | None = None) -> Provider:
    def builders() -> dict[str, type]:
        if source == "host" and name not in plugin_manager().names():
            raise OpUnavailable("not installed; pip install ds-ext-cpu")
        if reason := plugin_manager().refusal(name, group or ACCELERATORS):
            raise OpUnavailable(f"{KINDS[group or ACCELERATORS]} {name!r} is {reason}")
        return plugin_manager().op_builders(name) if group is None else plugin_manager().op_builders(name, group)

    return Provider(where, source, lambda class_name: builders().get(class_name), builders)


def _is_placeholder(builder_class: Any, asked: str) -> bool:
    """DeepSpeed's vendors answer an unknown name with a class whose `load()` fails: that is no builder."""
    if builder_class is None:
        return False
    if isinstance(builder_class, BuilderName):  # of the core's own package: it would ask us again
        return True
    named = getattr(builder_class, "__name__", asked)
    return named != asked and "NotImplemented" in named
