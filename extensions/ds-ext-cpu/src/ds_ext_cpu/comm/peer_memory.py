"""`read_memory` reads the memory of another process of this machine with process_vm_readv(2), on Linux.

Used by `boards.py`. The kernel copies the data once, from one rank's buffer to the other's. A socket copies the data
twice, and wakes two threads for it. The kernel permits reads between processes of one user, unless a container's rules
or Yama (`/proc/sys/kernel/yama/ptrace_scope` above 0) forbid them. This module does not change such settings.
"""

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def is_supported() -> bool:
    """Return whether this system has the call, and the processor makes stores visible to other cores in program order.

    Without that order (on ARM), a peer could see the announcement of a buffer before the buffer's content.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and _process_vm_readv() is not None


def read_memory(process: int, source: int, target: int, num_bytes: int) -> None:
    """Copy `num_bytes` bytes from the address `source` in the process with id `process` to our address `target`.

    Raises:
        ProcessLookupError: the process does not exist any more.
        PermissionError: the kernel forbids the read.
        OSError: the process has no memory at `source` (EFAULT), or another reason.
    """
    call = _process_vm_readv()
    assert call is not None, "is_supported() was not asked"
    while num_bytes > 0:  # the kernel copies at most 2 GiB in one call
        ours, theirs = _Range(target, num_bytes), _Range(source, num_bytes)
        copied = call(process, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if copied <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        source, target, num_bytes = source + copied, target + copied, num_bytes - copied


@functools.cache
def _process_vm_readv() -> Callable[..., int] | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    return call
