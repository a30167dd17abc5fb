"""`ds_verify`: check whether a training script trains like plain torch.

    ds_verify train.py --deepspeed_config ds.json
    ds_verify --ranks 4 --steps 10 --json verdict.json --plot verdict.svg train.py
    ds_verify --against stage0.json train.py --deepspeed_config ds.json

The script runs twice, unchanged and with the same arguments. The first run uses its configuration and is recorded. The
second run uses plain torch, or the configuration of `--against`; it begins each step with the recorded weights and
compares (docs/howto/verify-a-run.md). Exit code 0: all values are equal within the bounds that rounding explains; 1: a
value differs; 2: a run failed, or the comparison is impossible; 3: the two runs had different data.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.autotuning.scheduler import end_job, end_with_this_process
from deepspeed.cli.console import make_console, make_parser, make_table
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.verify.verdict import KINDS, Finding, OtherConfig, RunVerdict, read_verdict, second_of

EQUAL, DIFFERS, WRONG, OTHER_DATA = 0, 1, 2, 3
_TAIL_LINES = 30
_LIBRARIES_OF_SCRIPTS = ("transformers", "accelerate", "lightning", "peft", "trl")
_PLOTS = (".svg", ".png", ".pdf")
_SAYS = {
    "forward weight": "a module computed with other weights than the last step had made: they were gathered too early, "
    "or changed outside of the engine",
    "loss": "the forward gave another loss from the same weights and inputs",
    "buffer": "the forward left other statistics, or something changed them between forward and step",
    "learning rate": "both schedules are at another step, or have another form",
    "gradient": "its backward, its sum over micro-batches or its average over ranks",
    "norm": "the norm is not that of the gradients that the optimizer got; clipping follows from it",
    "skipped step": "the step was skipped for gradients that are finite in the other run, or made with others",
    "weight": "the update, or clipping before it: the other run makes another weight of the same gradient",
}


class _CannotVerify(Exception):
    """The comparison is impossible. The message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        with ExitStack() as stack:
            stack.enter_context(_ending_on_sigterm())
            folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="ds_verify_")))
            folder.mkdir(parents=True, exist_ok=True)
            run = _what_runs(options)
            if options.against:
                OtherConfig(options.against, _other_config(options.against)).write(folder)
            for role, what in (("record", "as configured"), ("compare", second_of(folder))):
                _run(role, what, folder, options)
            verdict = read_verdict(folder)
            run["engines"] = [json.loads(path.read_text()) for path in sorted(folder.glob("engine*/setting.json"))]
        if not verdict.rows:
            raise _CannotVerify(
                f"{options.script} made no step of an engine that trains; it has to call deepspeed.initialize, and "
                "engine.step() to the end of a step"
            )
        _write(verdict, run, options)
    except (_CannotVerify, ConfigError, OSError) as error:
        print(f"ds_verify: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return WRONG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not verdict.is_comparable:
        return OTHER_DATA
    return EQUAL if verdict.first is None else DIFFERS


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_verify", "Say whether a training script trains as plain torch would, tensor by tensor.")
    add = parser.add_argument
    add("--ranks", type=_positive, default=2, metavar="N", help="ranks on this machine (default 2)")
    add("--steps", type=_positive, default=5, metavar="N", help="optimizer steps to compare (default 5)")
    add("--module", action="store_true", help="the script is a module name, as after `python -m`")
    add("--no_local_rank", action="store_true", help="do not pass `--local_rank=N` to the script")
    add("--against", metavar="FILE", help="a configuration: compare with the same script by it, not with plain torch")
    add(
        "--json",
        metavar="FILE",
        help="write the verdict: what does not hold, the worst of each kind, and what was run by which versions",
    )
    add("--plot", metavar="FILE", help="draw the differences by step (needs matplotlib)")
    add("--keep", metavar="FOLDER", help="keep what was recorded, and the output of both runs, in a new folder")
    add("-v", "--verbose", action="store_true", help="show the output of both runs")
    add("script", help="the training script, as `deepspeed` takes it")
    add("arguments", nargs=argparse.REMAINDER, help="everything after the script belongs to the script")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a number from 1 on")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    if not options.module and not Path(options.script).is_file():
        raise _CannotVerify(f"{options.script}: there is no such file; give the script, or a module with --module")
    if options.against and not Path(options.against).is_file():
        raise _CannotVerify(f"--against: found no file {options.against}; give a configuration, as JSON")
    if options.plot and find_spec("matplotlib") is None:
        raise _CannotVerify("--plot: found no matplotlib; `pip install matplotlib`, or leave --plot out")
    if options.plot and Path(options.plot).suffix not in _PLOTS:
        raise _CannotVerify(f"--plot: found {options.plot}; give a file that ends with {', '.join(_PLOTS)}")
    if options.keep and Path(options.keep).exists() and any(Path(options.keep).iterdir()):
        raise _CannotVerify(f"--keep: {options.keep} has files; name a new folder")
    for path in (options.json, options.plot):
        if path and not Path(path).absolute().parent.is_dir():
            raise _CannotVerify(f"{path}: there is no folder {Path(path).absolute().parent}")


def _other_config(path: str) -> dict[str, Any]:
    """Read the configuration of the second run.

    Raises:
        ConfigError: the message names the file, and the wrong key.
    """
    return DeepSpeedConfig(Path(path), batch_required=False).raw


# ---- the two runs -------------------------------------------------------------------------------------------------


def _run(role: str, what: str, folder: Path, options: argparse.Namespace) -> None:
    """Run the script on all ranks.

    Raises:
        _CannotVerify: the run failed.
    """
    form = "module" if options.module else "script"
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(options.ranks)),
        *(["--no_local_rank"] if options.no_local_rank else []),
        *("--module", "deepspeed.verify.script", role, str(folder.absolute()), str(options.steps)),
        *(form, options.script, *options.arguments),
    ]
    log = folder / f"{role}.log"
    with log.open("wb") as output:
        told = None if options.verbose else output
        environment = {"PYTHONHASHSEED": "0", **os.environ}  # sets have the same order in both runs
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            start_new_session=True,
            preexec_fn=end_with_this_process(),  # noqa: PLW1509 - no thread runs here
        )
        try:
            _follow(process, role, what, folder, options)
        finally:
            end_job(process)
    if process.returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        shown = "as shown above" if options.verbose else "its last lines:\n" + "\n".join(said)
        raise _CannotVerify(f"the run {what!r} ended with code {process.returncode}, {shown}")


