"""Times and memory by phase of a step, and the tables that `wall_clock_breakdown` and `memory_breakdown` print.

`see_memory_usage` prints one line about memory for training scripts. `flops_to_string` and similar functions format
numbers with units.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import StateError
from deepspeed.log import report
from deepspeed.profiling.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    STEP_GLOBAL_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
)

#: phase -> its timer. `backward` is `backward_inner` (autograd and overlapped collectives) plus the wait for the
#: collectives at its end. `backward_allreduce` also includes the wait before the update.
PHASES = {
    "forward": FORWARD_GLOBAL_TIMER,
    "backward": BACKWARD_GLOBAL_TIMER,
    "backward_inner": BACKWARD_INNER_GLOBAL_TIMER,
    "backward_allreduce": BACKWARD_REDUCE_GLOBAL_TIMER,
    "step": STEP_GLOBAL_TIMER,
}

#: phases after which memory is read: not nested ones, where the reading would count as time of the outer phase
_MEMORY_PHASES = ("forward", "backward", "step")

#: (phase -> profiler range around its body, function to call after each step), while `name_phases` is open
_names: tuple[Callable[[str], AbstractContextManager[Any]], Callable[[], None] | None] | None = None
_MIB = 2**20
_GIB = 2**30
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_OF_PARAMS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_PRECISION = 2


@dataclass
class Window:
    """A `Window` holds, by phase, the total milliseconds since the last table, and the bytes of memory."""

    num_steps: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # allocated after the phase, peak so far


class Breakdown:
    """Measures the phases of steps. The engine wraps each phase in `phase(name)`; its observers read the results.

    Args:
        times: measure time (`wall_clock_breakdown`).
        memory: read the device's memory after each phase (`memory_breakdown`).
    """

    def __init__(self, *, times: bool, memory: bool) -> None:
        self.enabled = times or memory
        #: phase name -> context that measures its body; a nested context of the same phase has no effect
        self.phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.times = times
        self.memory = memory
        self.timers: SynchronizedWallClockTimer | NoopTimer = SynchronizedWallClockTimer() if times else NoopTimer()
        self._window = Window()
        self.choose_phase()

    def show_names(self) -> None:
        """Let `name_phases` name these phases from now on."""
        _shown.add(self)
        self.choose_phase()

    def choose_phase(self) -> None:
        """Select the implementation of `phase`: named, measured, or a null context."""
        is_named = _names is not None and self in _shown
        self.counts_steps = self.enabled or is_named  #: whether `end_step` has anything to do
        self.phase = self._named if is_named else self._measured if self.enabled else nullcontext

    def _measured(self, name: str) -> AbstractContextManager[Any]:
        return _Phase(self, name)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        assert _names is not None
        with _names[0](name), self._measured(name) if self.enabled else nullcontext():
            yield

    def end_step(self) -> None:
        """Count one optimizer step."""
        self._window.num_steps += 1
        if _names is not None and _names[1] is not None:
            _names[1]()

    def take_times(self) -> dict[str, float]:
        """Return milliseconds by phase since the last call. Waits for the device. Omits phases that did not run."""
        times_ms = {
            phase: self.timers(timer).elapsed() for phase, timer in PHASES.items() if timer in self.timers.get_timers()
        }
        for phase, elapsed_ms in times_ms.items():
            self._window.times_ms[phase] = self._window.times_ms.get(phase, 0.0) + elapsed_ms
        return times_ms

    def take_window(self) -> Window:
        """Return the measurements since the last call. Waits for the device."""
        self.take_times()
        window, self._window = self._window, Window()
        return window

    def read_memory(self, phase: str) -> None:
        """Record the device's memory at the end of a phase."""
        accelerator = get_accelerator()
        self._window.memory_bytes[phase] = (accelerator.memory_allocated(), accelerator.max_memory_allocated())


_shown: WeakSet[Breakdown] = WeakSet()


@contextmanager
def name_phases(
    range_of: Callable[[str], AbstractContextManager[Any]], step_ended: Callable[[], None] | None
) -> Iterator[None]:
    """Put `range_of(phase)` around the phases of every engine of this process, including later engines.

    Args:
        step_ended: called after each optimizer step.

    Raises:
        StateError: another `name_phases` is open.
    """
    global _names
    if _names is not None:
        raise StateError("a trace of this process is open, or mark_phases; end it before another one begins")
    _names = (range_of, step_ended)
    try:
        for breakdown in _shown:
            breakdown.choose_phase()
        yield
    finally:
        _names = None
        for breakdown in _shown:
            breakdown.choose_phase()


class _Phase:
    """The context of one `Breakdown.phase`."""

    def __init__(self, breakdown: Breakdown, name: str) -> None:
        self._breakdown = breakdown
        self._name = name
        self._timer: Any = breakdown.timers(PHASES[name])
        self._is_inside = getattr(self._timer, "started_", False)

    def __enter__(self) -> None:
        if not self._is_inside:
            self._timer.start()

    def __exit__(self, *exception: object) -> None:
        if self._is_inside:
            return
        self._timer.stop()
        if self._breakdown.memory and self._name in _MEMORY_PHASES:
            self._breakdown.read_memory(self._name)


