"""Wall-clock timers by phase, as `wall_clock_breakdown` prints them."""

import contextlib
import time
from collections.abc import Iterator

from deepspeed.accelerator import get_accelerator


class PhaseTimers:
    """Accumulates the time of named phases. Asynchronous devices are synchronized at both ends of a phase.

    Args:
        enabled: when False, `phase` costs nothing.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._elapsed_s: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        if not self.enabled:
            yield
            return
        accelerator = get_accelerator()
        accelerator.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            accelerator.synchronize()
            self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + time.perf_counter() - start

    def report(self, num_steps: int) -> str:
        """Milliseconds per step by phase since the last report, in one line; starts anew."""
        parts = [f"{name}: {elapsed_s / num_steps * 1e3:.2f}" for name, elapsed_s in self._elapsed_s.items()]
        self._elapsed_s.clear()
        return "time (ms) | " + " | ".join(parts)
