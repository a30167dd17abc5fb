"""XPU_Accelerator: Intel GPUs through `torch.xpu`; only what differs from what the base asks of any device.

Streams, events, graphs, random numbers, memory figures and pinned memory are the base's: `torch.xpu` has all of it
under torch's common names.
"""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from ds_ext_xpu.devices import AFFINITY_MASK

# import name -> distribution of Intel's oneCCL bindings, whose backend is called "ccl"
_CCL_MODULE, _CCL_DISTRIBUTION = "oneccl_bindings_for_pytorch", "oneccl-bind-pt"


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
        return "ccl" if not _has_xccl() and _has_ccl() else self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """The version of the oneCCL bindings; None for xccl, which is part of torch."""
        return importlib.metadata.version(_CCL_DISTRIBUTION) if self.communication_backend_name() == "ccl" else None

    def export_envs(self) -> list[str]:
        """The settings of oneCCL, of its network and of the GPUs' runtime, which all hosts must share."""
        return ["CCL", "FI_", "ZE_", "SYCL", "ONEAPI", "LD_LIBRARY", "PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [AFFINITY_MASK]


def _has_xccl() -> bool:
    asked = getattr(torch.distributed, "is_xccl_available", None)  # from torch 2.8
    return asked is not None and bool(asked())


def _has_ccl() -> bool:
    return importlib.util.find_spec(_CCL_MODULE) is not None
