"""Times and memory by phase of a step, and the tables that `wall_clock_breakdown` and `memory_breakdown` print.

`see_memory_usage` prints one line about memory where a training script asks for it. `flops_to_string` and its kin write
numbers with units, as the tables have them.
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

#: phase -> its timer. `backward` is the sum of `backward_inner` (autograd, with the collectives it hides) and of the
#: collective that is waited for at its end; what is waited for before the update is in `backward_allreduce` too.
PHASES = {
    "forward": FORWARD_GLOBAL_TIMER,
    "backward": BACKWARD_GLOBAL_TIMER,
    "backward_inner": BACKWARD_INNER_GLOBAL_TIMER,
    "backward_allreduce": BACKWARD_REDUCE_GLOBAL_TIMER,
    "step": STEP_GLOBAL_TIMER,
}

#: after which memory is read: those that lie in no other, whose time the reading would be counted in
_MEMORY_PHASES = ("forward", "backward", "step")

#: phase -> a range of a profiler around its body, and what is called after each step; while `name_phases` is open
_names: tuple[Callable[[str], AbstractContextManager[Any]], Callable[[], None] | None] | None = None
_MIB = 2**20
_GIB = 2**30
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_OF_PARAMS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_PRECISION = 2


@dataclass
class Window:
    """A `Window` holds, by phase, the milliseconds of all steps since the last table, and the bytes of memory."""

    num_steps: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # allocated after the phase, peak so far


class Breakdown:
    """Measures the phases of steps. The engine wraps each in `phase(name)`; its observers read the results.

    Args:
        times: measure time (`wall_clock_breakdown`).
        memory: read the device's memory after each phase (`memory_breakdown`).
    """

    def __init__(self, *, times: bool, memory: bool) -> None:
        self.enabled = times or memory
        #: called with a phase's name, a context that measures its body; one inside of the same phase counts with it
        self.phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.times = times
        self.memory = memory
        self.timers: SynchronizedWallClockTimer | NoopTimer = SynchronizedWallClockTimer() if times else NoopTimer()
        self._window = Window()
        self.choose_phase()

    def show_names(self) -> None:
        """From now on `name_phases` names these phases."""
        _shown.add(self)
        self.choose_phase()

    def choose_phase(self) -> None:
        """Make `phase` do what is wanted of it now, and nothing where nothing is."""
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
        """One optimizer step more."""
        self._window.num_steps += 1
        if _names is not None and _names[1] is not None:
            _names[1]()

    def take_times(self) -> dict[str, float]:
        """Milliseconds by phase since the last call; waits for the device. Phases that were not met are left out."""
        times_ms = {
            phase: self.timers(timer).elapsed() for phase, timer in PHASES.items() if timer in self.timers.get_timers()
        }
        for phase, elapsed_ms in times_ms.items():
            self._window.times_ms[phase] = self._window.times_ms.get(phase, 0.0) + elapsed_ms
        return times_ms

    def take_window(self) -> Window:
        """Return what was measured since the last call; waits for the device."""
        self.take_times()
        window, self._window = self._window, Window()
        return window

    def read_memory(self, phase: str) -> None:
        """Note the device's memory at the end of a phase."""
        accelerator = get_accelerator()
        self._window.memory_bytes[phase] = (accelerator.memory_allocated(), accelerator.max_memory_allocated())


_shown: WeakSet[Breakdown] = WeakSet()


@contextmanager
def name_phases(
    range_of: Callable[[str], AbstractContextManager[Any]], step_ended: Callable[[], None] | None
) -> Iterator[None]:
    """Put `range_of(phase)` around the phases of every engine of this process, those of later engines too.

    Args:
        step_ended: is called after each optimizer step.

    Raises:
        StateError: another one is open.
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
    """One body of `Breakdown.phase`."""

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
    """The table of a window as text: milliseconds per step, over ranks, and this rank's memory.

    Args:
        window: this rank's.
        times_by_rank: `Window.times_ms` of each rank, or of this one only.
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
    """The parts of a forward as text, each with its share; `parts_ms` by the names of their timers."""
    rows = [["forward", f"{forward_ms:.2f}", "100.0"]]
    rows += [
        [f"  {name}", f"{part_ms:.2f}", f"{100 * part_ms / forward_ms:.1f}" if forward_ms > 0 else "-"]
        for name, part_ms in parts_ms.items()
    ]
    return text_table("forward", ["part", "ms", "%"], rows)


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, as wide as its rows; the first column is left-aligned."""
    from rich import box  # late: rich is slow to import and rarely needed
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ASCII)  # logs are read anywhere
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A width of its own: a log is not a terminal, and no column may be cut.
    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def see_memory_usage(message: str, force: bool = False, ranks: tuple[int, ...] = (0,)) -> None:
    """Print what the device has allocated and what the host has in use, in GiB, and start a new peak.

    Args:
        message: what comes before the figures.
        force: False prints nothing, as documented: calls may stay in a program and be switched on in one place.
        ranks: global ranks that print.
    """
    if not force:
        return
    import psutil  # late: few runs ask for it

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
    """Return a number with the prefix of its size: `"12.35 K"`.

    Args:
        num: any number.
        units: the prefix, one of T, G, M, K, the empty string, m, u; None: the largest that `num` reaches.
        precision: digits after the point.

    Raises:
        ValueError: `units` is another prefix.
    """
    return _with_prefix(num, units, precision, _SCALES)


def params_to_string(params_num: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return a number of parameters: `"2.35 B"`. `units` as in `number_to_string`, with B for 10^9."""
    return _with_prefix(params_num, units and units.replace("G", "B"), precision, _OF_PARAMS).rstrip()


def macs_to_string(macs: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return multiply-accumulates: `"3.14 GMACs"`. Arguments as in `number_to_string`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return operations per second: `"81.9 TFLOPS"`. Arguments as in `number_to_string`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return bytes in powers of 1000: `"1.5 MB"`. Arguments as in `number_to_string`."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return seconds: `"76.67 ms"`. Arguments as in `number_to_string`; the unit itself (`"ms"`) is taken too."""
    return f"{number_to_string(duration, units and units.removesuffix('s'), precision)}s"


def _with_prefix(num: float, units: str | None, precision: int, scales: Mapping[str, float]) -> str:
    if units is None:
        # what is smaller than the smallest prefix is shown in it
        units = next((prefix for prefix, scale in scales.items() if abs(num) >= scale), "u") if num else ""
    if units not in scales:
        raise ValueError(f"units: found {units!r}; choose one of {', '.join(map(repr, scales))}")
    return f"{round(num / scales[units], precision):g} {units}"


def rate(flops: float, duration_s: float) -> str:
    """Operations per second as text; a dash where no time was measured."""
    return flops_to_string(flops / duration_s) if duration_s > 0 else "-"
