"""`ManyRanks`: what a thousand ranks ask of the job's store, counted in one process.

Each rank is a thread, and one of them runs at a time: that which is due first by a clock of their own, which sleeping
turns. So a wait of minutes takes no time, and counts are the same each time. Under a real `TCPStore` its server does
the work that it would do in a job. Used by `benchmarks/scale.py` and by tests of operations that must not grow.
"""

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as torch_dist
from torch.distributed import Store

from deepspeed.comm import failure, parted, values

T = TypeVar("T")
_STACK_BYTES = 512 << 10  # of a thread


class CountingStore:
    """A store that counts what is asked of it: operations by name, and bytes of keys and values in both directions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.operations: Counter[str] = Counter()
        self.num_bytes = 0

    @property
    def num_operations(self) -> int:
        """All that were asked."""
        return self.operations.total()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            answer = operation(*args)
            self.operations[name] += 1
            self.num_bytes += _size(args) + _size(answer)
            return answer

        return ask


def _size(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 0 if value is None else 8


class _OfEachRank(Counter[Any]):
    """A counter of a process, where each rank counts for itself."""

    def __init__(self, rank: Callable[[], int]) -> None:
        super().__init__()
        self._rank = rank

    def __getitem__(self, key: Any) -> int:
        return super().__getitem__((self._rank(), key))

    def __setitem__(self, key: Any, number: int) -> None:
        super().__setitem__((self._rank(), key), number)

    def __missing__(self, key: Any) -> int:
        return 0


class ManyRanks:
    """Simulated ranks, over one store.

    Args:
        world_size: how many.
        store: of the job; default: one in this process.
    """

    def __init__(self, world_size: int, store: Store | None = None) -> None:
        self.world_size = world_size
        self.store = CountingStore(torch_dist.HashStore() if store is None else store)
        #: by every rank: its notes say so
        self.num_started: dict[str, int] = {}
        self._local = threading.local()
        self._due: list[tuple[float, int]] = []  # when each rank goes on
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._now_s = 0.0

    @contextmanager
    def simulated(self, *clocked: ModuleType) -> Iterator[None]:
        """Inside, `deepspeed.comm` asks this store, as the rank whose thread it is, by the clock of these ranks.

        Args:
            clocked: other modules that have `time` from this clock.
        """
        time = SimpleNamespace(monotonic=self.now_s, sleep=self.sleep)
        with ExitStack() as patches:
            changes: list[Any] = [patch.object(module, "time", time) for module in (values, *clocked)]
            changes += [
                patch.object(torch_dist.distributed_c10d, "_get_default_store", lambda: self.store),
                patch.object(torch_dist, "get_rank", lambda *_: self.rank()),
                patch.object(parted, "_counted", set()),
                patch.object(parted, "_all_started", lambda: self.num_started),
                patch.object(failure, "num_told", 0),
                patch.object(values, "_num_made", _OfEachRank(self.rank)),
                patch.object(failure, "_num_records", _OfEachRank(self.rank)),
            ]
            for change in changes:
                patches.enter_context(change)
            yield

    def rank(self) -> int:
        """Whose thread this is."""
        return int(self._local.rank)

    def now_s(self) -> float:
        """The time since they began."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """The calling rank goes on after `seconds`, and others before."""
        rank = self.rank()
        heapq.heappush(self._due, (self._now_s + seconds, rank))
        self._go_on()
        self._turns[rank].acquire()

    def run(self, job: Callable[[int], T], starts_s: Sequence[float] | None = None) -> list[T]:
        """`job(rank)` of each rank, from `starts_s` on, by rank.

        Raises:
            RuntimeError: a rank failed; the first is named.
        """
        results: dict[int, T] = {}
        errors: list[str] = []
        self._now_s = 0.0

        def of_rank(rank: int) -> None:
            self._local.rank = rank
            self._turns[rank].acquire()
            try:
                results[rank] = job(rank)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller hears of it
                errors.append(f"rank {rank}: {type(error).__name__}: {error}")
            finally:
                self._go_on()

        former = threading.stack_size(_STACK_BYTES)
        try:
            threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.world_size)]
            self._due = sorted(zip(starts_s or [0.0] * self.world_size, range(self.world_size), strict=True))
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(former)
        self._go_on()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(f"{len(errors)} of {self.world_size} simulated ranks failed; {errors[0]}")
        return [results[rank] for rank in range(self.world_size)]

    def _go_on(self) -> None:
        if self._due:
            self._now_s, rank = heapq.heappop(self._due)
            self._turns[rank].release()
