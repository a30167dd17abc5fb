"""glibc's malloc: freed blocks go back to the system at once while a model is built, and are kept in training.

By itself glibc takes blocks above a threshold from the system and returns them when they are freed, but it raises the
threshold, up to 32 MiB, to the size of each block that is freed in this way (man 3 mallopt). That suits training:
blocks of the same sizes come and go in every step, and one that stays in the heap costs no page fault per page. Stage
3 of a GPT with 25 M parameters takes 0.8 of the time that it takes with a threshold of 1 MiB, in the same memory.

It does not suit zero.Init, where whole parameters are freed one after the other: small objects that stay are laid in
the gaps, so the next parameter does not fit, and the heap grows with every layer.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Where glibc's own threshold ends; the heap's end is given back beyond twice of it, as glibc does.
_GREATEST_BYTES = 32 << 20


def return_large_blocks(threshold_bytes: int) -> bool:
    """Fix the threshold for the process; whether that was done.

    Not where the environment sets one (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`), nor with another C library.
    """
    return _set(_M_MMAP_THRESHOLD, threshold_bytes)


def keep_freed_blocks() -> bool:
    """End that: the thresholds become those that glibc's own reach, since it cannot be told to adapt them again."""
    trims = _set(_M_TRIM_THRESHOLD, 2 * _GREATEST_BYTES)
    return _set(_M_MMAP_THRESHOLD, _GREATEST_BYTES) and trims


def _set(name: int, num_bytes: int) -> bool:
    word = "mmap_threshold" if name == _M_MMAP_THRESHOLD else "trim_threshold"
    by_user = f"MALLOC_{word.upper()}_" in os.environ or word in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return not by_user and mallopt is not None and mallopt(name, num_bytes) == 1
