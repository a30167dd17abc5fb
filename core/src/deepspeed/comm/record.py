"""The comms logger counts calls and sums their durations, per operation and message size.

While recording is on (config section `comms_logger`, or `comm.configure`), `comm.py` records every collective here, and
`RecordedGroup` records every collective of ZeRO. Durations are as seen by the calling host: a call with `async_op=True`
counts the time to start it; a collective of ZeRO counts the time to start it and the time in its `wait`.

`waited` sums how long this rank has waited for others; `watch.slow_rank_window` subtracts the sum from the time of a
step. Everything in a step that waits for a peer runs inside `waited`: collectives of ZeRO and pipeline messages (here,
and `point_to_point.py`), sums between hosts, and the synchronous operations of `deepspeed.comm`. On an asynchronous
device, the stopwatch measures how long the current stream stood still.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as torch_dist

from deepspeed.comm.backend import Capabilities, GroupBackend, Work, parts_of
from deepspeed.comm.values import all_gather_values
from deepspeed.log import logger, report
from deepspeed.profiling.timer import Stopwatch, create_stopwatch

_T = TypeVar("_T")


class Waits:
    """`Waits` measures the waits of this process. Without a watcher, a wait does not read the clock."""

    def __init__(self) -> None:
        self._watchers: WeakSet[object] = WeakSet()
        self._stopwatch: Stopwatch | None = None
        self._depth = 0
        self._total_ms = 0.0
        self._thread = 0  # the thread that runs the steps; waits of other threads do not count

    @property
    def is_watched(self) -> bool:
        """Whether there is a watcher."""
        return len(self._watchers) > 0

    def watch(self, watcher: object) -> None:
        """Measure waits of this thread from now on, until `watcher` dies or calls `unwatch`."""
        self._watchers.add(watcher)
        self._thread = threading.get_ident()
        if self._stopwatch is None:
            self._stopwatch = create_stopwatch()

    def unwatch(self, watcher: object) -> None:
        """Remove `watcher`."""
        self._watchers.discard(watcher)

    def begin(self) -> bool:
        """Begin a wait. Waits may nest.

        Returns:
            Whether the caller must call `end`.
        """
        if not self.is_watched or threading.get_ident() != self._thread:
            return False
        self._depth += 1
        if self._depth == 1 and self._stopwatch is not None:
            self._stopwatch.start()
        return True

    def end(self) -> None:
        """End a wait."""
        self._depth -= 1
        if self._depth == 0 and self._stopwatch is not None:
            self._stopwatch.stop()

    def total_ms(self, *, wait: bool) -> float:
        """Return the milliseconds of all waits so far.

        Args:
            wait: wait for the device; otherwise its most recent measurements may be missing.
        """
        if self._stopwatch is not None:
            self._total_ms += sum(self._stopwatch.collect(wait))
        return self._total_ms


waits = Waits()


def waited(call: Callable[[], _T]) -> _T:
    """Return `call()`, which waits for peers; `waits` measures it."""
    is_counted = waits.begin()
    try:
        return call()
    finally:
        if is_counted:
            waits.end()


_COLUMNS = (
    "Comm. Op",
    "Message Size",
    "Count",
    "Total Latency(ms)",
    "Avg Latency(ms)",
    "tput_avg (Gbps)",
    "busbw_avg (Gbps)",
)

_STRAGGLER_COLUMNS = (
    *("Comm. Op", "Message Size", "Count"),
    *("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)"),
)
_UNITS = ("B", "KB", "MB", "GB", "TB")
_ALL_REDUCES = frozenset({"all_reduce", "all_reduce_coalesced", "inference_all_reduce"})
_WITH_PARTS = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
        *("reduce_scatter", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single"),
    }
)

_F = TypeVar("_F", bound=Callable[..., Any])


class CommsLogger:
    """`CommsLogger` holds which operations to record, and the record so far, in DeepSpeed's format.

    `comms_dict[op][num_bytes]` is `[count, latencies in ms, algorithm bandwidths in Gbit/s, bus bandwidths in Gbit/s]`,
    with one entry of each list per call.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_all = True
        self.prof_ops: frozenset[str] = frozenset()
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}

    def configure(
        self,
        enabled: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: list[str] | None = None,
        verbose: bool | None = None,
        debug: bool | None = None,
    ) -> None:
        """Change the given settings; None leaves a setting unchanged."""
        self.enabled = self.enabled if enabled is None else enabled
        self.prof_all = self.prof_all if prof_all is None else prof_all
        self.prof_ops = self.prof_ops if prof_ops is None else frozenset(prof_ops)
        self.verbose = self.verbose if verbose is None else verbose
        self.debug = self.debug if debug is None else debug

    def wants(self, op: str, prof: bool) -> bool:
        """True if this call is to be recorded; `prof` is the caller's request to record it."""
        return self.enabled and (self.prof_all or prof or op in self.prof_ops)

    def add(self, op: str, num_bytes: int, duration_s: float) -> None:
        """Record one call."""
        row = self.comms_dict.setdefault(op, {}).setdefault(num_bytes, [0, [], [], []])
        row[0] += 1
        for column, value in zip(row[1:], (duration_s * 1e3, *_bandwidths(op, num_bytes, duration_s)), strict=True):
            column.append(value)
        if self.verbose:
            report(f"comm {op}: {num_bytes} bytes in {duration_s * 1e3:.3f} ms", ranks=[-1])

    def reset(self) -> None:
        """Forget the record."""
        self.comms_dict.clear()

    def table(self) -> str:
        """The record as text, with DeepSpeed's columns: an operation, and below it one line per message size."""
        return _table(_COLUMNS, self.figures())

    def figures(self) -> dict[str, dict[int, dict[str, float]]]:
        """The record as numbers: by operation and message size in bytes."""
        return {
            op: {
                num_bytes: {
                    "count": count,
                    "total_latency_ms": sum(latencies_ms),
                    "avg_latency_ms": sum(latencies_ms) / count,
                    "tput_avg_gbps": sum(tputs) / count,
                    "busbw_avg_gbps": sum(busbws) / count,
                }
                for num_bytes, (count, latencies_ms, tputs, busbws) in sorted(sizes.items())
            }
            for op, sizes in self.comms_dict.items()
        }

    def stragglers(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return how long this rank waited for the slowest, by operation and message size. A collective of all ranks.

        The shortest time of a call over the ranks counts as communication, since the last rank to arrive waits for no
        other. The rest of this rank's time is its wait (DeepSpeed, tutorial "Communication Logging"). Entries that the
        ranks did not call equally often are left out.
        """
        own = {op: {str(size): row[1] for size, row in sizes.items()} for op, sizes in self.comms_dict.items()}
        every = all_gather_values(own) if torch_dist.is_initialized() else [own]
        found: dict[str, dict[int, dict[str, float]]] = {}
        for op, sizes in own.items():
            for size, latencies_ms in sorted(sizes.items(), key=lambda item: int(item[0])):
                of_ranks = [record.get(op, {}).get(size, []) for record in every]
                if any(len(column) != len(latencies_ms) for column in of_ranks):
                    continue
                shortest_ms = sum(min(calls) for calls in zip(*of_ranks, strict=True))
                waited_ms, count = sum(latencies_ms) - shortest_ms, len(latencies_ms)
                found.setdefault(op, {})[int(size)] = {
                    "count": count,
                    "total_comm_lat_ms": shortest_ms,
                    "total_straggler_ms": waited_ms,
                    "avg_comm_lat_ms": shortest_ms / count,
                    "avg_straggler_ms": waited_ms / count,
                }
        return found


comms_logger = CommsLogger()


def recorded(function: _F) -> _F:
    """Decorate a public operation: record its calls, and add DeepSpeed's arguments `prof`, `log_name` and `debug`.

    When recording is off and waits have no watcher, this costs two attribute tests.
    """
    op = function.__name__

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **kwargs: Any) -> Any:
        if not comms_logger.enabled or not comms_logger.wants(op, prof):
            return waited(lambda: function(*args, **kwargs)) if waits.is_watched else function(*args, **kwargs)
        name = log_name or op
        if comms_logger.debug:
            name += f" | [Caller Func: {sys._getframe(1).f_code.co_name}]"
        start = time.perf_counter()
        result = waited(lambda: function(*args, **kwargs))
        comms_logger.add(name, _num_bytes(args) or _num_bytes(tuple(kwargs.values())), time.perf_counter() - start)
        return result

    return call  # type: ignore[return-value]


class RecordedGroup:
    """A `GroupBackend` whose collectives are recorded under the names of its methods. `group_backend()` returns it."""

    def __init__(self, backend: GroupBackend) -> None:
        self.recorded = backend
        self.name = backend.name
        self.group = backend.group
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.connect = backend.connect
        self.allocate = backend.allocate
        self.release = backend.release
        self.messages = getattr(backend, "messages", None)

    @property
    def capabilities(self) -> Capabilities:
        return self.recorded.capabilities

    @property
    def held_bytes(self) -> int:
        return self.recorded.held_bytes

    def all_reduce(self, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Recorded with the bytes of `full_N`."""
        return _recorded("all_reduce", full_N, lambda: self.recorded.all_reduce(full_N, tag=tag))

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Recorded with the bytes of `full_N`."""
        return _recorded("reduce_scatter", full_N, lambda: self.recorded.reduce_scatter(shard_S, full_N, tag=tag))

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Recorded with the bytes of `full_N`."""
        return _recorded("all_gather", full_N, lambda: self.recorded.all_gather(full_N, shard_S, tag=tag))

    def broadcast(self, tensor_N: torch.Tensor, source: int, *, tag: str | int | None = None) -> Work:
        """Recorded with the bytes of `tensor_N`."""
        return _recorded("broadcast", tensor_N, lambda: self.recorded.broadcast(tensor_N, source, tag=tag))

    def all_to_all(
        self,
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        output_numels: Sequence[int] | None = None,
        input_numels: Sequence[int] | None = None,
        *,
        tag: str | int | None = None,
    ) -> Work:
        """Recorded with the bytes of `output_N`."""
        return _recorded(
            "all_to_all",
            output_N,
            lambda: self.recorded.all_to_all(output_N, input_N, output_numels, input_numels, tag=tag),
        )

    def barrier(self) -> None:
        """Recorded with 0 bytes."""
        start = time.perf_counter()
        waited(self.recorded.barrier)
        if comms_logger.wants("barrier", prof=False):
            comms_logger.add("barrier", 0, time.perf_counter() - start)

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Abandon the backend's works. Abandoned works are not recorded."""
        self.recorded.abandon(unrecorded(works), failed=failed)


def plain(backend: GroupBackend) -> GroupBackend:
    """Return the backend inside a `RecordedGroup`, or `backend` itself."""
    return backend.recorded if isinstance(backend, RecordedGroup) else backend


def unrecorded(works: Sequence[Work]) -> list[Work]:
    """Return the works in flight as their backend made them, without the wrappers that record."""
    return [work.recorded if isinstance(work, _RecordedWork) else work for work in parts_of(works)]


class _RecordedWork:
    """A collective in flight; `wait` records it.

    Args:
        started_s: the time it took to start the collective; None: do not record.
    """

    def __init__(self, work: Work, op: str = "", num_bytes: int = 0, started_s: float | None = None) -> None:
        self.recorded = work
        self._op = op
        self._num_bytes = num_bytes
        self._spent_s = started_s

    def poll(self) -> bool:
        """Poll the recorded work."""
        return self.recorded.poll()

    def wait(self) -> None:
        """Wait. The first call records the collective."""
        start = time.perf_counter()
        waited(self.recorded.wait)
        spent_s, self._spent_s = self._spent_s, None
        if spent_s is not None:
            comms_logger.add(self._op, self._num_bytes, spent_s + time.perf_counter() - start)


def counted(work: Work) -> Work:
    """Return `work`, wrapped so that `waits` measures its `wait` if `waits` has a watcher."""
    return _RecordedWork(work) if waits.is_watched else work


def _recorded(op: str, tensor_N: torch.Tensor, call: Callable[[], Work]) -> Work:
    if not comms_logger.wants(op, prof=False):
        return counted(waited(call))
    start = time.perf_counter()
    work = waited(call)
    return _RecordedWork(work, op, tensor_N.nbytes, time.perf_counter() - start)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> str | dict[str, Any]:
    """Print the table on rank 0 and return it. Called by users at the end of training.

    Args:
        show_straggler: every rank prints its table, and a second table of how long it waited for the slowest rank
            (`CommsLogger.stragglers`). This is a collective: every rank must call it.
        return_dict: return numbers instead of the text: `{"summary": {op: {num_bytes: {"count", "total_latency_ms",
            "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps"}}}, "straggler_analysis": None or {op: {num_bytes:
            {"count", "total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms"}}},
            "metadata": {"world_size", "rank"}}`.

    Raises:
        CommError: with `show_straggler`, a rank did not call it or has ended.
    """
    if not comms_logger.enabled:
        logger.warning("comm.log_summary: nothing was recorded; set comms_logger.enabled in the config first")
    text, stragglers = comms_logger.table(), None
    if show_straggler:
        stragglers = comms_logger.stragglers()
        text += "\n" + _straggler_table(stragglers)
    report(f"communication so far\n{text}", ranks=[-1] if show_straggler else [0])
    if not return_dict:
        return text
    is_job = torch_dist.is_initialized()
    job = {"world_size": torch_dist.get_world_size() if is_job else 1, "rank": torch_dist.get_rank() if is_job else 0}
    return {"summary": comms_logger.figures(), "straggler_analysis": stragglers, "metadata": job}


def _straggler_table(stragglers: dict[str, dict[int, dict[str, float]]]) -> str:
    title = "Breakdown with straggler effect"
    return "\n".join(["_" * len(title), title, "-" * len(title), _table(_STRAGGLER_COLUMNS, stragglers)])


def _table(columns: Sequence[str], figures: dict[str, dict[int, dict[str, float]]]) -> str:
    """Format one line per operation, and below it one line per message size with the count and the other figures."""
    lines = [tuple(columns)]
    for op, sizes in figures.items():
        lines.append((op,))
        for num_bytes, (count, *numbers) in ((size, row.values()) for size, row in sizes.items()):
            lines.append(("", readable(num_bytes), str(count), *(f"{number:.2f}" for number in numbers)))
    return "\n".join("".join(f"{cell: <20}" for cell in line).rstrip() for line in lines)


def _bandwidths(op: str, num_bytes: int, duration_s: float) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in Gbit/s. Bus bandwidth is the load of a link, comparable with its peak.

    With W ranks in the world, a link carries 2 (W - 1) / W of the bytes of an all-reduce, (W - 1) / W of the bytes of a
    collective with one part per rank, and all bytes of other operations.
    """
    num_ranks = torch_dist.get_world_size() if torch_dist.is_initialized() else 1
    rate = num_bytes * 8 / max(duration_s, 1e-9) / 1e9
    name = op.partition(" ")[0]
    if name in _ALL_REDUCES:
        return 2 * rate, 2 * rate * (num_ranks - 1) / num_ranks
    return rate, rate * (num_ranks - 1) / num_ranks if name in _WITH_PARTS else rate


def readable(num_bytes: int) -> str:
    """Format a number of bytes in the largest unit that leaves at least 1: 98.25 MB."""
    size, units = float(num_bytes), iter(_UNITS)
    unit = next(units)
    while size >= 1024 and unit != _UNITS[-1]:
        size, unit = size / 1024, next(units)
    return f"{round(size, 2)} {unit}"


def _num_bytes(values: tuple[Any, ...]) -> int:
    """Return the bytes of the largest tensor or list of tensors, which is the whole message of a gather or scatter."""
    largest = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            size = sum(t.numel() * t.element_size() for t in value if isinstance(t, torch.Tensor))
        else:
            continue
        largest = max(largest, size)
    return largest
