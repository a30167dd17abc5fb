"""`XPU_Accelerator`: Intel GPUs through `torch.xpu`. Only the differences from the base class.

The base class implements streams, events, graphs, random numbers, memory figures and pinned memory: `torch.xpu` has
all of them under torch's common names.
"""

from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from ds_ext_xpu import oneccl
from ds_ext_xpu.devices import AFFINITY_MASK


class XPU_Accelerator(DeepSpeedAccelerator):
    """The accelerator of Intel GPUs. Creating it opens no device."""

    _name = "xpu"
    _communication_backend_name = "xccl"

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of the device. Opens the device, because the generator belongs to it."""
        torch.xpu.init()
        return super().default_generator(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream: `torch.xpu` has no default stream that other streams wait for."""
        return self.current_stream(device_index)

    def communication_backend_name(self) -> str:
        """Return torch's `"xccl"`, or `"ccl"` if torch has no xccl and the oneCCL bindings are installed."""
        return oneccl.NAME if not _has_xccl() and oneccl.is_installed() else self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """Return the version of the oneCCL bindings; None for xccl, which is part of torch."""
        return oneccl.version() if self.communication_backend_name() == oneccl.NAME else None

    def export_envs(self) -> list[str]:
        """Return the settings that all hosts must share: oneCCL, its network and SYCL, without the device mask."""
        return ["CCL", "FI_", "ZE_FLAT", "SYCL", "ONEAPI", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [AFFINITY_MASK]


def _has_xccl() -> bool:
    asked = getattr(torch.distributed, "is_xccl_available", None)  # from torch 2.8
    return asked is not None and bool(asked())
