"""Tensors in memory that is aligned to pages and locked; where the limit does not permit it, only aligned.

Huge pages are asked for: O_DIRECT then pins one page instead of 512.
"""

import ctypes
import errno
import mmap
import os
import resource
import weakref
from contextlib import suppress

import torch
from deepspeed.log import warn_once


class LockedTensors:
    """The locked tensors of one handle. Their memory lives as long as the tensors do, not as the handle."""

    def __init__(self) -> None:
        self._memory: dict[int, weakref.ref[mmap.mmap]] = {}

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor of shape (numel,); it begins at a page."""
        num_bytes = numel * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        memory = _private_memory(num_bytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        error = _call("mlock", tensor.data_ptr(), num_bytes)
        if error:
            warn_once(_why_not(error))
        self._memory[tensor.data_ptr()] = weakref.ref(memory)
        return tensor

    def free(self, tensor: torch.Tensor) -> bool:
        """Unlock; False: it is none of these."""
        found = self._memory.pop(tensor.data_ptr(), None)
        memory = None if found is None else found()
        if memory is None:
            return False
        _call("munlock", tensor.data_ptr(), len(memory))
        return True


def _private_memory(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _call(name: str, address: int, num_bytes: int) -> int:
    """The errno of `mlock` or `munlock`; 0: done."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    return 0 if function(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) == 0 else ctypes.get_errno()


def _why_not(error: int) -> str:
    """One text for all sizes, so that it is logged once."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    why = f"{os.strerror(error)}, {errno.errorcode.get(error, error)}; the limit of locked memory is {told}"
    return (
        f"new_cpu_locked_tensor: memory cannot be locked ({why}), so that it is plain aligned memory; set `ulimit -l "
        "unlimited`, or the sum of such tensors in KiB, before the program starts"
    )
