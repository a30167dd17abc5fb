"""Fault counts of an NVIDIA device from NVML, for the hook `ds_device_faults`.

NVML is called through NVIDIA's package `nvidia-ml-py` (`pip install ds-ext-cuda[faults]`), and does not wait for work
on the device. NVML finds a device by its UUID. The UUID comes from torch, which initializes CUDA in this process.
Slices of a device (MIG) have no counts of their own.
"""

import functools
from typing import Any

_NO_NVML = "faults are counted by NVIDIA's package nvidia-ml-py, which is missing: pip install ds-ext-cuda[faults]"


def count(index: int | None) -> dict[str, int]:
    """Count each kind of fault since the driver started. Kinds that this device does not count are left out.

    Args:
        index: index of the device among the devices that this process sees; None is the host, which has no counts here.

    Raises:
        ImportError: NVIDIA's package is not installed.
        pynvml.NVMLError: the driver's library does not start, or does not know the device.
    """
    if index is None:
        return {}
    nvml = _nvml()
    device = nvml.nvmlDeviceGetHandleByUUID(_uuid(index))
    readers = {
        "memory errors, corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "memory errors, not corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "rows of memory replaced": lambda: sum(nvml.nvmlDeviceGetRemappedRows(device)[:2]),
        "seconds slowed down by heat": lambda: (
            nvml.nvmlDeviceGetViolationStatus(device, nvml.NVML_PERF_POLICY_THERMAL).violationTime // 10**9
        ),
    }
    counts = {}
    for kind, read in readers.items():
        try:
            counts[kind] = int(read())
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):  # for example memory without ECC, or a slice
            continue
    return counts


@functools.cache
def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise ImportError(_NO_NVML) from None
    pynvml.nvmlInit()
    return pynvml


@functools.cache
def _uuid(index: int) -> str:
    """Return the driver's UUID of a device, which does not depend on CUDA_VISIBLE_DEVICES."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
