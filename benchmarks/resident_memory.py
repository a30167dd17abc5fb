"""Bytes of one rank: what the kernel counts as resident, and what tensors hold. Linux only (`/proc/self`)."""

import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor


def resident_bytes() -> int:
    """Resident set now, after the allocator has given back what it can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return _status_bytes("VmRSS")


def reset_peak() -> None:
    """Forget the peak: the high-water mark becomes today's resident set (man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Highest resident set since `reset_peak`."""
    return _status_bytes("VmHWM")


def data_bytes() -> int:
    """Heap and private anonymous mappings, touched or not: what RLIMIT_DATA limits."""
    return _status_bytes("VmData")


def tensor_bytes() -> int:
    """Bytes of every distinct storage that a living Python tensor, or the `.grad` of one, holds."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type(), not isinstance: lazy modules answer isinstance by importing themselves.
        if not issubclass(type(candidate), Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is None or tensor.device.type != "cpu":
                continue
            local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own part
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
