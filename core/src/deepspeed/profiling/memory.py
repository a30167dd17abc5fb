"""`see_memory_usage`: one line about device and host memory, where a training script asks for it."""

import psutil

from deepspeed.accelerator import get_accelerator
from deepspeed.log import report

_GIB = 2**30


def see_memory_usage(message: str, force: bool = False, ranks: tuple[int, ...] = (0,)) -> None:
    """Print what the device has allocated and what the host has in use, in GiB, and start a new peak.

    Args:
        message: what comes before the figures.
        force: False prints nothing, as documented: calls may stay in a program and be switched on in one place.
        ranks: global ranks that print.
    """
    if not force:
        return
    accelerator = get_accelerator()
    host = psutil.virtual_memory()
    report(
        f"{message} | allocated {accelerator.memory_allocated() / _GIB:.2f} GiB, "
        f"peak {accelerator.max_memory_allocated() / _GIB:.2f} GiB | "
        f"host {(host.total - host.available) / _GIB:.2f} GiB, {host.percent}%",
        ranks,
    )
    accelerator.reset_peak_memory_stats()
