"""PlainAccelerator: the CPU through torch alone, so that the core runs and its tests pass without any extension.

`ds-ext-cpu` derives from it and adds sockets, a communication library and kernels. `HostStream` and `HostEvent` have
the interface of torch's streams and events, so code written for a device runs unchanged, but every op completes before
its call returns. torch's CPU allocator keeps no statistics, so "allocated" memory is the resident set of the process:
it includes the tensors, the interpreter and the libraries. In a container, the memory limit is the limit of the control
group.
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
# Files with (limit, current use) of control groups version 2 and version 1, relative to _CGROUP
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resident_bytes() -> int:
    """Return the resident set size of this process in bytes."""
    import psutil  # late: every rank and the launcher import this module, but few query memory

    return int(psutil.Process().memory_info().rss)


def total_bytes() -> int:
    """Return the bytes of memory of the machine, or the container's limit if it is lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    cgroup = _cgroup_bytes()
    return total if cgroup is None else min(total, cgroup[0])


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    cgroup = _cgroup_bytes()
    return available if cgroup is None else min(available, max(0, cgroup[0] - cgroup[1]))


class PeakMemory:
    """Measures the peak resident set of this process since the start or the last reset.

    Linux maintains the peak (`VmHWM`), and `/proc/self/clear_refs` resets it. On other systems, or if the kernel
    forbids the reset, the peak after a reset is the highest value that a `read` or `reset` has seen since.
    """

    def __init__(self) -> None:
        self._seen: int | None = None  # None: use the system's counter

    def read(self) -> int:
        """Return the peak in bytes; never below `resident_bytes()`."""
        now = resident_bytes()
        if self._seen is None:
            return max(now, _system_peak_bytes())
        self._seen = max(self._seen, now)
        return self._seen

    def reset(self) -> None:
        """Reset the peak to the current value."""
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
        (_PROC / "clear_refs").write_text("5")  # man 5 proc: 5 resets VmHWM to the current resident set
    except OSError:
        return False
    return True


def _cgroup_bytes() -> tuple[int, int] | None:
    """Return (limit, current use) of the control group in bytes, or None without a limit."""
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
    """A stream of the host: always empty. It ignores a device stream's arguments and is a context manager."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""

    def query(self) -> bool:
        """Return True: no work is queued."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the work of the other stream is done."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the work before the event is done."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Record `event`, or a new event, and return it."""
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
    """An event that records a time on the host's clock. It ignores a device event's arguments and always has timing."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the work before the event is done."""

    def query(self) -> bool:
        """Return True: the work before the event is done."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the work before the event is done."""

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Return the milliseconds from this event to `end_event`.

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
    """The host as a single synchronous device. Its memory statistics are the statistics of the process.

    Several ranks on one machine count as several devices that share the machine's memory: `device_count` is the number
    of ranks that the launcher started (`LOCAL_SIZE` or `LOCAL_WORLD_SIZE`).
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
        """Return `"cpu"`: torch has one host device."""
        return self._name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a null context."""
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """Store `device_index` for `current_device`; a negative index changes nothing, as in torch."""
        if device_index >= 0:
            self._index = int(device_index)

    def current_device(self) -> int:
        """Return the index from `set_device`, else `LOCAL_RANK`, else 0."""
        return max(0, environment_int("LOCAL_RANK", 0, least=-1)) if self._index is None else self._index

    def current_device_name(self) -> str:
        return self._name

    def device_count(self) -> int:
        """Return the number of ranks that the launcher started on this machine, else `natural_device_count()`."""
        for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            ranks = environment_int(variable, 0)
            if ranks > 0:
                return ranks
        return self.natural_device_count()

    def natural_device_count(self) -> int:
        """Return the default number of ranks for this machine: 1, because this class does not count sockets."""
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: every op is done when its call returns."""

    def is_available(self) -> bool:
        return True

    # ----- random numbers: there is one generator --------------------------------------------------------------------

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        # Not torch.manual_seed: it also seeds every other device, now or when the device is initialized.
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
        """Return a null context for any stream."""
        return nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> HostStream:
        """Return the only stream of the host."""
        return self._stream

    def default_stream(self, device_index: int | None = None) -> HostStream:
        """Return the only stream of the host."""
        return self._stream

    # ----- memory: the process's and the machine's -------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Do nothing: torch does not cache host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set of this process in bytes, including interpreter and libraries."""
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
        """Return the memory of the machine, or the container's limit if it is lower."""
        return total_bytes()

    def available_memory(self, device_index: int | None = None) -> int:
        return available_bytes()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """Return `tensor` itself, because host memory needs no pinning, or a copy if `align_bytes` requires one."""
        tensor = tensor if match_shape else tensor.reshape(-1)
        if is_aligned(tensor, align_bytes):
            return tensor
        return aligned_copy(tensor, align_bytes, lambda numel: torch.empty(numel, dtype=torch.uint8))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True for every host tensor: a copy to this "device" needs no page-locked memory."""
        return self.on_accelerator(tensor)

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    # ----- dtypes ----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Return True: torch computes in bfloat16 on every CPU, faster if the CPU has bfloat16 instructions."""
        return True

    def is_fp16_supported(self) -> bool:
        """Return True: torch computes in float16 on every CPU, though often slowly."""
        return True

    def _maker(self, dtype: torch.dtype) -> TensorMaker:
        """Return torch's class, such as `torch.FloatTensor`: it also accepts sizes and works with `isinstance`."""
        return _TENSOR_CLASSES[dtype]
