"""The commands `verify`, `prune`, `convert` and `compare` of `ds_ckpt`; each returns a `Result`. `show` is in
`ckpt_show.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from deepspeed.checkpoint import TorchStore, consolidate, layout
from deepspeed.checkpoint import convert as formats
from deepspeed.checkpoint.layout import local_folder
from deepspeed.checkpoint.saved_run import SavedRun, open_run
from deepspeed.checkpoint.stores import built_in_store
from deepspeed.checkpoint.tags import SavedTag, plan_prune, read_latest, saved_tags
from deepspeed.cli.console import make_table
from deepspeed.errors import CheckpointError, counted


@dataclass(frozen=True)
class Result:
    """The outcome of one command."""

    record: Mapping[str, Any]
    """The values that `--json` prints."""
    show: Callable[[Console], None]
    """Prints it for people."""
    has_faults: bool = False


def asked_tags(directory: Path, names: list[str]) -> list[SavedTag]:
    """Return the tags `names` in `directory`, oldest first; all tags if `names` is empty.

    Raises:
        CheckpointError: a tag does not exist.
    """
    found = saved_tags(directory, names or None)
    if missing := set(names) - {tag.name for tag in found}:
        there = ", ".join(tag.name for tag in saved_tags(directory)) or "no checkpoint"
        raise CheckpointError(f"{directory} holds no tag {', '.join(sorted(missing))}; it holds: {there}")
    return found


def no_tags(directory: Path, verb: str) -> str:
    """Return a sentence for a directory without tags. It mentions tags one level deeper, where a Trainer saves."""
    text = f"{directory} holds no tag that save_checkpoint saved, so there is nothing to {verb}; give"
    folders = sorted(child for child in directory.iterdir() if child.is_dir())
    times = {folder: tags[-1].saved_at for folder in folders if (tags := saved_tags(folder))}
    if not times:
        return f"{text} the directory that save_checkpoint was given"
    newest = sorted(times, key=times.__getitem__)[-1]
    return f"{text} one of the {counted(len(times), 'folder')} in it that hold tags; the newest is {newest}"


def as_size(num_bytes: int) -> str:
    """Format a size: 1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def make_progress() -> Progress:
    """Create a progress bar of bytes, which is disabled outside of a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def warn(console: Console, text: str) -> None:
    """Print one line of red text, without markup or wrapping."""
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


_VERIFIED = ("tag", "state", "files", "size")


def verify(directory: Path, names: list[str]) -> Result:
    """Verify the tags `names` of `directory`, or all of them and the file `latest`.

    The record: `directory`; `tags`, each with `tag`, `state` ("whole", "damaged", or "no index": there are no checksums
    to compare with), `bytes`, `files`, `faults` (name of a file -> its fault); `latest`: the fault of that file, or
    null.
    """
    tags = asked_tags(directory, names)
    if not tags:
        raise CheckpointError(no_tags(directory, "verify"))
    with make_progress() as bar:
        task = bar.add_task("", total=sum(tag.num_bytes for tag in tags))
        rows = []
        for tag in tags:
            bar.update(task, description=tag.name)
            rows.append(_row_of(tag, lambda num_bytes: bar.advance(task, num_bytes)))
    latest = None if names else _fault_in_latest(directory)
    record = {"directory": str(directory), "tags": rows, "latest": latest}
    has_faults = latest is not None or any(row["faults"] for row in rows)
    return Result(record, lambda console: _show_verified(record, console), has_faults)


def _row_of(tag: SavedTag, advance: Callable[[int], object]) -> dict[str, Any]:
    faults = tag.faults(content=True, advance=advance)
    if tag.index is not None:
        listed = {layout.INDEX_FILE, *(entry.name for entry in tag.index.files)}
        names = sorted(path.name for path in tag.folder.iterdir() if layout.is_checkpoint_file(path.name))
        unlisted = [name for name in names if name not in listed]
        faults.update({name: f"{tag.folder / name} is not listed in the index beside it" for name in unlisted})
    state = "damaged" if faults else "whole" if tag.index is not None else "no index"
    num_files = len(tag.index.files) if tag.index is not None else None
    return {"tag": tag.name, "state": state, "bytes": tag.num_bytes, "files": num_files, "faults": faults}


def _fault_in_latest(directory: Path) -> str | None:
    try:
        latest = read_latest(directory)
    except CheckpointError as error:
        return str(error)
    if latest is None or layout.whole_folder(directory / latest) is not None:
        return None
    return (
        f"{directory / layout.LATEST_FILE} names {latest!r}, which is not there. Write one of "
        f"{layout.tags_in(directory)} into it."
    )


def _show_verified(record: dict[str, Any], console: Console) -> None:
    rows = [
        (row["tag"], row["state"], "" if row["files"] is None else str(row["files"]), as_size(row["bytes"]))
        for row in record["tags"]
    ]
    console.print(make_table(f"Checkpoints in {record['directory']}", _VERIFIED, rows))
    for fault in (fault for row in record["tags"] for fault in row["faults"].values()):
        warn(console, fault)
    if record["latest"] is not None:
        warn(console, record["latest"])


def prune(directory: Path, keep_last: int, *, dry_run: bool) -> Result:
    """Remove the tags that `plan_prune` names.

    The record: `directory`, `dry_run`, `removed` (tag -> bytes), `failed` (tag -> why the removal failed), `kept`
    (tag -> why it was kept).
    """
    store = built_in_store(directory)
    if not dry_run and isinstance(store, TorchStore):
        store.finish_removals(directory)
    plan = plan_prune(directory, keep_last)
    removed: dict[str, int] = {}
    failed: dict[str, str] = {}
    for tag in plan.removed:
        num_bytes = tag.num_bytes
        try:
            if not dry_run:
                store.remove(tag.folder)
            removed[tag.name] = num_bytes
        except CheckpointError as error:
            failed[tag.name] = str(error)
    record = {"directory": str(directory), "dry_run": dry_run, "removed": removed, "failed": failed, "kept": plan.kept}
    hint = "" if removed or failed or plan.kept else no_tags(directory, "remove")
    return Result(record, lambda console: _show_pruned(record, console, hint), bool(failed))


def _show_pruned(record: dict[str, Any], console: Console, hint: str) -> None:
    if hint:
        warn(console, hint)
        return
    done = "would be removed" if record["dry_run"] else "removed"
    rows = [(tag, done, "older than the tags that stay") for tag in record["removed"]]
    rows += [(tag, "failed", why) for tag, why in record["failed"].items()]
    rows += [(tag, "kept", why) for tag, why in record["kept"].items()]
    console.print(make_table(f"Checkpoints in {record['directory']}", ("tag", "what", "why"), rows))
    console.print(f"{as_size(sum(record['removed'].values()))} {done}", markup=False, highlight=False)


def convert(source: Path, target: str, to: str, tag: str | None, max_shard_size: str, *, verify: bool) -> Result:
    """Convert one tag.

    The record: `directory`, `tag`, `to`, `output`, and `files`, each with `name` and `bytes`.
    """
    directory, output = local_folder(source, "convert"), local_folder(target, "write a converted checkpoint to")
    try:
        folder = consolidate.tag_folder(directory, tag)
        with make_progress() as bar:
            task = bar.add_task(f"verifying {folder.name}", total=sum(path.stat().st_size for path in folder.iterdir()))
            formats.convert(
                directory,
                output,
                to,
                tag=tag,
                max_shard_size=max_shard_size,
                verify=verify,
                advance=lambda num_bytes: bar.advance(task, num_bytes),
            )
    except ValueError as error:  # max_shard_size
        raise CheckpointError(str(error)) from error
    paths = sorted(path for path in output.rglob("*") if path.is_file())
    files = [{"name": str(path.relative_to(output)), "bytes": path.stat().st_size} for path in paths]
    record = {
        "directory": str(directory),
        "tag": layout.tag_of(folder),
        "to": to,
        "output": str(output),
        "files": files,
    }
    return Result(record, lambda console: _show_converted(record, console))


def _show_converted(record: dict[str, Any], console: Console) -> None:
    rows = [(each["name"], as_size(each["bytes"])) for each in record["files"]]
    console.print(make_table(f"{record['tag']} as {record['to']} in {record['output']}", ("file", "size"), rows))


# ---- compare ------------------------------------------------------------------------------------------------------

_COMPARED = ("tensor", "what", "differ", "largest difference", "of the largest number")


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints, with the size of the difference."""

    tensor: str
    what: str
    """"weight", the name of a state of the optimizer, or "step": how often it was updated."""
    differ: int
    """Elements whose values differ; nan equals nan."""
    largest: float
    """The largest |a - b|; nan where one side alone has a nan."""
    size: float
    """The largest |b|."""

    @property
    def share(self) -> float:
        """The largest difference, divided by the largest magnitude in the second tensor."""
        return self.largest / self.size if self.size else self.largest and float("inf")


