"""PlainAccelerator: the null device. The CPU by torch alone, so that the core runs and tests with no extension at all.

`ds-ext-cpu` builds on it and adds what the machine can tell (sockets, communication library, kernels). Streams and
events of the host keep the shape of torch's, so that code written for a device runs unchanged: every op has finished
when its call returns. torch's CPU allocator keeps no count, so the process's resident set stands for "allocated": it
holds the tensors, and also the interpreter and the libraries. Control groups count: in a container the limit is the
container's.
"""

import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.device import TensorMaker
from deepspeed.accelerator.memory import aligned_copy, is_aligned
from deepspeed.errors import StateError, environment_int

_PROC = Path("/proc/self")
_CGROUP = Path("/sys/fs/cgroup")
# (limit, present use) of control groups version 2 and version 1, relative to _CGROUP
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resident_bytes() -> int:
    """Bytes of this process in physical memory now."""
    import psutil  # late: each rank and the launcher load this room before they ask for memory

    return int(psutil.Process().memory_info().rss)


def total_bytes() -> int:
    """Bytes of memory of the machine, or of the container when its limit is lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    cgroup = _cgroup_bytes()
    return total if cgroup is None else min(total, cgroup[0])


def available_bytes() -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    cgroup = _cgroup_bytes()
    return available if cgroup is None else min(available, max(0, cgroup[0] - cgroup[1]))


class PeakMemory:
    """The highest resident set of this process since the start or the last reset.

    Linux counts it (`VmHWM`) and can be reset (`/proc/self/clear_refs`). Elsewhere, or where the kernel
    forbids that, the peak after a reset is the highest figure seen by the calls made here since.
    """

    def __init__(self) -> None:
        self._seen: int | None = None  # None: the system's own counter is right

    def read(self) -> int:
        """The peak in bytes; never below `resident_bytes()`."""
        now = resident_bytes()
        if self._seen is None:
            return max(now, _system_peak_bytes())
        self._seen = max(self._seen, now)
        return self._seen

    def reset(self) -> None:
        """Reset to the present value."""
        self._seen = None if _reset_system_peak() else resident_bytes()


def _system_peak_bytes() -> int:
    try:
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no /proc: not Linux
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _reset_system_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text("5")  # man 5 proc: 5 resets VmHWM to the present resident set
    except OSError:
        return False
    return True


def _cgroup_bytes() -> tuple[int, int] | None:
    """(limit, use) of the control group, or None without a limit."""
    for limit_file, use_file in _CGROUP_FILES:
        try:
            limit = (_CGROUP / limit_file).read_text().strip()
            use = (_CGROUP / use_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and use.isdigit():  # "max" means no limit
            return int(limit), int(use)
    return None


_NS_PER_MS = 1_000_000


class HostStream:
    """A queue that is always empty. Takes and ignores a device stream's arguments; use it with `with` or `stream()`."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """True: nothing is queued."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: the other stream's work is done."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: what the event marks is done."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Record `event`, or a new one, now."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class HostEvent:
    """A moment on the host's clock. Takes and ignores a device event's arguments; always measures time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: what came before is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            StateError: one of the two was not recorded.
        """
        if self._recorded_ns is None or end_event._recorded_ns is None:
            which = "start" if self._recorded_ns is None else "end"
            raise StateError(f"elapsed_time: the {which} event was not recorded; call record() on both first")
        return (end_event._recorded_ns - self._recorded_ns) / _NS_PER_MS


_TENSOR_CLASSES: dict[torch.dtype, TensorMaker] = {
    torch.bfloat16: torch.BFloat16Tensor,
    torch.uint8: torch.ByteTensor,
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.float16: torch.HalfTensor,
    torch.int32: torch.IntTensor,
    torch.int64: torch.LongTensor,
}


class PlainAccelerator(DeepSpeedAccelerator):
    """The host as a device: one of it, its memory the process's, its ops done when they return.

    "Several devices" means several ranks on one machine: they share its memory, and `device_count` says how many ranks
    the launcher started (`LOCAL_SIZE` or `LOCAL_WORLD_SIZE`).
    """

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self._index: int | None = None
        self._peak = PeakMemory()
        self._stream = HostStream()

    # ----- device ----------------------------------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Always `"cpu"`: torch knows one host."""
        return self._name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context that changes nothing."""
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Remember `device_index` for `current_device`; a negative one changes nothing, as in torch."""
        if device_index >= 0:
            self._index = int(device_index)

    def current_device(self) -> int:
        """The index from `set_device`, else `LOCAL_RANK`, else 0."""
        return max(0, environment_int("LOCAL_RANK", 0, least=-1)) if self._index is None else self._index

    def current_device_name(self) -> str:
        return self._name

    def device_count(self) -> int:
        """Ranks that the launcher started on this machine, or, when it says nothing, `natural_device_count`."""
        for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            ranks = environment_int(variable, 0)
            if ranks > 0:
                return ranks
        return self.natural_device_count()

    def natural_device_count(self) -> int:
        """Ranks that this machine is cut for: 1 as long as nobody looks at its sockets."""
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    def is_available(self) -> bool:
        return True

    # ----- random numbers: there is one generator --------------------------------------------------------------------

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        # Not torch.manual_seed, which would seed, and remember to seed, every other device too.
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # ----- streams and events ----------------------------------------------------------------------------------------

    @property
    def Stream(self) -> type[HostStream]:
        return HostStream

    @property
    def Event(self) -> type[HostEvent]:
        return HostEvent

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context that changes nothing; any stream will do."""
        return nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> HostStream:
        """The one stream of the host."""
        return self._stream

    def default_stream(self, device_index: int | None = None) -> HostStream:
        """The one stream of the host."""
        return self._stream

    # ----- memory: the process's and the machine's -------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Nothing to give back: torch keeps no cache of host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """The resident set of this process in bytes, interpreter and libraries included."""
        return resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._peak.read()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return resident_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._peak.read()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak.reset()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, peak = resident_bytes(), self._peak.read()
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the machine, or of the container when its limit is lower."""
        return total_bytes()

    def available_memory(self, device_index: int | None = None) -> int:
        return available_bytes()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """`tensor` itself, which the host reaches as it is; a copy only where `align_bytes` asks for one."""
        tensor = tensor if match_shape else tensor.reshape(-1)
        if is_aligned(tensor, align_bytes):
            return tensor
        return aligned_copy(tensor, align_bytes, lambda numel: torch.empty(numel, dtype=torch.uint8))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True for every host tensor: no copy to this "device" needs page-locked memory."""
        return self.on_accelerator(tensor)

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    # ----- dtypes ----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """True: torch computes in bfloat16 on every CPU, faster where the CPU has instructions for it."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: torch computes in float16 on every CPU, though often slowly."""
        return True

    def _maker(self, dtype: torch.dtype) -> TensorMaker:
        """Return torch's class, such as `torch.FloatTensor`, which takes sizes too, and which `isinstance` accepts."""
        return _TENSOR_CLASSES[dtype]
