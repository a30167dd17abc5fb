"""DeviceMixin: which devices there are, which one is current, how they behave in time. RngMixin: their random numbers.

StreamMixin: queues of work on the device, marks in them, and recorded graphs of them. DtypeMixin: what the device
computes in, and the tensor constructors of old scripts.

TorchModule, the root of all mixins, is the way from an accelerator to what torch knows of its device. Two places are
asked: the device's own module, `torch.xyz`, and where that lacks a name `torch.accelerator`, which answers for the one
kind of device that this process has, whatever it is.
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
# What `torch.accelerator` calls differently than the modules of devices do.
_GENERIC_NAMES = {
    "current_device": "current_device_index",
    "device": "device_index",
    "mem_get_info": "get_memory_info",
    "set_device": "set_device_index",
}


class TorchModule:
    """Answers by torch; the error says what to override when torch has no answer."""

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
        """Call `torch.<device>.<name>`, or its like in `torch.accelerator`.

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
        """Return what torch has under `name`, or None."""
        found = getattr(self._module(), name, None)
        if found is None and self._is_torchs_accelerator():
            if name in ("Stream", "Event"):
                return getattr(torch, name)  # made without an argument they are of torch's accelerator
            found = getattr(torch.accelerator, _GENERIC_NAMES.get(name, name), None)
        return found

    def _is_torchs_accelerator(self) -> bool:
        """Whether `torch.accelerator` speaks of this device."""
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self._name


# Open profiler ranges, innermost last. Per thread, as a range is opened and closed by the same thread.
_open_ranges = threading.local()


class DeviceMixin(TorchModule):
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

        `initialize` gives the number that `LOCAL_RANK` says, or 0 where this process sees one device. A negative index
        changes nothing, as in torch: it is often the default of `--local_rank`, where no launcher gives it.
        """
        if not (isinstance(device_index, int) and device_index < 0):
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


class RngMixin(TorchModule):
    """Random numbers. A state is a `torch.uint8` CPU tensor, opaque but for `set_rng_state`."""

    def random(self) -> ModuleType:
        """The `torch.random` module: the host's generator and `fork_rng`."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator of `device_index` (default: the current device) to a state from `get_rng_state`."""
        if device_index is None:
            self._ask("set_rng_state", new_state)
        else:
            self._ask("set_rng_state", new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """A copy of the generator's state, of `device_index` or the current device."""
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
        """Seed the generators of all devices with the same number."""
        self._ask("manual_seed_all", seed)

    def initial_seed(self) -> int:
        """The number with which the current device's generator was last seeded."""
        return int(self._ask("initial_seed"))

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that ops on `device_index` draw from when none is given."""
        generator: torch.Generator = self._attribute("default_generators")[device_index]
        return generator


class StreamMixin(TorchModule):
    """Streams, events and graphs. On a synchronized device they exist and do nothing."""

    # ----- streams and events ----------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class: `get_accelerator().Stream()` makes one on the current device."""
        return self._attribute("Stream")

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is queued on `stream`; `None` leaves the current one.

        Default: `torch.xyz.stream`, else the stream itself, which then is a context as `torch.Stream` is.
        """
        if stream is None:
            return nullcontext()
        if not self._has("stream") and hasattr(stream, "__enter__"):
            own_context: AbstractContextManager[Any] = stream
            return own_context
        context: AbstractContextManager[Any] = self._ask("stream", stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on now, of `device_index` or the current device."""
        return self._ask("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on when nothing else was said."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:
        """The event class, made with `enable_timing=True` where `elapsed_time` (milliseconds) is wanted."""
        return self._attribute("Event")

    def is_current_stream_capturing(self) -> bool:
        """True while the current stream is recorded into a graph. Default: what torch says, where it can say it."""
        return bool(self._ask("is_current_stream_capturing")) if self._has("is_current_stream_capturing") else False

    # ----- graphs ----------------------------------------------------------------------------------------------------

    def is_graph_supported(self) -> bool:
        """True when work can be recorded and replayed, as inference may do. Default: `create_graph` makes one."""
        return self.create_graph() is not None

    def create_graph(self) -> Any:
        """An empty graph to capture into, or None when this device records no graphs: then run eagerly.

        torch calls the class after the device, in capitals: `torch.xyz.XYZGraph`.
        """
        graph_class = getattr(self._module(), f"{self._name.upper()}Graph", None)
        return graph_class() if graph_class is not None else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context that records work into `graph`; with `graph=None` the work simply runs.

        Args:
            graph: from `create_graph`.
            pool: memory pool shared with another graph, in the device's own terms.
            stream: the stream to capture on; default: one of torch's own.
        """
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._ask("graph", graph, pool=pool, stream=stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Run the recorded work again, on the same memory.

        With `graph=None`, from a device whose `create_graph` returns None, nothing happens: `capture_to_graph(None)`
        recorded nothing.

        Raises:
            StateError: `graph` is None, and this device records graphs.
        """
        if graph is not None:
            graph.replay()
        elif self.is_graph_supported():
            raise StateError(
                f"replay_graph got None, and {self._name!r} records graphs; pass the graph that create_graph() gave"
            )


class DtypeMixin(TorchModule):
    """Number formats."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating point types that a model can be trained in. Asked when the engine is built, to refuse others."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def prepare_dtype(self, dtype: torch.dtype) -> None:
        """Get ready to compute in `dtype`, which is one of `supported_dtypes`.

        `deepspeed.initialize` and `init_inference` call it for what the configuration asks for, before they build
        anything; again for each engine. A device on which torch computes slowly in it may load kernels of its own.
        Default: nothing.
        """

    def is_bf16_supported(self) -> bool:
        """True when bfloat16 arithmetic works. Default: what torch says of the device, else True."""
        return bool(self._ask("is_bf16_supported")) if self._has("is_bf16_supported") else True

    def is_fp16_supported(self) -> bool:
        """True when float16 arithmetic works. Default: what torch says of the device, else True."""
        return bool(self._ask("is_fp16_supported")) if self._has("is_fp16_supported") else True

    def is_fp64_supported(self) -> bool:
        """True when torch computes in float64 on this device."""
        return True

    def is_grouped_mm_supported(self) -> bool:
        """True when torch's product of groups of rows, each with its matrix, runs on this device. Layers of experts
        ask; without it they take one product per expert. Default: torch has it for every device, which it had not
        before 2.8.
        """
        return _torch_has_grouped_mm()

    def prefer_triton_grouped_mm(self) -> bool:
        """True when grouped matrix products are faster by Triton than by torch. Default False."""
        return False

    def is_triton_supported(self) -> bool:
        """True when Triton compiles for this device. Default False: a vendor who has a Triton back end says so."""
        return False

    def amp(self) -> Any:
        """Return torch's autocast module for the device (`torch.xyz.amp`), or None. `torch.autocast` needs none."""
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
        # `torch.device(name)` without an index is the current device, and asking for it initializes nothing.
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)


@functools.cache  # asked for each product of each layer
def _torch_has_grouped_mm() -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return hasattr(torch, "_grouped_mm") and bool(has("aten::_grouped_mm", "CompositeExplicitAutograd"))
