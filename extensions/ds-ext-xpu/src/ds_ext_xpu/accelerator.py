"""XPU_Accelerator: Intel GPUs through `torch.xpu`; only what differs from what the base asks of any device.

Streams, events, graphs, random numbers, memory figures and pinned memory are the base's: `torch.xpu` has all of it
under torch's common names.
"""

from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from ds_ext_xpu import oneccl
from ds_ext_xpu.devices import AFFINITY_MASK


class XPU_Accelerator(DeepSpeedAccelerator):
    """Intel GPUs. Building one opens no device."""

    _name = "xpu"
    _communication_backend_name = "xccl"

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that ops on `device_index` draw from when none is given. Opens the device: it is its own."""
        torch.xpu.init()
        return super().default_generator(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The current stream: `torch.xpu` knows no default one that others would wait for."""
        return self.current_stream(device_index)

    def communication_backend_name(self) -> str:
        """`"xccl"`, torch's own; `"ccl"` where torch has none and the oneCCL bindings are installed (not imported)."""
        return oneccl.NAME if not _has_xccl() and oneccl.is_installed() else self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """The version of the oneCCL bindings; None for xccl, which is part of torch."""
        return oneccl.version() if self.communication_backend_name() == oneccl.NAME else None

    def export_envs(self) -> list[str]:
        """The settings of oneCCL, of its network and of SYCL, which all hosts must share; not the mask of devices."""
        return ["CCL", "FI_", "ZE_FLAT", "SYCL", "ONEAPI", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [AFFINITY_MASK]


def _has_xccl() -> bool:
    asked = getattr(torch.distributed, "is_xccl_available", None)  # from torch 2.8
    return asked is not None and bool(asked())
