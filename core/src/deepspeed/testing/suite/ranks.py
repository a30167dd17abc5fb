"""Ranks whose accelerator is the current one here, for the tests of communication and training.

They join over the accelerator's own library (`DS_ACCELERATOR` tells `deepspeed.testing.distributed` so), and each takes
the device of its local rank.
"""

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator.current import PLAIN, VARIABLE, explain
from deepspeed.testing import requirements
from deepspeed.testing.distributed import run_ranks

# A first kernel or a first context may take long; nothing here depends on it.
_TIMEOUT_S = 300.0


def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` on each of `world_size` ranks; their results by rank. Skips the test where there can be no ranks."""
    (requirements.two_ranks if world_size > 1 else requirements.ranks).check()
    return run_ranks(world_size, fn, *args, timeout_s=_TIMEOUT_S, environment={VARIABLE: explain().plugin or PLAIN})


def most() -> int:
    """2, or 1 where two ranks cannot be had."""
    return 1 if requirements.two_ranks.unmet() else 2