def compare(
    directory: Path, other: Path, tag: str | None, other_tag: str | None, *, within: float = 0.0, top: int = 10
) -> Result:
    """Compare the weights and optimizer states of two tags by name, for any ranks, stage or model division of each.

    The record: `first` and `second` (folders), `verdict` ("the same bits", "within", "differs"), `within`, `tensors`
    (number of compared tensors), `apart` (tensors that differ, weights first, then by decreasing share: `tensor`,
    `what`, `differ`, `largest`, `size`, `share`), `only_in_first`, `only_in_second` (names), `other_shapes` (name ->
    both shapes).

    Args:
        within: the allowed difference between values, as a share of the largest magnitude in the tensor.
        top: the number of tensors in the printed table.
    """
    runs = [open_run(local_folder(each, "compare"), its) for each, its in ((directory, tag), (other, other_tag))]
    first, second = (_parts_of(run) for run in runs)
    common = [key for key in first if key in second]
    apart: list[Difference] = []
    shapes: dict[str, Any] = {}
    with make_progress() as bar:
        for name, what in bar.track(common, description="comparing"):
            a, b = first[name, what](), second[name, what]()
            if a.shape != b.shape:
                shapes[f"{name}, {what}"] = [list(a.shape), list(b.shape)]
            elif (found := _difference(name, what, a, b)).differ:
                apart.append(found)
    apart.sort(key=lambda each: (each.what != "weight", not math.isnan(each.share), -each.share))
    lonely = [
        [f"{name}, {what}" for name, what in own if (name, what) not in its]
        for own, its in ((first, second), (second, first))
    ]
    is_within = not shapes and not any(lonely) and all(each.share <= within for each in apart)
    record = {
        "first": str(runs[0].folder),
        "second": str(runs[1].folder),
        "verdict": "differs" if not is_within else "within" if apart else "the same bits",
        "within": within,
        "tensors": len(common),
        "apart": [{**asdict(each), "share": each.share} for each in apart],
        "only_in_first": lonely[0],
        "only_in_second": lonely[1],
        "other_shapes": shapes,
    }
    return Result(record, lambda console: _show_compared(record, top, console), not is_within)


