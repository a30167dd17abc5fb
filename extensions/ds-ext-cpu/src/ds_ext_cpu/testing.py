"""Test helpers: `ccl` groups among the reused ranks of `deepspeed.testing.distributed`."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as torch_dist

from ds_ext_cpu.comm import ccl

TRANSPORTS = ("read", "shm")
_LONG = timedelta(seconds=60)


@contextlib.contextmanager
def ccl_group(
    transport: str = "", timeout: timedelta = _LONG, ranks: Sequence[int] | None = None
) -> Iterator[torch_dist.ProcessGroup]:
    """Create a `ccl` group in addition to the ranks' gloo group. All ranks enter and leave the context together."""
    os.environ[ccl.TRANSPORT_VARIABLE] = transport
    ccl.register()
    group = torch_dist.new_group(ranks, timeout=timeout, backend="ccl")
    try:
        yield group
        torch_dist.barrier()  # over gloo
    finally:
        del os.environ[ccl.TRANSPORT_VARIABLE]
        if isinstance(group, torch_dist.ProcessGroup):
            torch_dist.destroy_process_group(group)


def raised_by(call: Callable[[], object]) -> str:
    """Return the text of the DistError that `call` raises, or "". All ranks call this; it ends in a barrier."""
    try:
        call()
        text = ""
    except torch_dist.DistError as error:
        text = str(error)
    torch_dist.barrier()  # over gloo
    return text
