"""A requirement is a capability that a test needs of the current accelerator, never the name of a device.

    from deepspeed.testing import requirements

    @requirements.streams
    def test_copies_overlap(accelerator): ...

Each requirement is a decorator. When the test runs, the decorator checks the capability, and skips the test with a
reason if it is missing. `unmet()` returns the same reason without a test, and `ALL` is the list in the conformance
report. A method that raises NotImplementedError is not supported; any other exception fails the test.

May import `accelerator` and below, and pytest to skip a test. `suite` and vendors' own tests use this module.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.current import explain
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import PluginError
from deepspeed.ops import registry
from deepspeed.plugins import plugin_manager

Test = TypeVar("Test", bound=Callable[..., Any])


class Requirement:
    """One capability.

    Args:
        name: name in the report.
        question: takes the accelerator; returns why it lacks the capability, or None. The reference page shows its
            docstring.
    """

    def __init__(self, name: str, question: Callable[[DeepSpeedAccelerator], str | None]) -> None:
        self.name = name
        self.asks = " ".join((question.__doc__ or "").split())
        self._question = question

    def unmet(self) -> str | None:
        """Return one line that says why the current accelerator lacks this capability; None if it has it."""
        try:
            return self._question(get_accelerator())
        except NotImplementedError as error:
            return f"not implemented: {' '.join(str(error).split())}"

    def check(self) -> None:
        """Skip the running test, with the reason, unless the requirement is met."""
        import pytest

        reason = self.unmet()
        if reason is not None:
            pytest.skip(f"{self.name}: {reason}")

    def __call__(self, test: Test) -> Test:
        """Wrap `test`, so that it is skipped unless the requirement is met."""

        @functools.wraps(test)
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return test(*args, **kwargs)

        asked.needs = (self.name, *needs_of(test))  # type: ignore[attr-defined]
        return asked  # type: ignore[return-value]


def needs_of(test: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the requirements of `test`, for the reference page."""
    return getattr(test, "needs", ())


def _own_memory(accelerator: DeepSpeedAccelerator) -> str | None:
    """`on_accelerator` is False for a tensor of the host."""
    if accelerator.on_accelerator(torch.empty(0)):
        return "on_accelerator() holds for a tensor of the host: the device works in host memory"
    return None


def _streams(accelerator: DeepSpeedAccelerator) -> str | None:
    """`is_synchronized_device` is False."""
    if accelerator.is_synchronized_device():
        return "is_synchronized_device() is True: an op is done when its call returns, so streams order nothing"
    return None


def _stream_class(accelerator: DeepSpeedAccelerator) -> str | None:
    """`Stream`, `Event` and `current_stream` answer; on a synchronized device they have nothing to do."""
    missing = [name for name in ("Stream", "Event") if getattr(accelerator, name) is None]
    accelerator.current_stream()
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} None" if missing else None


def _several_devices(accelerator: DeepSpeedAccelerator) -> str | None:
    """`device_count` is above 1, and `device_name(0)` is not `device_name(1)`."""
    if accelerator.device_name(0) == accelerator.device_name(1):
        return f"device_name(0) and device_name(1) are both {accelerator.device_name(0)!r}: torch knows one device"
    count = accelerator.device_count()
    return None if count > 1 else f"device_count() is {count}"


def _bf16(accelerator: DeepSpeedAccelerator) -> str | None:
    """`is_bf16_supported` is True."""
    return None if accelerator.is_bf16_supported() else "is_bf16_supported() is False"


def _fp16(accelerator: DeepSpeedAccelerator) -> str | None:
    """`is_fp16_supported` is True."""
    return None if accelerator.is_fp16_supported() else "is_fp16_supported() is False"


def _graphs(accelerator: DeepSpeedAccelerator) -> str | None:
    """`is_graph_supported` is True."""
    return None if accelerator.is_graph_supported() else "is_graph_supported() is False"


def _memory_figures(accelerator: DeepSpeedAccelerator) -> str | None:
    """`memory_allocated` and `memory_reserved` answer."""
    accelerator.memory_allocated()
    accelerator.memory_reserved()
    return None


def _peak_memory(accelerator: DeepSpeedAccelerator) -> str | None:
    """`max_memory_allocated`, `max_memory_reserved` and `reset_peak_memory_stats` answer."""
    accelerator.max_memory_allocated()
    accelerator.max_memory_reserved()
    accelerator.reset_peak_memory_stats()
    return None


