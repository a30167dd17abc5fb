"""Show a progress bar, and write metrics.csv and loss.png. Rank 0 only."""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclasses.dataclass
class Metrics:
    """The metrics of one step. Losses are in nats per byte, memory per rank in MiB.

    `validation_loss` is None, and empty in the file, for steps without validation.
    """

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens_per_s: float
    memory_mib: str


# column of metrics.csv -> function that parses its text
_READ: dict[str, Callable[[str], Any]] = {
    "step": int,
    "loss": float,
    "validation_loss": lambda text: float(text) if text else None,
    "learning_rate": float,
    "gradient_norm": float,
    "tokens_per_s": float,
    "memory_mib": str,
}
#: printed losses and rates are means over this number of steps
_SMOOTHED = 20


class TrainingLog:
    """Collects `Metrics`. Use it as a context manager, which shows the progress bar."""

    def __init__(self, folder: Path, first_step: int, last_step: int) -> None:
        self.folder = folder
        self.first_step = first_step
        self.console = Console()
        self.rows = [row for row in self._read() if row.step <= first_step] if first_step else []
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=last_step, completed=first_step, text="")

    def __enter__(self) -> "TrainingLog":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._write()

    def add(self, row: Metrics) -> None:
        self.rows.append(row)
        text = f"loss {row.loss:.3f}  {row.tokens_per_s:,.0f} tokens/s  {row.memory_mib} MiB per rank"
        self._progress.update(self._task, completed=row.step, text=text)
        if row.validation_loss is not None:
            recent = self.rows[-_SMOOTHED:]
            loss = sum(one.loss for one in recent) / len(recent)
            rate = len(recent) / sum(1 / one.tokens_per_s for one in recent)
            text = f"loss {loss:.3f}  {rate:,.0f} tokens/s  {row.memory_mib} MiB per rank"
            self._progress.console.print(f"step {row.step:5d}  {text}  validation {row.validation_loss:.3f}")
            self._write()

    def draw(self, unigram_entropy: float) -> Path:
        """Write loss.png and return its path."""
        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
        steps = [row.step for row in self.rows]
        axes.plot(steps, [row.loss for row in self.rows], color="#9ecae1", linewidth=0.8, label="training batch")
        checked = [(row.step, row.validation_loss) for row in self.rows if row.validation_loss is not None]
        axes.plot(*zip(*checked, strict=True), "o-", color="#08519c", label="validation")
        axes.axhline(unigram_entropy, color="#cb181d", linestyle="--", label=f"unigram entropy {unigram_entropy:.2f}")
        if self.first_step:
            axes.axvline(self.first_step, color="grey", linestyle=":", label=f"resumed at {self.first_step}")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title="GPT on Python's standard library, 2 ranks, ZeRO-2")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.tight_layout()
        path = self.folder / "loss.png"
        figure.savefig(path)
        pyplot.close(figure)
        return path

    def _read(self) -> list[Metrics]:
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return [Metrics(**{key: _READ[key](text) for key, text in row.items()}) for row in csv.DictReader(file)]

    def _write(self) -> None:
        with (self.folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Metrics)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in self.rows)
