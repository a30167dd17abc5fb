"""The entry point of this extension. Only hook implementations; they import torch and the accelerator on first use."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.plugins import Offer, hookimpl

from ds_ext_xpu import devices, oneccl
from ds_ext_xpu.installed_torch import xpu_of_torch

if TYPE_CHECKING:
    from ds_ext_xpu.accelerator import XPU_Accelerator

DS_PLUGIN_API = ">=1,<2"

# above the host's 0, because this is a real device
_PRIORITY = 100


@hookimpl
def ds_probe() -> Offer:
    """Offer the GPUs if this process may use one and torch is built with XPU. Imports no torch."""
    gpus = devices.present()
    count = len(gpus.nodes)
    if count == 0:
        return _no("no Intel GPU with driver i915 or xe in /sys/class/drm")
    if len(gpus.absent) + len(gpus.closed) == count:
        return _no(_out_of_reach(gpus))
    if not devices.visible(count):
        return _no(f"{devices.AFFINITY_MASK} leaves none of {_gpus(count)}")
    xpu, torch = xpu_of_torch()
    if xpu is None:
        return _no(f"{_gpus(count)} here, but {torch}")
    return Offer("xpu", _PRIORITY, reason=f"{_gpus(count)} ({', '.join(gpus.nodes)}), {torch} with XPU {xpu}")


@hookimpl
def ds_accelerator() -> "XPU_Accelerator":
    """Create the accelerator; imports torch."""
    from ds_ext_xpu.accelerator import XPU_Accelerator

    return XPU_Accelerator()


@hookimpl
def ds_op_builders() -> Mapping[str, type]:
    """Return the builders of the GPU kernels."""
    from ds_ext_xpu.op_builder import builders

    return builders()


@hookimpl
def ds_comm_backend(name: str) -> None:
    """Register the backend "ccl" with torch if the oneCCL bindings are installed."""
    if name == oneccl.NAME and oneccl.is_installed():
        oneccl.register()


def _no(reason: str) -> Offer:
    return Offer("xpu", _PRIORITY, available=False, reason=reason)


def _out_of_reach(gpus: devices.Gpus) -> str:
    found = {
        "not there, though the kernel has it; give it to the container (--device /dev/dri)": gpus.absent,
        "may not be opened; add the user to the group that owns it (render)": gpus.closed,
    }
    return "; ".join(f"{', '.join(nodes)}: {lack}" for lack, nodes in found.items() if nodes)


def _gpus(count: int) -> str:
    return f"{count} Intel GPU{'' if count == 1 else 's'}"
