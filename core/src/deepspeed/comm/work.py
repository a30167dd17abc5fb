"""Works: those of torch as one, one with a local step after it, and one that is done."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as torch_dist

from deepspeed.comm.backend import Work


class _Done:
    """Nothing to wait for: one rank, or no elements."""

    def poll(self) -> bool:
        """Always done."""
        return True

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


class _Works:
    """Several torch works, waited for once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[torch_dist.Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        """Whether all are completed; an error is for `wait` to raise."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for each, in the order of issue."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()

    def ends_within(self, limit: timedelta) -> bool:
        """Wait for so long at most for each. Returns whether all are done; raises the error of one that failed."""
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError:  # its own, or that of the limit
                if not work.is_completed():
                    return False
                work.wait()
        return True


class Followed:
    """A work and the step of this rank that follows it: a sum of what came, a copy to where it belongs.

    Args:
        work: in flight.
        step: makes the result, once.
        in_poll: the step may run in `poll`, because it works on host memory and needs no stream.
    """

    __slots__ = ("_in_poll", "_step", "work")

    def __init__(self, work: Work, step: Callable[[], None], *, in_poll: bool) -> None:
        self.work = work
        self._step: Callable[[], None] | None = step
        self._in_poll = in_poll

    def poll(self) -> bool:
        """Whether the work is done; then also make the step where that may be."""
        if not self.work.poll():
            return False
        if self._in_poll:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait, and make the step if it was not made yet."""
        self.work.wait()
        step, self._step = self._step, None
        if step is not None:
            step()


def as_work(*works: torch_dist.Work | None) -> Work:
    """Several torch works (None: already done) as one."""
    return _Works([work for work in works if work is not None])


def ends_within(work: Work, limit: timedelta) -> bool:
    """`work.wait()` for a limited time, without the step that follows. Returns whether `wait` will return at once."""
    return all(part.ends_within(limit) for part in parts_of([work]) if isinstance(part, _Works))


def is_over(work: Work) -> bool:
    """Whether the works of torch that it is made of are completed, if with an error."""
    return all(part.poll() for part in parts_of([work]) if isinstance(part, _Works))


def parts_of(works: Sequence[Work]) -> list[Work]:
    """The works in flight that these are made of."""
    found: list[Work] = []
    for work in works:
        found += parts_of([work.work]) if isinstance(work, Followed) else [work]
    return found
