"""PlainAccelerator: the null device. The CPU by torch alone, so that the core runs and tests with no extension at all.

`ds-ext-cpu` builds on it and adds what the machine can tell (sockets, communication library, kernels).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator import host_memory
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.dtypes import TensorMaker
from deepspeed.accelerator.host_streams import HostEvent, HostStream
from deepspeed.accelerator.memory import aligned_copy, is_aligned
from deepspeed.errors import ConfigError, environment_int

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
        self._peak = host_memory.PeakMemory()
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
        """Remember `device_index` for `current_device`."""
        if device_index < 0:
            raise ConfigError(f"set_device: {device_index} is no device index; 0 or more is expected")
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
        return host_memory.resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._peak.read()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return host_memory.resident_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._peak.read()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak.reset()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now, peak = host_memory.resident_bytes(), self._peak.read()
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the machine, or of the container when its limit is lower."""
        return host_memory.total_bytes()

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory.available_bytes()

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
