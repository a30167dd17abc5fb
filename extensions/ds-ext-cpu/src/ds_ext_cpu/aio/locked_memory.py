"""`LockedTensors` creates tensors in page-aligned, locked memory; if locking fails, the memory is only aligned.

The memory uses huge pages if the kernel has them: O_DIRECT then pins one page instead of 512.
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
    """The locked tensors of one handle. Their memory lives as long as the tensors, even without the handle."""

    def __init__(self) -> None:
        self._memory: dict[int, weakref.ref[mmap.mmap]] = {}

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of shape (numel,) that begins at a page boundary."""
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
        """Unlock `tensor`. Returns False if `tensor` is not one of the locked tensors."""
        found = self._memory.pop(tensor.data_ptr(), None)
        memory = None if found is None else found()
        if memory is None:
            return False
        _call("munlock", tensor.data_ptr(), len(memory))
        return True


def _private_memory(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _call(name: str, address: int, num_bytes: int) -> int:
    """Call `mlock` or `munlock`. Returns the errno, or 0 on success."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    return 0 if function(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) == 0 else ctypes.get_errno()


def _why_not(error: int) -> str:
    """Return the warning. The text does not depend on the size, so it is logged once."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    why = f"{os.strerror(error)}, {errno.errorcode.get(error, error)}; the limit of locked memory is {told}"
    return (
        f"new_cpu_locked_tensor: memory cannot be locked ({why}), so that it is plain aligned memory; set `ulimit -l "
        "unlimited`, or the sum of such tensors in KiB, before the program starts"
    )
