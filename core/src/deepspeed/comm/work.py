"""What there is to wait for: torch works as one, and nothing. Used by the exchanges and by `comm.py`."""

from collections.abc import Sequence

import torch.distributed as torch_dist

from deepspeed.comm.backend import Work


class _Done:
    """Nothing to wait for: one rank, or nothing to exchange."""

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


class _Works:
    """Several torch works, waited for once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[torch_dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each, in the order of issue."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()


def as_work(*works: torch_dist.Work | None) -> Work:
    """Several torch works (None: already done) as one."""
    return _Works([work for work in works if work is not None])
