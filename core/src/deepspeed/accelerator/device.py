"""DeviceMixin: device selection and synchronization behavior. RngMixin: random number generators.

StreamMixin: streams, events and captured graphs. DtypeMixin: the dtypes that the device supports, and the tensor
constructors that old scripts use.

TorchModule is the base of all mixins. It looks up a function in torch's module for the device, `torch.xyz`. If that
module lacks the name and the device is torch's current accelerator, TorchModule uses `torch.accelerator`, which has the
same functions under generic names.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from deepspeed.errors import PluginError, StateError

TensorMaker = Callable[..., torch.Tensor]
# Name in a device module -> its different name in `torch.accelerator`.
_GENERIC_NAMES = {
    "current_device": "current_device_index",
    "device": "device_index",
    "mem_get_info": "get_memory_info",
    "set_device": "set_device_index",
}


class TorchModule:
    """Looks up functions in torch's module for the device. If torch lacks one, the error says what to override."""

    _name: str = ""
    _communication_backend_name: str = ""
    _compile_backend: str = "inductor"

    def _module(self) -> ModuleType:
        """Return torch's module for the device, for example `torch.cpu`.

        Raises:
            PluginError: `_name` is not set, or torch has no such module (the vendor's package was not imported).
        """
        if not self._name:
            raise PluginError(f"{type(self).__name__} has no `_name`; set it to the device type of torch")
        try:
            return torch.get_device_module(self._name)
        except RuntimeError as error:
            raise PluginError(
                f"{type(self).__name__}: torch {torch.__version__} has no module torch.{self._name}; "
                "import the vendor's package that registers it before the accelerator is built"
            ) from error

    def _has(self, name: str) -> bool:
        return self._find(name) is not None

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `torch.<device>.<name>`, or the equivalent function of `torch.accelerator`.

        Raises:
            NotImplementedError: torch has no such function.
        """
        return self._attribute(name)(*args, **kwargs)

    def _attribute(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise NotImplementedError(
                f"{type(self).__name__}: neither torch.{self._name} nor torch.accelerator of torch {torch.__version__} "
                f"has {name!r} for this device; the accelerator must override the method that needs it"
            )
        return found

    def _find(self, name: str) -> Any:
        """Return torch's attribute `name` for the device, or None."""
        found = getattr(self._module(), name, None)
        if found is None and self._is_torchs_accelerator():
            if name in ("Stream", "Event"):
                return getattr(torch, name)  # without a device argument, torch's accelerator is the default
            found = getattr(torch.accelerator, _GENERIC_NAMES.get(name, name), None)
        return found

    def _is_torchs_accelerator(self) -> bool:
        """Return whether this device is torch's current accelerator."""
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self._name


# Open profiler ranges, innermost last. Thread-local, because one thread must open and close a range.
_open_ranges = threading.local()


