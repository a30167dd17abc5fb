"""`same_random_numbers`: ranks that share a model sample the same tokens."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.values import all_gather_values


@contextmanager
def same_random_numbers(group: ProcessGroup | None) -> Iterator[None]:
    """Inside, the ranks of `group` draw the same random numbers: from their state, if all have the same, else from a
    new one, and then from their own again. A collective of `group`; None: one rank, nothing changes."""
    if group is None:
        yield
        return
    accelerator = get_accelerator()
    state = accelerator.get_rng_state()
    mine = [hashlib.sha256(bytes(state.tolist())).hexdigest(), int(torch.randint(2**62, (), device="cpu"))]
    theirs = all_gather_values(mine, group)
    differs = len({digest for digest, _ in theirs}) > 1
    if differs:
        accelerator.manual_seed(theirs[0][1])
    else:
        accelerator.set_rng_state(state)  # the number drawn above counts for nothing
    try:
        yield
    finally:
        if differs:
            accelerator.set_rng_state(state)