def _follow(process: subprocess.Popen[bytes], role: str, what: str, folder: Path, options: argparse.Namespace) -> None:
    """Show the progress of a run until it ends."""
    pattern = "step*/rank0.json" if role == "record" else "step*/rows0.json"
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what}: it starts", markup=False, highlight=False)
    with console.status(f"{what}: it starts") as status:
        while True:
            try:
                process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                steps = [int(path.parent.name[4:]) for path in (folder / "engine0").glob(pattern)]
                if any(steps):
                    status.update(f"{what}: step {max(steps)} of {options.steps}")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process like Ctrl-C, so that it leaves no ranks behind."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- output -------------------------------------------------------------------------------------------------------


def _what_runs(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the verdict covers: the script with its digest before the run, arguments, ranks and versions."""
    from deepspeed.cli.report import versions

    content = None if options.module else Path(options.script).read_bytes()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "script": options.script,
        "sha256": None if content is None else hashlib.sha256(content).hexdigest(),
        "arguments": options.arguments,
        "ranks": options.ranks,
        "versions": {name: version for name, version in versions(*_LIBRARIES_OF_SCRIPTS).items() if version},
    }


def _write(verdict: RunVerdict, run: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        record = _strict({**verdict.as_json(), "run": run})
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        _draw(verdict, options.plot)
    console = make_console()
    columns = ["step", "loss", "norm", *KINDS[1:]]
    title = f"{options.script}: {counted(options.ranks, 'rank')}; differences as a share of what rounding explains"
    rows = (_row(verdict, step) for step in range(1, verdict.num_steps + 1))
    console.print(make_table(title, columns, rows))
    for line in summary(verdict, asked=options.steps):
        console.print(line, markup=False, highlight=False)


def _strict(value: Any) -> Any:
    """Replace infinity and nan with None, because JSON has neither."""
    if isinstance(value, dict):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(verdict: RunVerdict, step: int) -> list[str]:
    loss, norm = verdict.losses.get(step, (float("nan"), float("nan")))
    return [str(step), f"{loss:.6g}", f"{norm:.6g}", *(_cell(verdict.of_kind(kind, step)) for kind in KINDS[1:])]


def _cell(rows: Sequence[Finding]) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: (not row.holds, row.share))
    return f"{worst.share:.2g}" if worst.holds else f"{worst.share:.2g} ({worst.name})"


def summary(verdict: RunVerdict, *, asked: int) -> list[str]:
    """Return the verdict in a few lines.

    Args:
        asked: number of steps that the user requested; the script may have made fewer.
    """
    first, faults, second = verdict.first, verdict.faults, verdict.second
    of = f"{counted(len(verdict.rows), 'comparison')} in {counted(verdict.num_steps, 'step')}"
    if verdict.num_steps < asked:
        of += f" ({asked} were asked for, and the script made no more)"
    notes = [f"Note: {note}" for note in verdict.notes]
    if first is None:
        return [f"Equal to {second}: {of}, all within what rounding explains.", *notes]
    if not verdict.is_comparable:
        return [
            f"Not comparable, first in step {first.step}: {first.name}.",
            "The script has to do the same each time it runs, with the same data on each rank.",
            *notes,
        ]
    note = f" ({first.note})" if first.note else ""
    kinds = Counter(row.kind for row in faults)
    others = ", ".join(f"{kind} {number}" for kind, number in kinds.items())
    return [
        f"Differs from {second}, first in step {first.step}: {first.kind}, {first.name}, rank {first.rank}{note}.",
        f"  difference {first.difference:.3g}; rounding explains {first.bound:.3g}; {second} has {first.size:.3g}",
        f"  Look at: {_SAYS[first.kind]}.",
        f"{len(faults)} of {of} differ: {others}.",
        *notes,
    ]


def _draw(verdict: RunVerdict, path: str) -> None:
    """Plot the worst difference of each kind and step, as a share of its bound. Zeros are not plotted."""
    import matplotlib as mpl  # late: only --plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, verdict.num_steps + 1)
    for kind in KINDS[1:]:
        shares: list[Any] = [max((row.share for row in verdict.of_kind(kind, step)), default=0.0) for step in steps]
        if any(shares):
            axes.plot(steps, [share or float("nan") for share in shares], marker="o", label=kind)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set(yscale="log", xlabel="step", ylabel="difference / what rounding explains", xticks=list(steps))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
