"""Tune glibc's malloc: return freed blocks to the system while a model is built, and keep them during training.

glibc maps blocks above a threshold directly from the system, and unmaps them when they are freed. By default glibc
raises this threshold, up to 32 MiB, to the size of each unmapped block (man 3 mallopt). This default suits training:
every step allocates and frees blocks of the same sizes, and a block that stays in the heap costs no page faults. Stage
3 of a GPT with 25 M parameters takes 0.8 times as long as with a threshold of 1 MiB, and uses the same memory.

The default does not suit zero.Init, which frees whole parameters one after the other: small long-lived objects fill the
gaps in the heap, so the next parameter does not fit there, and the heap grows with every layer.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# The maximum of glibc's dynamic mmap threshold. The trim threshold is twice the mmap threshold, as in glibc.
_GREATEST_BYTES = 32 << 20


def return_large_blocks(threshold_bytes: int) -> bool:
    """Fix the threshold for the process. Returns whether it was set.

    It is not set if the environment sets one (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`), or with another C library.
    """
    return _set(_M_MMAP_THRESHOLD, threshold_bytes)


def keep_freed_blocks() -> bool:
    """Set both thresholds to the maxima of glibc's dynamic ones: glibc cannot adapt thresholds that were set before."""
    trims = _set(_M_TRIM_THRESHOLD, 2 * _GREATEST_BYTES)
    return _set(_M_MMAP_THRESHOLD, _GREATEST_BYTES) and trims


def _set(name: int, num_bytes: int) -> bool:
    word = "mmap_threshold" if name == _M_MMAP_THRESHOLD else "trim_threshold"
    by_user = f"MALLOC_{word.upper()}_" in os.environ or word in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return not by_user and mallopt is not None and mallopt(name, num_bytes) == 1
