"""Hook implementations, the only entry point of this extension. Importing this module does not import torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.plugins import Offer, hookimpl

from ds_ext_cuda import devices, faults
from ds_ext_cuda.installed_torch import cuda_of_torch

if TYPE_CHECKING:
    from ds_ext_cuda.accelerator import CUDA_Accelerator

DS_PLUGIN_API = ">=1.3,<2"

# above the host's 0, because this is a real device
_PRIORITY = 100


@hookimpl
def ds_probe() -> Offer:
    """Check that this process may use a device, torch is a CUDA build, and the driver's library loads."""
    count, where = devices.present()
    if count == 0:
        return _no(f"no NVIDIA device here ({where})")
    usable = devices.visible(count)
    if usable == 0:
        return _no(f"{devices.VISIBLE_DEVICES} leaves none of {_devices(count)} ({where})")
    cuda, torch = cuda_of_torch()
    if cuda is None:
        return _no(f"{_devices(count)} here ({where}), but {torch}")
    obstacle = devices.driver_obstacle()
    if obstacle is not None:
        return _no(f"{_devices(count)} here ({where}), but {obstacle}")
    return Offer("cuda", _PRIORITY, reason=f"{_devices(usable)} ({where}), {torch} with CUDA {cuda}")


@hookimpl
def ds_accelerator() -> "CUDA_Accelerator":
    """Build the accelerator. This imports torch."""
    from ds_ext_cuda.accelerator import CUDA_Accelerator

    return CUDA_Accelerator()


@hookimpl
def ds_op_builders() -> Mapping[str, type]:
    """Return the builders of the GPU kernels."""
    from ds_ext_cuda.op_builder import builders

    return builders()


@hookimpl
def ds_device_faults(index: int | None) -> Mapping[str, int]:
    """Count the device's memory errors, replaced memory rows, and seconds of thermal throttling."""
    return faults.count(index)


def _no(reason: str) -> Offer:
    return Offer("cuda", _PRIORITY, available=False, reason=reason)


def _devices(count: int) -> str:
    return f"{count} NVIDIA device{'' if count == 1 else 's'}"
