"""`MPS_Accelerator`: maps the names that the base class expects of a device module to functions of `torch.mps`.

There is one device, one queue of work, and one generator. torch records no peak of this memory. The highest figure that
was read since the last reset replaces it.
"""

from contextlib import nullcontext
from types import ModuleType

import torch
from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.errors import ConfigError, PluginError, environment_int

from ds_ext_mps.queue import MPSEvent, MPSQueue

_ONE_RANK = "a Mac has mps:0 alone, and gloo exchanges none of its tensors; one rank, or DS_ACCELERATOR=cpu for several"


class MPS_Accelerator(DeepSpeedAccelerator):
    """The accelerator of a Mac's GPU. One rank only, because gloo accepts no tensors of the GPU (see the README)."""

    _name = "mps"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            built = torch.backends.mps.is_built()
            raise PluginError(f"torch {torch.__version__} finds no Metal device (built for Metal: {built})")
        self._peaks = {"allocated": 0, "reserved": 0}
        self._queue = MPSQueue()
        self._table = ModuleType("torch.mps")
        vars(self._table).update(
            {**vars(torch.mps), "Stream": MPSQueue, "Event": MPSEvent},
            is_available=torch.backends.mps.is_available,
            is_bf16_supported=lambda: torch.backends.mps.is_macos_or_newer(14, 0),
            device=lambda index: nullcontext(),
            current_device=lambda: 0,
            synchronize=lambda *index: torch.mps.synchronize(),
            manual_seed_all=torch.mps.manual_seed,
            initial_seed=lambda: self.default_generator(0).initial_seed(),
            default_generators=[torch.mps._get_default_mps_generator()],
            stream=nullcontext,
            current_stream=lambda index: self._queue,
            default_stream=lambda index: self._queue,
            memory_allocated=lambda index: self._noted("allocated", torch.mps.current_allocated_memory()),
            memory_reserved=lambda index: self._noted("reserved", torch.mps.driver_allocated_memory()),
            max_memory_allocated=lambda index: max(self.memory_allocated(), self._peaks["allocated"]),
            max_memory_reserved=lambda index: max(self.memory_reserved(), self._peaks["reserved"]),
            reset_peak_memory_stats=lambda index: self._peaks.update(allocated=0, reserved=0),
        )

    def _module(self) -> ModuleType:
        return self._table

    def _noted(self, name: str, num_bytes: int) -> int:
        self._peaks[name] = max(self._peaks[name], num_bytes)
        return num_bytes

    def set_device(self, device_index: int) -> None:
        if device_index > 0:
            raise ConfigError(f"device mps:{device_index}: {_ONE_RANK}")

    def communication_backend_name(self) -> str:
        ranks = environment_int("WORLD_SIZE", 1)
        if ranks > 1:
            raise ConfigError(f"WORLD_SIZE={ranks}: {_ONE_RANK}")
        return self._communication_backend_name

    def resolves_data_dependency(self) -> bool:
        return True

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        now = {"allocated": self.memory_allocated(), "reserved": self.memory_reserved()}
        figures = {"current": now, "peak": self._peaks}
        return {f"{name}_bytes.all.{when}": of[name] for when, of in figures.items() for name in of}

    def is_fp64_supported(self) -> bool:
        return False

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.mps.recommended_max_memory())

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of `total_memory` that no tensor uses; 0 if tensors use more than Metal recommends.

        `torch.accelerator.get_memory_info` is not used: it fails for this device in some releases of torch.
        """
        return max(0, self.total_memory(device_index) - self.memory_allocated(device_index))
