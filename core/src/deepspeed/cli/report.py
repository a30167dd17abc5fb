"""`ds_report`: what is installed, which accelerators are offered, which one is chosen and why, whence each op.

    ds_report                          tables for people
    ds_report --json                   the same for programs
    ds_report --explain-accelerator    only the choice: every candidate, and why it won or lost
    ds_report --verbose                also where plugins come from, and the traceback of each that is broken
    ds_report --build                  compile every op that has a kernel here first, as for the image of a cluster

Exit code 0, or 1 when no accelerator can be chosen, a vendor's package breaks `import torch`, another DeepSpeed
overwrote these files, or `--build` failed.

Nothing that needs torch is imported at the top: `import torch` may be broken (`torch_backends.py`).
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import importlib_metadata
from rich.console import Console
from rich.table import Table

from deepspeed._version import CORE_VERSION, DEEPSPEED_API
from deepspeed.cli.console import make_console
from deepspeed.cli.torch_backends import describe, import_torch
from deepspeed.plugins import PLUGIN_API

if TYPE_CHECKING:
    from deepspeed.accelerator.current import Choice

_LIBRARIES = ("pluggy", "importlib-metadata", "pydantic", "psutil", "safetensors", "deepspeed")
# Methods of the accelerator whose answers are shown.
_ASKED = ("is_available", "device_count", "communication_backend_name", "supported_dtypes", "is_synchronized_device")


def collect(build: bool = False) -> dict[str, Any]:
    """The report as plain values. Chooses the accelerator when nothing was chosen yet; `build` compiles ops first.

    Keys: those of `collect_why`, `versions` (name -> version or None), `features` (rows of `collect_features`),
    `device` (answers of the chosen one), `ops` (rows of `op_report`).
    """
    why = collect_why()
    from deepspeed.accelerator.current import explain
    from deepspeed.cli.feature_report import collect_features
    from deepspeed.cli.op_report import build_ops, collect_ops

    choice = None if why["chosen"]["error"] else explain()
    return {
        "versions": _versions(),
        **why,
        "features": collect_features(),
        "device": {} if choice is None else _device(choice),
        "ops": [] if choice is None else build_ops() if build else collect_ops(),
    }


def collect_why() -> dict[str, Any]:
    """The part of the report on the choice.

    Keys: `torch_backends` (rows of `import_torch`), those of `collect_choice` (`chosen`, `accelerators`,
    `environment`), `overwritten_by` (version of a foreign `deepspeed` distribution, or None).
    """
    backends = import_torch()
    from deepspeed.cli.choice_report import collect_choice

    return {"torch_backends": backends, **collect_choice(), "overwritten_by": foreign_deepspeed()}


def foreign_deepspeed() -> str | None:
    """The version of an installed distribution `deepspeed` that is not ours, or None.

    It owns the same files, so that whichever was installed last is what runs, mixed with what the other left.
    Ours says `+core` in its version.
    """
    for distribution in importlib_metadata.distributions(name="deepspeed"):
        if "+core" not in distribution.version:
            return str(distribution.version)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    report = collect_why() if options.explain_accelerator else collect(options.build)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report, make_console(), options.explain_accelerator, options.verbose)
    unbuilt = options.build and any(row["state"] == "failed" for row in report.get("ops", []))
    torch_fails = any(row["error"] for row in report["torch_backends"])
    return 1 if report["chosen"]["error"] or torch_fails or report["overwritten_by"] or unbuilt else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_report", description="What DeepSpeed finds on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--explain-accelerator", action="store_true", help="only the accelerators: who was asked, who won, why"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also origins and tracebacks of plugins")
    parser.add_argument("--build", action="store_true", help="compile every op that has a kernel here, then report")
    return parser


def _versions() -> dict[str, str | None]:
    import torch

    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "ds-core": CORE_VERSION,
        "DeepSpeed API": DEEPSPEED_API,
        "plugin API": PLUGIN_API,
    }
    for name in _LIBRARIES:
        label = "distribution deepspeed" if name == "deepspeed" else name
        try:
            versions[label] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            versions[label] = None
    return versions


def _device(choice: "Choice") -> dict[str, Any]:
    """What the chosen accelerator says of itself."""
    return {name: _answer(getattr(choice.accelerator, name)) for name in _ASKED}


def _answer(method: Callable[[], Any]) -> Any:
    """What the accelerator answers, dtypes as their names; a vendor's failure is shown in its place."""
    try:
        answer = method()
    except Exception as error:  # noqa: BLE001 - a report shows a broken vendor package, whatever it raises
        return f"failed: {type(error).__name__}: {error}"
    return [str(each).removeprefix("torch.") for each in answer] if isinstance(answer, list) else answer


def _show(report: dict[str, Any], console: Console, only_choice: bool, verbose: bool) -> None:
    from deepspeed.cli.choice_report import show_choice, show_explanation
    from deepspeed.cli.feature_report import show_features

    if only_choice:
        show_explanation(report, console, verbose)
    else:
        console.print(_table("Versions", ("what", "version"), report["versions"].items()))
        show_choice(report, console, verbose)
        device = {
            key: ", ".join(value) if isinstance(value, list) else value for key, value in report["device"].items()
        }
        if device:
            console.print(_table("The chosen device", ("what", "answer"), device.items()))
        _show_ops(report["ops"], console)
        show_features(report["features"], console, verbose)
    for row in report["torch_backends"]:
        if row["error"]:
            console.print(describe(row), style="bold red", markup=False)
    if report["overwritten_by"]:
        console.print(
            f"Another DeepSpeed ({report['overwritten_by']}) is installed over these files. "
            "pip uninstall deepspeed, then pip install --force-reinstall --no-deps ds-core",
            style="bold red",
            markup=False,
        )


def _show_ops(ops: Sequence[dict[str, Any]], console: Console) -> None:
    """The ops that somebody has a builder for; in two lines those that nobody has; and who could not be asked."""
    rows = [
        (row["op"], row["source"], row["state"], row["builder"] or "none", _remarks(row))
        for row in ops
        if row["offered"]
    ]
    if rows:
        console.print(_table("Ops of this accelerator", ("op", "from", "state", "builder", "remarks"), rows))
    for row in ops:
        if row["state"] == "failed" and row["remark"]:  # a compiler's words and a path are no cell
            console.print(f"{row['op']} failed: {row['remark']}", style="red", markup=False, soft_wrap=True)
    others = [row for row in ops if not row["offered"]]
    for title, fronts in (("On their torch reference", True), ("In this version without a front", False)):
        names = [row["op"] for row in others if bool(row["front"]) is fronts]
        if names:
            console.print(f"{title}, for nobody has a kernel here: {', '.join(names)}", markup=False)
    rejections = {tuple(rejection) for row in others for rejection in row["rejected"]}
    for where, reason in sorted(rejections):
        if not reason.startswith(("has no ", "serves ")):
            console.print(f"{where} has none: {reason}", markup=False)


def _remarks(row: dict[str, Any]) -> str:
    remark = "why is said below" if row["state"] == "failed" and row["remark"] else row["remark"]
    return "; ".join([*(f"{where}: {reason}" for where, reason in row["rejected"]), *filter(None, [remark])])


def _table(title: str, columns: Sequence[str], rows: Any) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "not installed" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
