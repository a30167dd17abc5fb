"""Counts of faults that the driver keeps of an NVIDIA device, for the hook `ds_device_faults`, by NVML.

NVML is read through NVIDIA's own package, `nvidia-ml-py` (`pip install ds-ext-cuda[faults]`). It waits for nothing that
runs on the device. The name by which it knows a device comes from torch, which initializes CUDA in this process. Slices
of a device (MIG) have no counts of their own.
"""

import functools
from typing import Any

_NO_NVML = "faults are counted by NVIDIA's package nvidia-ml-py, which is missing: pip install ds-ext-cuda[faults]"


def count(index: int | None) -> dict[str, int]:
    """Count each kind of fault since the driver started; a kind that this device does not count is left out.

    Args:
        index: of the device among those that this process sees; None, the host: nothing is counted.

    Raises:
        ImportError: NVIDIA's package is not installed.
        pynvml.NVMLError: the driver's library does not start, or knows no such device.
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
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):  # memory without ECC, a slice of a device
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
    """Return the name that the driver has for a device, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