class DeviceMixin(TorchModule):
    """Device selection and synchronization behavior."""

    # ----- synchronization behavior that the core relies on ----------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Return True when every op completes before its call returns, as on a CPU. Streams and events then do nothing.

        The engine calls this when it is built. Default False: the device executes ops asynchronously.
        """
        return False

    def use_host_timers(self) -> bool:
        """Return True when timers must read the host's clock, False when they must record device events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Return True when the device orders uses of a tensor across streams itself, so `wait_stream` is not needed."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Return True when the device itself delays work that does not fit its memory.

        If False, the host waits to limit the number of buffers in flight. ZeRO asks when it offloads gradients.
        """
        return self.is_synchronized_device()

    # ----- which device ----------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """Return torch's name of the device: `"xyz"` without an index, `"xyz:1"` with one.

        Without an index this is the device *type*; use `current_device_name` to place a tensor.
        """
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context in which `device_index` is the current device; None keeps the current device."""
        index = self.current_device() if device_index is None else device_index
        context: AbstractContextManager[Any] = self._ask("device", index)
        return context

    def set_device(self, device_index: int) -> None:
        """Make `device_index` the current device of this process. `deepspeed.initialize` and scripts call it.

        `initialize` passes `LOCAL_RANK`, or 0 if this process sees one device. A negative index changes nothing, as in
        torch: -1 is a common default of `--local_rank` in scripts that run without a launcher.
        """
        if not (isinstance(device_index, int) and device_index < 0):
            self._ask("set_device", device_index)

    def current_device(self) -> int:
        """Return the index of the current device. Initializes the device if necessary."""
        return int(self._ask("current_device"))

    def current_device_name(self) -> str:
        """Return the current device with its index, for `device=` arguments: `"xyz:0"`."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices that this process can use; 0 when there is none. Creates no device context."""
        return int(self._ask("device_count"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Block the host until all work queued on the device is done; None means the current device."""
        if device_index is None:
            self._ask("synchronize")
        else:
            self._ask("synchronize", device_index)

    def is_available(self) -> bool:
        """Return True when at least one device can be used. Creates no device context."""
        return bool(self._ask("is_available"))

    # ----- communication ---------------------------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """Return the torch.distributed backend of this device. `init_distributed` uses it if the user names none.

        Raises:
            PluginError: the class does not set `_communication_backend_name`.
        """
        if not self._communication_backend_name:
            raise PluginError(
                f"{type(self).__name__} has no `_communication_backend_name`; set it to a torch.distributed backend"
            )
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """Return the version of the communication backend for reports: a tuple, a string, or None if unknown."""
        return None

    # ----- profiler --------------------------------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named profiler range. Ranges nest. Default: a `torch.profiler.record_function` range.

        Args:
            domain, category: groups for profilers that support them; the default ignores both.
        """
        ranges = _open_ranges.__dict__.setdefault("stack", [])
        ranges.append(torch.profiler.record_function(msg))
        ranges[-1].__enter__()

    def range_pop(self, domain: str | None = None) -> None:
        """Close the innermost range of this thread. Does nothing when no range is open.

        Ranges are hints: a hook may run on a different thread from the one that opened the range, and must not fail.
        """
        ranges = _open_ranges.__dict__.get("stack")
        if ranges:
            ranges.pop().__exit__(None, None, None)

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` now if the device is initialized, else when it becomes so. Never initializes the device."""
        if self._has("_lazy_call"):
            self._ask("_lazy_call", callback)
        else:
            callback()


class RngMixin(TorchModule):
    """Random number generators. A state is an opaque `torch.uint8` CPU tensor for `set_rng_state`."""

    def random(self) -> ModuleType:
        """Return the `torch.random` module: the host's generator and `fork_rng`."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator of `device_index` (default: the current device) to a state from `get_rng_state`."""
        if device_index is None:
            self._ask("set_rng_state", new_state)
        else:
            self._ask("set_rng_state", new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return a copy of the generator state of `device_index` (default: the current device)."""
        state: torch.Tensor
        if device_index is None:
            state = self._ask("get_rng_state")
        else:
            state = self._ask("get_rng_state", device_index)
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._ask("manual_seed", seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices with `seed`."""
        self._ask("manual_seed_all", seed)

    def initial_seed(self) -> int:
        """Return the seed that the current device's generator last received."""
        return int(self._ask("initial_seed"))

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of ops on `device_index`."""
        generator: torch.Generator = self._attribute("default_generators")[device_index]
        return generator


class StreamMixin(TorchModule):
    """Streams, events and graphs. On a synchronized device they exist and do nothing."""

    # ----- streams and events ----------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class: `get_accelerator().Stream()` creates a stream on the current device."""
        return self._attribute("Stream")

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on `stream`; None keeps the current stream.

        Default: `torch.xyz.stream(stream)`, else the stream itself if it is a context manager, as `torch.Stream` is.
        """
        if stream is None:
            return nullcontext()
        if not self._has("stream") and hasattr(stream, "__enter__"):
            own_context: AbstractContextManager[Any] = stream
            return own_context
        context: AbstractContextManager[Any] = self._ask("stream", stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream of `device_index` (default: the current device)."""
        return self._ask("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream of `device_index` (default: the current device)."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:
        """The event class. Pass `enable_timing=True` to use `elapsed_time` (milliseconds)."""
        return self._attribute("Event")

    def is_current_stream_capturing(self) -> bool:
        """Return True while the current stream is captured into a graph. Default: torch's answer, else False."""
        return bool(self._ask("is_current_stream_capturing")) if self._has("is_current_stream_capturing") else False

    # ----- graphs ----------------------------------------------------------------------------------------------------

    def is_graph_supported(self) -> bool:
        """Return True when work can be captured and replayed, as inference may do. Default: `create_graph` works."""
        return self.create_graph() is not None

    def create_graph(self) -> Any:
        """Return an empty graph, or None when this device cannot capture graphs and the work must run eagerly.

        torch names the class after the device, in capitals: `torch.xyz.XYZGraph`.
        """
        graph_class = getattr(self._module(), f"{self._name.upper()}Graph", None)
        return graph_class() if graph_class is not None else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Return a context that captures work into `graph`. With `graph=None` the work runs eagerly.

        Args:
            graph: a graph from `create_graph`.
            pool: a device-specific memory pool that is shared with another graph.
            stream: the stream to capture on; default: torch's capture stream.
        """
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._ask("graph", graph, pool=pool, stream=stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Run the captured work again, on the same memory.

        On a device that cannot capture graphs, `graph` is None and nothing happens, because `capture_to_graph(None)`
        ran the work eagerly.

        Raises:
            StateError: `graph` is None although this device can capture graphs.
        """
        if graph is not None:
            graph.replay()
        elif self.is_graph_supported():
            raise StateError(
                f"replay_graph got None, and {self._name!r} records graphs; pass the graph that create_graph() gave"
            )


class DtypeMixin(TorchModule):
    """Supported dtypes, and tensor constructors."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes for training. The engine refuses other dtypes when it is built."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def prepare_dtype(self, dtype: torch.dtype) -> None:
        """Prepare the device to compute in `dtype`, one of `supported_dtypes`.

        `deepspeed.initialize` and `init_inference` call it with the configured dtype before they build each engine. If
        torch is slow in this dtype on the device, the accelerator may load its own kernels here. Default: nothing.
        """

    def is_bf16_supported(self) -> bool:
        """Return True when the device supports bfloat16 arithmetic. Default: torch's answer, else True."""
        return bool(self._ask("is_bf16_supported")) if self._has("is_bf16_supported") else True

    def is_fp16_supported(self) -> bool:
        """Return True when the device supports float16 arithmetic. Default: torch's answer, else True."""
        return bool(self._ask("is_fp16_supported")) if self._has("is_fp16_supported") else True

    def is_fp64_supported(self) -> bool:
        """Return True when torch computes in float64 on this device. Default True."""
        return True

    def is_grouped_mm_supported(self) -> bool:
        """Return True when torch's grouped matrix product (one matrix per group of rows) runs on this device.

        Expert layers fall back to one product per expert without it. Default: torch has `_grouped_mm` (2.8 or later).
        """
        return _torch_has_grouped_mm()

    def prefer_triton_grouped_mm(self) -> bool:
        """Return True when Triton's grouped matrix products are faster than torch's. Default False."""
        return False

    def is_triton_supported(self) -> bool:
        """Return True when Triton has a back end for this device. Default False."""
        return False

    def amp(self) -> Any:
        """Return torch's module `torch.xyz.amp`, or None. `torch.autocast` does not need it."""
        return getattr(self._module(), "amp", None)

    # ----- constructors of old scripts: get_accelerator().FloatTensor([1.0, 2.0]) ------------------------------------

    @property
    def BFloat16Tensor(self) -> TensorMaker:
        """Makes a `torch.bfloat16` tensor of the given values on the current device."""
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> TensorMaker:
        """Makes a `torch.uint8` tensor of the given values on the current device."""
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> TensorMaker:
        """Makes a `torch.float64` tensor of the given values on the current device."""
        return self._maker(torch.float64)

    @property
    def FloatTensor(self) -> TensorMaker:
        """Makes a `torch.float32` tensor of the given values on the current device."""
        return self._maker(torch.float32)

    @property
    def HalfTensor(self) -> TensorMaker:
        """Makes a `torch.float16` tensor of the given values on the current device."""
        return self._maker(torch.float16)

    @property
    def IntTensor(self) -> TensorMaker:
        """Makes a `torch.int32` tensor of the given values on the current device."""
        return self._maker(torch.int32)

    @property
    def LongTensor(self) -> TensorMaker:
        """Makes a `torch.int64` tensor of the given values on the current device."""
        return self._maker(torch.int64)

    def _maker(self, dtype: torch.dtype) -> TensorMaker:
        # `torch.device(name)` without an index means the current device, and creating it initializes nothing.
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)


@functools.cache  # called for each product of each layer
def _torch_has_grouped_mm() -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return hasattr(torch, "_grouped_mm") and bool(has("aten::_grouped_mm", "CompositeExplicitAutograd"))
