"""The commands of `ds_ckpt` return a `Result` each, and share functions for tags, sizes and console output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deepspeed.checkpoint.tags import SavedTag, saved_tags
from deepspeed.errors import CheckpointError


@dataclass(frozen=True)
class Result:
    """The outcome of one command."""

    record: Mapping[str, Any]
    """The values that `--json` prints."""
    show: Callable[[Console], None]
    """Prints it for people."""
    has_faults: bool = False


def asked_tags(directory: Path, names: list[str]) -> list[SavedTag]:
    """The tags of these names in `directory`, oldest first; all, where no name is given.

    Raises:
        CheckpointError: a tag is not there.
    """
    found = saved_tags(directory, names or None)
    if missing := set(names) - {tag.name for tag in found}:
        there = ", ".join(tag.name for tag in saved_tags(directory)) or "no checkpoint"
        raise CheckpointError(f"{directory} holds no tag {', '.join(sorted(missing))}; it holds: {there}")
    return found


def as_size(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def make_progress() -> Progress:
    """A bar of bytes on a terminal; nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def warn(console: Console, text: str) -> None:
    """Print one line of red text, without markup and unfolded."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