def _parts_of(run: SavedRun) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """Return (parameter name, "weight", "step" or state name) -> function that reads the tensor from a checkpoint."""
    parts: dict[tuple[str, str], Callable[[], Tensor]] = {
        (name, "weight"): weight.contiguous for name, weight in run.weights.items()
    }
    if run.states is None:
        return parts
    for name in sorted(run.states.trained):
        parts[name, "step"] = partial(_step, run, name)
        for state in run.state_names(name):
            parts[name, state] = partial(run.optimizer_state, name, state)
    return parts


def _step(run: SavedRun, name: str) -> Tensor:
    return torch.tensor(run.step(name))


def _difference(name: str, what: str, a: Tensor, b: Tensor) -> Difference:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.reshape(-1).to(wide), b.reshape(-1).to(wide)
    are_apart = ~((a == b) | (a.isnan() & b.isnan()))
    apart = (a[are_apart] - b[are_apart]).abs()
    numbers = b[~b.isnan()].abs()
    size = numbers.amax().item() if numbers.numel() else 0.0
    return Difference(name, what, int(are_apart.sum()), apart.amax().item() if apart.numel() else 0.0, size)


def _show_compared(record: dict[str, Any], top: int, console: Console) -> None:
    apart = record["apart"]
    if apart:
        rows = [
            (each["tensor"], each["what"], f"{each['differ']:,}", f"{each['largest']:.3g}", f"{each['share']:.3g}")
            for each in apart[:top]
        ]
        console.print(make_table(f"{record['first']} and {record['second']}", _COMPARED, rows))
    if len(apart) > top:
        console.print(f"and {counted(len(apart) - top, 'tensor')} more (--top, --json)", markup=False, highlight=False)
    for key, where in (("only_in_first", record["first"]), ("only_in_second", record["second"])):
        if names := record[key]:
            shown = "; ".join(names[:top]) + (f" and {len(names) - top} more" if len(names) > top else "")
            warn(console, f"only in {where}: {shown}")
    for name, (one, other) in record["other_shapes"].items():
        warn(console, f"{name} has the shape {tuple(one)}, and {tuple(other)} in the second")
    number = counted(record["tensors"], "tensor")
    says = {
        "the same bits": f"The same bits: {number}.",
        "within": f"Within {record['within']:g} of a tensor's largest number: {number}, {len(apart)} not the same.",
        "differs": f"Differs: {len(apart)} of {number} are not the same bits.",
    }
    console.print(says[record["verdict"]], markup=False, highlight=False)