def _memory_statistics(accelerator: DeepSpeedAccelerator) -> str | None:
    """`memory_stats` is not empty."""
    return None if accelerator.memory_stats() else "memory_stats() is empty"


def _own_generator(accelerator: DeepSpeedAccelerator) -> str | None:
    """`default_generator` of the current device is not the one of the host."""
    if accelerator.default_generator(accelerator.current_device()) is torch.default_generator:
        return "default_generator() is the host's"
    return None


def _device_variables(accelerator: DeepSpeedAccelerator) -> str | None:
    """`visible_devices_envs` is not empty."""
    return None if accelerator.visible_devices_envs() else "visible_devices_envs() is empty"


def _plugin(accelerator: DeepSpeedAccelerator) -> str | None:
    """It was made by a plugin, not by `set_accelerator`."""
    choice = explain()
    return None if choice.plugin is not None else f"the accelerator came from no plugin: {choice.why}"


def _counted_faults(accelerator: DeepSpeedAccelerator) -> str | None:
    """Its plugin has the hook `ds_device_faults`, and what that reads with is installed."""
    choice = explain()
    if choice.plugin is None or "ds_device_faults" not in plugin_manager().hooks_of(choice.plugin):
        return "its plugin does not count faults of a device (hook ds_device_faults)"
    try:
        plugin_manager().ask(choice.plugin, "ds_device_faults", index=torch.device(accelerator.device_name(0)).index)
    except PluginError as error:
        if isinstance(error.__cause__, ImportError):
            return str(error.__cause__)
    return None


def _library(accelerator: DeepSpeedAccelerator) -> str | None:
    """`communication_backend_name` answers."""
    try:
        accelerator.communication_backend_name()
    except PluginError:  # of the base, whose class states none
        return "it names no torch.distributed backend"
    return None


def _ranks(accelerator: DeepSpeedAccelerator) -> str | None:
    """Other processes can have it too (it was made by a plugin, or is the plain one), and a communication library."""
    return _own_process(accelerator) or _library(accelerator)


def _own_process(accelerator: DeepSpeedAccelerator) -> str | None:
    if explain().plugin is None and type(accelerator) is not PlainAccelerator:
        return "it was set by set_accelerator, which ranks cannot repeat; install its plugin and set DS_ACCELERATOR"
    return None


def _two_ranks(accelerator: DeepSpeedAccelerator) -> str | None:
    """Ranks, and a device for each of two, unless the device works in host memory."""
    unmet = _ranks(accelerator)
    if unmet is None and _own_memory(accelerator) is None and accelerator.device_count() < 2:
        return f"device_count() is {accelerator.device_count()}, and each rank needs a device of its own"
    return unmet


own_memory = Requirement("memory of its own", _own_memory)
streams = Requirement("streams", _streams)
stream_class = Requirement("classes of streams and events", _stream_class)
several_devices = Requirement("several devices", _several_devices)
bf16 = Requirement("bf16", _bf16)
fp16 = Requirement("fp16", _fp16)
graphs = Requirement("graphs", _graphs)
memory_figures = Requirement("memory figures", _memory_figures)
peak_memory = Requirement("peak memory", _peak_memory)
memory_statistics = Requirement("memory statistics", _memory_statistics)
own_generator = Requirement("a generator of its own", _own_generator)
device_variables = Requirement("variables of visible devices", _device_variables)
plugin = Requirement("an installed plugin", _plugin)
counted_faults = Requirement("counts of faults", _counted_faults)
library = Requirement("a communication library", _library)
ranks = Requirement("ranks", _ranks)
two_ranks = Requirement("two ranks", _two_ranks)

ALL = (
    *(own_memory, streams, stream_class, several_devices, bf16, fp16, graphs),
    *(memory_figures, peak_memory, memory_statistics, own_generator),
    *(device_variables, plugin, library, ranks, two_ranks),
)


def op(name: str) -> Requirement:
    """Return the requirement that `name`, an op of `deepspeed.ops.registry`, has a kernel here."""

    def question(accelerator: DeepSpeedAccelerator) -> str | None:
        return registry.resolve(name).why() if registry.kernel(name) is None else None

    return Requirement(f"a kernel for {name}", question)


def dtype(which: torch.dtype) -> Requirement:
    """Return the requirement that a model can be trained in `which`."""

    def question(accelerator: DeepSpeedAccelerator) -> str | None:
        return None if which in accelerator.supported_dtypes() else "not among supported_dtypes()"

    return Requirement(str(which).removeprefix("torch."), question)
