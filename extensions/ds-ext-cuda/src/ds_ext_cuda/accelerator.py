"""`CUDA_Accelerator` supports NVIDIA GPUs through `torch.cuda`. It overrides only what differs from the base class.

Streams, events, graphs, memory statistics and pinned memory come from the base class, because `torch.cuda` has them
under torch's common names.
"""

from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from ds_ext_cuda import devices

# lowest compute capability (major) that supports a format
_FP16_FROM, _BF16_FROM, _TRITON_FROM = 7, 8, 8


class CUDA_Accelerator(DeepSpeedAccelerator):
    """NVIDIA GPUs. Creating the object does not query the driver, and opens no device."""

    _name = "cuda"
    _communication_backend_name = "nccl"
    _compile_backend = "inductor"

    # ----- device ----------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Return the number of GPUs that this process can use.

        Until torch initializes CUDA, the number comes from the kernel's files and `CUDA_VISIBLE_DEVICES`, without NVML
        or a device context, so the process can still fork. After that, the number comes from torch.
        """
        if not torch.backends.cuda.is_built():
            return 0
        if torch.cuda.is_initialized():
            return int(torch.cuda.device_count())
        return devices.visible(devices.present()[0])

    def is_available(self) -> bool:
        """Return whether torch is a CUDA build and `device_count()` is above 0. Opens no device."""
        return self.device_count() > 0

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of ops on `device_index`. Initializes CUDA, since the device has its own."""
        torch.cuda.init()
        return super().default_generator(device_index)

    # ----- communication, profiler -----------------------------------------------------------------------------------

    def communication_backend_version(self) -> Any:
        """Return NCCL's version as a tuple, for example `(2, 27, 3)`; None if torch has no NCCL."""
        return torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named NVTX range for Nsight; ranges nest. With a CPU build of torch, open a torch profiler range."""
        if torch.backends.cuda.is_built():
            torch.cuda.nvtx.range_push(msg)
        else:
            super().range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        """Close the innermost range of this thread. Does nothing if no range is open."""
        if torch.backends.cuda.is_built():
            torch.cuda.nvtx.range_pop()
        else:
            super().range_pop()

    # ----- dtypes ----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Return whether the current device computes in bfloat16: capability 8.0 or later. Below, torch emulates it."""
        return self._capability() >= (_BF16_FROM, 0)

    def is_fp16_supported(self) -> bool:
        """Return whether the current device computes fast in float16: capability 7.0 or later."""
        return self._capability() >= (_FP16_FROM, 0)

    def is_triton_supported(self) -> bool:
        """Return whether Triton compiles for the current device: capability 8.0 or later."""
        return self._capability() >= (_TRITON_FROM, 0)

    def _capability(self) -> tuple[int, int]:
        """Return the capability of the current device; (0, 0) without a device."""
        return torch.cuda.get_device_capability() if self.is_available() else (0, 0)

    # ----- environment -----------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Return the prefixes of settings that all hosts must share: NCCL, and paths of libraries and programs."""
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [devices.VISIBLE_DEVICES]