def step_table(window: Window, times_by_rank: Sequence[Mapping[str, float]]) -> str:
    """Return the table of a window as text: milliseconds per step over ranks, and this rank's memory.

    Args:
        window: this rank's window.
        times_by_rank: `Window.times_ms` of each rank, or only of this rank.
    """
    num_steps, num_ranks = max(1, window.num_steps), len(times_by_rank)
    phases = [phase for phase in PHASES if phase in window.times_ms or phase in window.memory_bytes]
    columns = ["phase"]
    if window.times_ms:
        columns += ["ms", "min", "max"] if num_ranks > 1 else ["ms"]
    if window.memory_bytes:
        columns += ["allocated MiB", "peak MiB"]
    rows = []
    for phase in phases:
        row = [phase]
        if window.times_ms:
            per_step = [times.get(phase, 0.0) / num_steps for times in times_by_rank]
            shown = [sum(per_step) / num_ranks, min(per_step), max(per_step)] if num_ranks > 1 else per_step
            row += [f"{elapsed_ms:.2f}" for elapsed_ms in shown]
        if window.memory_bytes:
            read = window.memory_bytes.get(phase)
            row += [f"{num_bytes / _MIB:.1f}" for num_bytes in read] if read else ["", ""]
        rows.append(row)
    ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
    return text_table(f"per step, mean of {num_steps}{ranks}", columns, rows)


def forward_table(forward_ms: float, parts_ms: Mapping[str, float]) -> str:
    """Return a table of the parts of a forward with their shares; `parts_ms` is timer name -> milliseconds."""
    rows = [["forward", f"{forward_ms:.2f}", "100.0"]]
    rows += [
        [f"  {name}", f"{part_ms:.2f}", f"{100 * part_ms / forward_ms:.1f}" if forward_ms > 0 else "-"]
        for name, part_ms in parts_ms.items()
    ]
    return text_table("forward", ["part", "ms", "%"], rows)


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, as wide as its rows. The first column is left-aligned."""
    from rich import box  # late: rich is slow to import and rarely needed
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ASCII)  # ASCII, because any program may read the log
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A fixed width: a log is not a terminal, and no column may be truncated.
    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def see_memory_usage(message: str, force: bool = False, ranks: tuple[int, ...] = (0,)) -> None:
    """Print the allocated memory of the device and the used memory of the host in GiB, and reset the peak.

    Args:
        message: text before the numbers.
        force: False prints nothing, so that calls can stay in a program and be enabled in one place.
        ranks: global ranks that print.
    """
    if not force:
        return
    import psutil  # late: few runs need it

    accelerator = get_accelerator()
    host = psutil.virtual_memory()
    report(
        f"{message} | allocated {accelerator.memory_allocated() / _GIB:.2f} GiB, "
        f"peak {accelerator.max_memory_allocated() / _GIB:.2f} GiB | "
        f"host {(host.total - host.available) / _GIB:.2f} GiB, {host.percent}%",
        ranks,
    )
    accelerator.reset_peak_memory_stats()


def number_to_string(num: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format a number with a unit prefix: `"12.35 K"`.

    Args:
        num: any number.
        units: the prefix: T, G, M, K, the empty string, m or u; None: the largest that `num` reaches.
        precision: digits after the decimal point.

    Raises:
        ValueError: `units` is another prefix.
    """
    return _with_prefix(num, units, precision, _SCALES)


def params_to_string(params_num: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format a number of parameters: `"2.35 B"`. See `number_to_string`; the prefix for 10^9 is B."""
    return _with_prefix(params_num, units and units.replace("G", "B"), precision, _OF_PARAMS).rstrip()


def macs_to_string(macs: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format multiply-accumulates: `"3.14 GMACs"`. See `number_to_string`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format operations per second: `"81.9 TFLOPS"`. See `number_to_string`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format bytes in powers of 1000: `"1.5 MB"`. See `number_to_string`."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Format seconds: `"76.67 ms"`. See `number_to_string`; `units` may also be the full unit (`"ms"`)."""
    return f"{number_to_string(duration, units and units.removesuffix('s'), precision)}s"


def _with_prefix(num: float, units: str | None, precision: int, scales: Mapping[str, float]) -> str:
    if units is None:
        # a number below the smallest prefix is shown with the smallest prefix
        units = next((prefix for prefix, scale in scales.items() if abs(num) >= scale), "u") if num else ""
    if units not in scales:
        raise ValueError(f"units: found {units!r}; choose one of {', '.join(map(repr, scales))}")
    return f"{round(num / scales[units], precision):g} {units}"


def rate(flops: float, duration_s: float) -> str:
    """Format operations per second; "-" if no time was measured."""
    return flops_to_string(flops / duration_s) if duration_s > 0 else "-"
