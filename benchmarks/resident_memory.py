"""Measure the memory of a rank: the resident set, and the bytes of tensors. Linux only (`/proc/self`)."""

import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor


def resident_bytes() -> int:
    """Return the resident set, after the allocator has returned free memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return _status_bytes("VmRSS")


def reset_peak() -> None:
    """Reset the peak to the current resident set (man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the highest resident set since `reset_peak`."""
    return _status_bytes("VmHWM")


def data_bytes() -> int:
    """Return the bytes of heap and private anonymous mappings, touched or not, which RLIMIT_DATA limits."""
    return _status_bytes("VmData")


def tensor_bytes() -> int:
    """Return the bytes of all distinct CPU storages of live Python tensors and their `.grad`."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type(), not isinstance: isinstance makes lazy modules import themselves
        if not issubclass(type(candidate), Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is None or tensor.device.type != "cpu":
                continue
            local = getattr(tensor, "_local_tensor", tensor)  # the local shard of a DTensor
            storage = torch.Tensor.untyped_storage(local)
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory can only be measured on Linux")
