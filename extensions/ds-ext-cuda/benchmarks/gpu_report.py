"""Everything that needs a GPU, in one go, and one report of it. `nox -s gpu` runs this.

    python extensions/ds-ext-cuda/benchmarks/gpu_report.py                  # report.md, report.json in build/gpu
    python extensions/ds-ext-cuda/benchmarks/gpu_report.py --dry-run        # print the commands
    python extensions/ds-ext-cuda/benchmarks/gpu_report.py --only bandwidth --output /tmp/figures

The parts: the conformance suite; every kernel against its reference, and the extension's other tests; training with
ZeRO 0 to 3 over nccl, on one card and on all there are; the bandwidth of the kernels; steps beside DDP and FSDP2, on
one card and on all. The report is written again after each part, so an interrupted run keeps what it has. Exits with 1
if a part failed, and with 2 where there is no GPU.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ds_ext_cuda.plugin import ds_probe

EXTENSION = Path(__file__).resolve().parents[1]
ROOT = EXTENSION.parents[1]
STEPS = ("floor", "ddp", "fsdp2-z3", "stage0", "stage2", "stage3")  # variants of train_step.py
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One command, and the file in which it leaves its figures: rows (.json) or the outcomes of tests (.xml)."""

    name: str
    title: str
    command: tuple[str, ...]
    figures: Path


@dataclass
class Result:
    """What came of a part."""

    name: str
    title: str
    command: list[str]
    exit_code: int
    seconds: float
    figures: list[Row] = field(default_factory=list)


def parts(num_cards: int, output: Path) -> list[Part]:
    """All parts for a machine with so many cards."""
    tests = EXTENSION / "tests"

    def pytest(name: str, title: str, *words: str) -> Part:
        figures = output / f"{name}.xml"
        command = (sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={figures}")
        return Part(name, title, command, figures)

    def program(name: str, title: str, path: Path, *words: str) -> Part:
        figures = output / f"{name}.json"
        return Part(name, title, (sys.executable, str(path), *words, "--json", str(figures)), figures)

    def steps(num_ranks: int) -> Part:
        words = ("--device", "cuda", "--ranks", str(num_ranks), "--rounds", "9", "--models", "25m", "350m")
        words += ("--dtypes", "bf16", "--variants", *STEPS)
        title = f"Training steps beside DDP and FSDP2, {_cards(num_ranks)}"
        return program(f"train_step_{num_ranks}", title, ROOT / "benchmarks/train_step.py", *words)

    training, conformance = str(tests / "test_training.py"), str(tests / "conformance")
    found = [
        pytest("conformance", "Conformance of the accelerator and its kernels", conformance),
        pytest(
            "kernels",
            "Kernels against their references, and the extension's other tests",
            *(str(tests), f"--ignore={conformance}", f"--ignore={training}"),
        ),
        pytest("training", f"ZeRO 0 to 3 over nccl, on one card and on {_cards(num_cards)}", training),
        program("bandwidth", "Bandwidth of the kernels", EXTENSION / "benchmarks/bandwidth.py"),
    ]
    return found + [steps(num_ranks) for num_ranks in sorted({1, num_cards})]


def run(part: Part) -> Result:
    """Run the command of a part; its output goes to the terminal."""
    part.figures.unlink(missing_ok=True)
    start_s = time.monotonic()
    exit_code = subprocess.run(part.command, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - start_s
    return Result(part.name, part.title, list(part.command), exit_code, seconds, read_figures(part.figures))


def read_figures(path: Path) -> list[Row]:
    """The rows that a part has written; none if it ended before."""
    if not path.exists():
        return []
    if path.suffix == ".xml":
        return [_count_tests(ElementTree.parse(path).getroot())]
    loaded = json.loads(path.read_text())
    return loaded["figures"] if isinstance(loaded, dict) else loaded  # type: ignore[no-any-return]


def _count_tests(root: ElementTree.Element) -> Row:
    counts = {name: sum(int(suite.get(name, 0)) for suite in root.iter("testsuite")) for name in _OUTCOMES}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in root.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": ", ".join(failed)}


_OUTCOMES = ("tests", "failures", "errors", "skipped")


def describe_machine() -> Row:
    """The cards, and the versions of what drives them."""
    import torch

    return {
        "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def write_report(folder: Path, machine: Row, results: Iterable[Result]) -> None:
    """`report.json` and `report.md` in `folder`."""
    results = list(results)
    report = {"machine": machine, "parts": [asdict(result) for result in results]}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(build_markdown(machine, results))


def build_markdown(machine: Row, results: list[Result]) -> str:
    """The machine, a line per part, and the figures of each."""
    lines = ["# Measured on a GPU", "", *(f"- {name}: {_shown(value)}" for name, value in machine.items())]
    lines += ["", *_table([{"part": r.title, "exit code": r.exit_code, "seconds": round(r.seconds)} for r in results])]
    for result in results:
        lines += ["", f"## {result.title}", "", f"    {' '.join(result.command)}", ""]
        lines += _table(result.figures) if result.figures else ["No figures: it ended before it wrote any."]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    """Rows as a Markdown table; a column for every key that one of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(_shown(row.get(name, '')) for name in columns)} |" for row in rows)]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):  # a median with its least and greatest
        return " ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cards(count: int) -> str:
    return f"{count} card{'' if count == 1 else 's'}"


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu", help="folder of the report")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts only, by name as --dry-run prints them")
    parser.add_argument("--cards", type=int, help="with --dry-run: for so many cards; default: those that are here")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser.parse_args(words)


def main(words: list[str] | None = None, execute: Callable[[Part], Result] = run) -> int:
    """Run the parts and write the report; returns the exit code."""
    arguments = parse_arguments(words)
    offer = ds_probe()
    if not offer.available and not arguments.dry_run:
        print(
            f"gpu_report.py: nothing is run, since no GPU can be used here: {offer.reason}. Run it on a machine with "
            "an NVIDIA GPU and its driver, in an environment with a CUDA build of torch (pip install --index-url "
            "https://download.pytorch.org/whl/cu130 torch); --dry-run prints the commands",
            file=sys.stderr,
        )
        return 2
    chosen = parts(arguments.cards or _count_cards(offer.available), arguments.output.resolve())
    unknown = set(arguments.only or ()) - {part.name for part in chosen}
    if unknown:
        known = ", ".join(part.name for part in chosen)
        print(f"gpu_report.py: --only: found {', '.join(sorted(unknown))}; the parts are {known}", file=sys.stderr)
        return 2
    chosen = [part for part in chosen if part.name in (arguments.only or [part.name])]
    if arguments.dry_run:
        for part in chosen:
            print(f"{part.name}: {' '.join(part.command)}")
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine, results = describe_machine(), []
    for part in chosen:
        print(f"\n{part.title}\n  {' '.join(part.command)}", flush=True)
        results.append(execute(part))
        write_report(arguments.output, machine, results)
    print(f"\nThe report is {arguments.output / 'report.md'}")
    return 1 if any(result.exit_code for result in results) else 0


def _count_cards(is_usable: bool) -> int:
    if not is_usable:
        return 1
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
