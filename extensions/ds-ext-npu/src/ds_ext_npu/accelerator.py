"""NPU_Accelerator: what differs from the base, which asks `torch.npu`."""

from typing import Any

import torch
from deepspeed.accelerator import DeepSpeedAccelerator

from ds_ext_npu import vendor


class NPU_Accelerator(DeepSpeedAccelerator):
    """Ascend NPUs. Building one imports `torch_npu`, which registers the device, its module and the library hccl.

    Raises:
        PluginError: torch_npu cannot be imported.
    """

    _name = "npu"
    _communication_backend_name = "hccl"

    def __init__(self) -> None:
        vendor.load()

    def communication_backend_version(self) -> Any:
        """The version of HCCL in the installed CANN; None where torch_npu cannot tell."""
        ask = getattr(getattr(self._module(), "utils", None), "get_cann_version", None)
        return None if ask is None else ask("HCCL") or None

    def default_generator(self, device_index: int) -> torch.Generator:
        """The device is initialized first: until then torch_npu has no generators."""
        self._ask("init")
        return super().default_generator(device_index)

    def export_envs(self) -> list[str]:
        """CANN's variables, the library's, and where CANN's libraries are: `set_env.sh` sets them on one host only."""
        return ["ASCEND", "HCCL", "LD_LIBRARY_PATH"]

    def visible_devices_envs(self) -> list[str]:
        return [vendor.VISIBLE]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Ascending, which is the only order that the vendor's runtime takes."""
        super().set_visible_devices_envs(current_env, sorted(local_accelerator_ids))
