"""CUDA_Accelerator: NVIDIA GPUs through `torch.cuda`; only what differs from what the base asks of any device.

Streams, events, graphs, memory figures and pinned memory are the base's: `torch.cuda` has all of it under torch's
common names.
"""

from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from ds_ext_cuda import devices

# compute capability (major) from which the hardware computes in a format
_FP16_FROM, _BF16_FROM, _TRITON_FROM = 7, 8, 8


class CUDA_Accelerator(DeepSpeedAccelerator):
    """NVIDIA GPUs. Building one asks no driver and opens no device."""

    _name = "cuda"
    _communication_backend_name = "nccl"
    _compile_backend = "inductor"

    # ----- device ----------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many GPUs this process can use.

        From the kernel's files and `CUDA_VISIBLE_DEVICES` as long as torch has opened none: no NVML, no device context,
        and a process may still fork. From torch once it has.
        """
        if not torch.backends.cuda.is_built():
            return 0
        if torch.cuda.is_initialized():
            return int(torch.cuda.device_count())
        return devices.visible(devices.present()[0])

    def is_available(self) -> bool:
        """Whether torch is a CUDA build and `device_count()` is above 0; opens no device."""
        return self.device_count() > 0

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that ops on `device_index` draw from when none is given. Opens the device: it is its own."""
        torch.cuda.init()
        return super().default_generator(device_index)

    # ----- communication, profiler -----------------------------------------------------------------------------------

    def communication_backend_version(self) -> Any:
        """NCCL's version as a tuple, for example `(2, 27, 3)`; None with a torch that has no NCCL."""
        return torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named NVTX range, which Nsight shows; nests. With a CPU build of torch, a range of its profiler."""
        if torch.backends.cuda.is_built():
            torch.cuda.nvtx.range_push(msg)
        else:
            super().range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        """Close the innermost range of this thread; nothing happens when none is open."""
        if torch.backends.cuda.is_built():
            torch.cuda.nvtx.range_pop()
        else:
            super().range_pop()

    # ----- dtypes ----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether the current device computes in bfloat16: capability 8.0 and later. torch emulates it before."""
        return self._capability() >= (_BF16_FROM, 0)

    def is_fp16_supported(self) -> bool:
        """Whether the current device computes in float16 at speed: capability 7.0 and later."""
        return self._capability() >= (_FP16_FROM, 0)

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the current device: capability 8.0 and later."""
        return self._capability() >= (_TRITON_FROM, 0)

    def _capability(self) -> tuple[int, int]:
        """(0, 0) where there is no device to ask."""
        return torch.cuda.get_device_capability() if self.is_available() else (0, 0)

    # ----- environment -----------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """The settings of NCCL, and where libraries and programs are found, which all hosts must share."""
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [devices.VISIBLE_DEVICES]
