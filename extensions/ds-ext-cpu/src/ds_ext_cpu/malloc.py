"""glibc's malloc: large freed blocks go back to the system at once.

By itself glibc takes blocks above a threshold from the system and returns them when they are freed, but it raises the
threshold, up to 32 MiB, to the size of each block that is freed in this way (man 3 mallopt). Gathered weights are freed
after each use, so blocks of their size move to the heap, where what lives longer is laid in the gaps. Stage 3 of a GPT
with 12 blocks of 7 MB peaked at 1.2 to 1.4 times the bytes of its tensors.

While a model is built in zero.Init, whole parameters below the threshold would do the same to the heap: small objects
that stay are laid in the gaps, so the next parameter does not fit, and the heap grows with every layer.
"""

import ctypes
import os

_M_MMAP_THRESHOLD = -3  # malloc.h
#: bytes; smaller blocks stay in the heap, because a block from the system costs a page fault per page each time
THRESHOLD_BYTES = 1 << 20


def return_large_blocks(threshold_bytes: int = THRESHOLD_BYTES) -> bool:
    """Fix the threshold for the process; whether that was done.

    Not where the environment sets one (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`), nor with another C library.
    """
    by_user = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return not by_user and mallopt is not None and mallopt(_M_MMAP_THRESHOLD, threshold_bytes) == 1
