"""`NPU_Accelerator`: the differences from the base class, which uses `torch.npu`."""

from typing import Any

import torch
from deepspeed.accelerator import DeepSpeedAccelerator

from ds_ext_npu import vendor


class NPU_Accelerator(DeepSpeedAccelerator):
    """The accelerator of Ascend NPUs. Creating it imports `torch_npu`, which registers the device and hccl with torch.

    Raises:
        PluginError: torch_npu cannot be imported.
    """

    _name = "npu"
    _communication_backend_name = "hccl"

    def __init__(self) -> None:
        vendor.load()

    def communication_backend_version(self) -> Any:
        """Return the version of HCCL in the installed CANN; None if torch_npu does not know it."""
        ask = getattr(getattr(self._module(), "utils", None), "get_cann_version", None)
        return None if ask is None else ask("HCCL") or None

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default generator of the device. Initializes the device: torch_npu has no generators before."""
        self._ask("init")
        return super().default_generator(device_index)

    def export_envs(self) -> list[str]:
        """Return the variables of CANN and HCCL, and the library path: `set_env.sh` sets them on one host only."""
        return ["ASCEND", "HCCL", "LD_LIBRARY_PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [vendor.VISIBLE]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Sort the devices, because the vendor's runtime accepts only ascending numbers."""
        super().set_visible_devices_envs(current_env, sorted(local_accelerator_ids))
