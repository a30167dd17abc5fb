"""`ManyRanks` counts the store operations of a thousand simulated ranks in one process.

Each rank is a thread, and one thread runs at a time: the one that is due first by a simulated clock, which `sleep`
advances. So a wait of minutes takes no time, and counts are reproducible. With a real `TCPStore`, the server does the
same work as in a job. `benchmarks/scale.py` and tests of the growth of operation counts use it.
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
    """A store that counts operations by name, and the bytes of keys and values in both directions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.operations: Counter[str] = Counter()
        self.num_bytes = 0

    @property
    def num_operations(self) -> int:
        """Return the total number of operations."""
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
    """A counter with separate counts for each simulated rank."""

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
        world_size: number of ranks.
        store: store of the job; default: one in this process.
    """

    def __init__(self, world_size: int, store: Store | None = None) -> None:
        self.world_size = world_size
        self.store = CountingStore(torch_dist.HashStore() if store is None else store)
        #: by every rank: its notes say so
        self.num_started: dict[str, int] = {}
        self._local = threading.local()
        self._due: list[tuple[float, int]] = []  # (time, rank) of the next turns
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._now_s = 0.0

    @contextmanager
    def simulated(self, *clocked: ModuleType) -> Iterator[None]:
        """Let `deepspeed.comm` use this store, the rank of the current thread and the simulated clock in the block.

        Args:
            clocked: other modules whose `time` is replaced by this clock.
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
        """Return the rank of the current thread."""
        return int(self._local.rank)

    def now_s(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Pause the calling rank for `seconds` of simulated time, while others run."""
        rank = self.rank()
        heapq.heappush(self._due, (self._now_s + seconds, rank))
        self._go_on()
        self._turns[rank].acquire()

    def run(self, job: Callable[[int], T], starts_s: Sequence[float] | None = None) -> list[T]:
        """Run `job(rank)` on each rank, starting at `starts_s`, and return the results by rank.

        Raises:
            RuntimeError: a rank failed; the message names the first one.
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
