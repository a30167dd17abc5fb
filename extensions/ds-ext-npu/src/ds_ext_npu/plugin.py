"""The entry point of this extension. Only hook implementations; they import torch and torch_npu on first use."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.errors import PluginError
from deepspeed.plugins import Offer, hookimpl

from ds_ext_npu import vendor

if TYPE_CHECKING:
    from ds_ext_npu.accelerator import NPU_Accelerator

DS_PLUGIN_API = ">=1,<2"

_PRIORITY = 100


@hookimpl
def ds_probe() -> Offer:
    """Offer the NPUs if torch_npu looks complete and there are devices. Imports no torch_npu and opens no device."""
    reason = vendor.obstacle()
    if reason is not None:
        return Offer("npu", _PRIORITY, available=False, reason=reason)
    count = vendor.num_devices()
    return Offer("npu", _PRIORITY, reason=f"{count} Ascend device{'s' if count > 1 else ''}")


@hookimpl
def ds_accelerator() -> "NPU_Accelerator":
    """Create the accelerator; imports torch and torch_npu.

    Raises:
        PluginError: torch_npu cannot be imported, or its runtime finds no device.
    """
    from ds_ext_npu.accelerator import NPU_Accelerator

    accelerator = NPU_Accelerator()
    if not accelerator.is_available():
        raise PluginError(f"torch.npu finds none of {vendor.num_devices()} Ascend devices in /dev; see npu-smi info")
    return accelerator


@hookimpl
def ds_op_builders() -> Mapping[str, type]:
    """Return the builders of ops that use the vendor's operators."""
    from ds_ext_npu.op_builder import builders

    return builders()
