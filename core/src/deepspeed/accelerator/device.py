"""DeviceFace: which devices there are, which one is current, how they behave in time."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed.accelerator.torch_module import TorchModule
from deepspeed.errors import PluginError

# Open profiler ranges, innermost last. Per thread, as a range is opened and closed by the same thread.
_open_ranges = threading.local()


class DeviceFace(TorchModule):
    """Identity, choice and behaviour of the device."""

    # ----- behaviour in time: what the core may rely on --------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """True when an op has finished when its call returns, as on a CPU; then streams and events mean nothing.

        Asked when the engine is built. Default False: the device works behind the host.
        """
        return False

    def use_host_timers(self) -> bool:
        """True when timers read the host's clock, False when they record device events. Asked by the timers."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """True when the device orders uses of a tensor across streams itself, so that no `wait_stream` is needed."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """True when the device itself holds back work that does not fit its memory.

        Otherwise the host waits, so that few buffers are in flight. Asked by ZeRO for gradients that go to the host.
        """
        return self.is_synchronized_device()

    # ----- which device ----------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """The device as torch writes it: `"xyz"` without an index, `"xyz:1"` with one.

        Without an index it is the device *type*; use `current_device_name` to place a tensor.
        """
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which `device_index` is the current device; `None` leaves the current one."""
        index = self.current_device() if device_index is None else device_index
        context: AbstractContextManager[Any] = self._ask("device", index)
        return context

    def set_device(self, device_index: int) -> None:
        """Make `device_index` current in this process. Called by `deepspeed.initialize`, and by scripts before it.

        `initialize` gives the number that `LOCAL_RANK` says, or 0 where this process sees one device.
        """
        self._ask("set_device", device_index)

    def current_device(self) -> int:
        """The index of the current device. Initializes the device when it was not yet used."""
        return int(self._ask("current_device"))

    def current_device_name(self) -> str:
        """The current device with its index, for `device=` arguments: `"xyz:0"`."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices that this process can use; 0 when there is none. Creates no device context."""
        return int(self._ask("device_count"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait on the host until everything queued on the device is done; `None` means the current device."""
        if device_index is None:
            self._ask("synchronize")
        else:
            self._ask("synchronize", device_index)

    def is_available(self) -> bool:
        """True when at least one device can be used. Creates no device context."""
        return bool(self._ask("is_available"))

    # ----- communication ---------------------------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """The torch.distributed backend for this device. Asked by `init_distributed` when the user names none.

        Raises:
            PluginError: the class does not state `_communication_backend_name`.
        """
        if not self._communication_backend_name:
            raise PluginError(
                f"{type(self).__name__} has no `_communication_backend_name`; set it to a torch.distributed backend"
            )
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """The version of that backend, a tuple or a string, or None when it has none of its own. For reports."""
        return None

    # ----- profiler --------------------------------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range that profilers show; nests. The default is a `torch.profiler` range.

        Args:
            domain, category: for profilers that group ranges; the default does not.
        """
        ranges = _open_ranges.__dict__.setdefault("stack", [])
        ranges.append(torch.profiler.record_function(msg))
        ranges[-1].__enter__()

    def range_pop(self, domain: str | None = None) -> None:
        """Close the innermost range of this thread; nothing happens when none is open.

        Ranges are hints: hooks may run on another thread than the one that opened the range, and must not fail there.
        """
        ranges = _open_ranges.__dict__.get("stack")
        if ranges:
            ranges.pop().__exit__(None, None, None)

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` once the device is initialized: now if it is, later otherwise. Never initializes it."""
        if self._has("_lazy_call"):
            self._ask("_lazy_call", callback)
        else:
            callback()
