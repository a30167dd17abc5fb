"""Output of a search: a table that grows with each trial, a summary by stage, and a plot."""

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deepspeed.autotuning.scheduler import TrialResult
from deepspeed.autotuning.space import STAGE
from deepspeed.autotuning.tuners import MICRO_BATCH
from deepspeed.errors import counted

_MIB = 2**20
_UNFOLDED = 10_000  # columns
_COLUMNS = ("trial", "samples/s", "ms/step", "memory", "took", "")


def value_of(result: TrialResult, metric: str) -> float | None:
    """Return the value of the metric; None if the trial failed, or counted no operations."""
    name = "FLOPS_per_gpu" if metric.lower() == "flops" else metric
    value = result.metrics.get(name)
    return float(value) if value else None


def score_of(result: TrialResult, metric: str) -> float | None:
    """Return a score that is larger for better trials."""
    value = value_of(result, metric)
    return 1 / value if value and metric == "latency" else value


class LiveTable:
    """A table of trials, as a context manager. On a terminal it is redrawn for each trial; elsewhere a line is added.

    Args:
        metric: the metric of the search.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._rows: list[tuple[TrialResult, bool]] = []
        self._running = ""
        wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
        self._console = Console(width=_UNFOLDED if wide else None, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.start()
        else:
            self.say(_line(_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._running = ""
        if self._live is not None:
            self._draw()
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        self._console.print(text, soft_wrap=True)

    def begin(self, name: str) -> None:
        """Show that a trial has started."""
        self._running = name
        self._draw()

    def add(self, result: TrialResult, *, is_best: bool) -> None:
        """Add the result of a trial."""
        self._running = ""
        self._rows.append((result, is_best))
        if self._live is None:
            self.say(_line(self._cells(result, is_best=is_best)))
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        table = Table(caption=f"running {self._running}" if self._running else None, caption_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("trial", "") else "right", overflow="fold")
        best = max((at for at, (_, is_best) in enumerate(self._rows) if is_best), default=-1)
        for at, (result, _) in enumerate(self._rows):
            table.add_row(*self._cells(result, is_best=at == best), style="bold" if at == best else None)
        self._live.update(table, refresh=True)

    def _cells(self, result: TrialResult, *, is_best: bool) -> list[str]:
        metrics = result.metrics
        if not metrics:
            return [result.name, "-", "-", "-", f"{result.seconds:.0f} s", result.reason]
        operations = [f"{metrics['FLOPS_per_gpu']:.3g} FLOPS"] if "FLOPS_per_gpu" in metrics else []
        notes = [*operations, *(["best so far"] if is_best else []), *(["a former result"] if result.is_reused else [])]
        return [
            result.name,
            f"{metrics['throughput']:.1f}",
            f"{metrics['latency']:.1f}",
            f"{metrics['peak_memory'] / _MIB:.0f} MiB",
            f"{result.seconds:.0f} s",
            ", ".join(notes),
        ]


def _line(cells: Sequence[str]) -> str:
    name, *figures, note = cells
    return f"{name:<28} {' '.join(f'{figure:>10}' for figure in figures)}  {note}".rstrip()


def summary(results: Sequence[TrialResult], metric: str, seconds: float) -> str:
    """Return the best result of each stage and of all, in the format of DeepSpeed's `summary.txt`."""
    spaces: dict[str, list[TrialResult]] = defaultdict(list)
    for result in results:
        spaces[f"z{result.settings[STAGE]}"].append(result)
    lines = [
        "| tuning_space | num_experiments | best_metric_val | best_exp_name |",
        "| :----------- | --------------: | --------------: | :------------ |",
    ]
    for name, some in [*sorted(spaces.items()), ("global", list(results))]:
        best = best_of(some, metric)
        value = value_of(best, metric) if best is not None else None
        shown = "-" if value is None else f"{value:.6g}"
        lines.append(f"| {name:<12} | {len(some):>15} | {shown:>15} | {best.name if best is not None else '-'} |")
    lines += ["", f"Tuning completed in {seconds:.1f} s. Total number of experiments: {len(results)}."]
    return "\n".join(lines)


def best_of(results: Sequence[TrialResult], metric: str) -> TrialResult | None:
    """Return the best result; None if all trials have failed."""
    scores = [(score, result) for result in results if (score := score_of(result, metric)) is not None]
    return max(scores, key=lambda each: each[0])[1] if scores else None


def draw(results: Sequence[TrialResult], metric: str, path: Path) -> str:
    """Plot the metric over the micro-batch, with a line per combination of other settings; return a message.

    If matplotlib is missing or fails, the message says so: a search of hours does not fail because of its plot.
    """
    try:
        _draw(results, metric, path)
    except ModuleNotFoundError:
        return "no picture was drawn: that needs matplotlib, which is not installed; pip install matplotlib"
    except Exception as error:  # noqa: BLE001 - of another package, whatever it raises
        return f"no picture was drawn: {type(error).__name__}: {error}"
    return f"picture: {path}"


def _draw(results: Sequence[TrialResult], metric: str, path: Path) -> None:
    import matplotlib as mpl  # late: few installations have it

    mpl.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for result in results:
        value = value_of(result, metric)
        if value is not None:
            lines[_rest(result.settings)].append((result.settings[MICRO_BATCH], value))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, points in sorted(lines.items()):
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("micro-batch of a rank")
    axes.set_ylabel({"throughput": "samples per second", "latency": "ms per step"}.get(metric, "FLOPS of a rank"))
    axes.set_title(counted(len(results), "trial"))
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _rest(settings: Mapping[str, Any]) -> str:
    others = (f"{key.rpartition('.')[2]} {value}" for key, value in settings.items() if key != MICRO_BATCH)
    return ", ".join(others)
