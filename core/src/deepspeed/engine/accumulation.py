"""Gradient accumulation: which backward completes a step.

The engine's default schedule; a pipeline engine puts its own in its place.
"""

import contextlib
from collections.abc import Iterator

from deepspeed.zero.strategy import BackwardPlan


class Accumulation:
    """Counts micro-batches.

    Args:
        num_steps: micro-batches per optimizer step (`gradient_accumulation_steps`).
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.micro_steps = 0  # micro-batches that were stepped, over the whole run
        self._boundary: bool | None = None  # the user's word, which beats counting
        self._syncs = True

    def is_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.num_steps == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        self._boundary = is_boundary

    def plan(self, by_user: bool) -> BackwardPlan:
        """What the backward that begins is for. A plain `loss.backward()` has not been divided by `num_steps` yet."""
        return BackwardPlan(reduces=self._syncs and self.is_boundary(), factor=1.0 / self.num_steps if by_user else 1.0)

    def advance(self) -> None:
        self.micro_steps += 1

    @property
    def syncs(self) -> bool:
        return self._syncs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before
