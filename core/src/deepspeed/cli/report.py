"""`ds_report`: report what is installed, which accelerator is chosen and why, and the source of each op.

    ds_report                          tables for people
    ds_report --json                   the same for programs
    ds_report --explain-accelerator    only the choice: every candidate, and why it won or lost
    ds_report --verbose                also the origin of plugins, and the traceback of each broken plugin
    ds_report --build                  first compile every op that has a kernel here, as for a cluster image
    ds_report --hide_operator_status   without the ops, which saves a second
    ds_report --hide_errors_and_warnings
    ds_report --all-ranks              in a job: equal and different facts of its ranks

`python -m deepspeed.env_report` is the same command.

Exit code 0; 1 if no accelerator can be chosen, a vendor's package breaks `import torch`, another DeepSpeed
overwrote these files, or `--build` failed.

The module imports nothing that needs torch at the top: a package that torch loads by itself (entry points
`torch.backends`) may break `import torch`, and `ds_report` has to report this instead of failing.
"""

import argparse
import json
import logging
import os
import platform
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata
from rich.console import Console
from rich.table import Table

from deepspeed._installation import foreign_deepspeed, foreign_files_warning
from deepspeed._version import CORE_VERSION, DEEPSPEED_API
from deepspeed.cli.console import answer_stream, make_console, make_parser, make_table
from deepspeed.errors import PluginError
from deepspeed.log import logger
from deepspeed.plugins import FEATURES, PLUGIN_API, plugin_manager
from deepspeed.plugins.admission import distribution_of, named, one_line, read_entry_points

if TYPE_CHECKING:
    from deepspeed.accelerator.current import AcceleratorChoice


VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch() -> list[dict[str, Any]]:
    """Import torch, then the packages that torch would load by itself, one by one. Called before any use of torch.

    Returns:
        One row per package: `name`, `origin`, `error` (None: loaded). No rows if torch was imported already, or the
        user has disabled this loading.
    """
    if "torch" in sys.modules or os.environ.get(VARIABLE, "1") != "1":
        return []
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        import torch  # noqa: F401  for its effect
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
    return [_load(entry) for entry in read_entry_points("torch.backends")]


def describe(row: dict[str, Any]) -> str:
    """Return one line that says why the package of `row` makes `import torch` fail, and what to do."""
    return (
        f"import torch fails, because it loads {row['name']!r} of {row['origin']}: {row['error']}. Repair or uninstall "
        f"that package; {VARIABLE}=0 keeps torch from loading it"
    )


def _load(entry: Any) -> dict[str, Any]:
    error = None
    try:
        entry.load()()
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - a vendor's package, whatever it raises
        error = one_line(failure)
    return {"name": entry.name, "origin": distribution_of(entry), "error": error}


_COLUMNS = ("name", "state", "hooks", "reason")


def collect_features() -> list[dict[str, Any]]:
    """Return one row per feature plugin that is installed or named in `DS_PLUGINS`. Imports them like the first engine.

    Keys: `name`, `origin` (package, version, module), `state` ("active", "broken", "blocked"), `hooks` (hooks that it
    implements), `reason` (why it is broken or blocked, else ""), `traceback` (for "broken", else None).
    """
    manager = plugin_manager()
    asked_for = set(named()) - set(manager.names())
    return [_row(name) for name in sorted(asked_for.union(manager.names(FEATURES)))]


def show_features(rows: Sequence[dict[str, Any]], console: Console, verbose: bool) -> None:
    """Print the rows; `verbose` adds origins and tracebacks."""
    from deepspeed.cli.report_parts import show_tracebacks

    if not rows:
        console.print("Feature plugins: none", markup=False)
        return
    columns = (*_COLUMNS, "origin") if verbose else _COLUMNS
    shown = ({**row, "hooks": ", ".join(row["hooks"])} for row in rows)
    console.print(make_table("Feature plugins", columns, ([row[column] for column in columns] for row in shown)))
    if verbose:
        show_tracebacks(rows, console)


def _row(name: str) -> dict[str, Any]:
    manager = plugin_manager()
    state, reason, trace = "active", "", None
    if refused := manager.refusal(name, FEATURES):
        state, reason = "blocked", refused
    else:
        try:
            manager.load(name, FEATURES)
        except PluginError as error:
            state, reason = "broken", str(error)
            trace = "".join(traceback.format_exception(error)).rstrip()
    return {
        "name": name,
        "origin": manager.origin(name, FEATURES),
        "state": state,
        "hooks": manager.hooks_of(name, FEATURES),
        "reason": reason,
        "traceback": trace,
    }


_LIBRARIES = ("pluggy", "importlib-metadata", "pydantic", "psutil", "safetensors", "deepspeed")
# `_ASKED`: methods of the accelerator whose results are shown
_RULE = "-" * 50
_ASKED = ("is_available", "device_count", "communication_backend_name", "supported_dtypes", "is_synchronized_device")


def collect(build: bool = False, ops: bool = True) -> dict[str, Any]:
    """Return the report as plain values. Chooses the accelerator if none is chosen yet.

    Args:
        build: compile ops first.
        ops: examine ops; False leaves the key `ops` empty, unless `build` is set.

    Returns:
        The keys of `collect_why`, `versions` (name -> version or None), `paths`, `toolkits` and `machine` (see
        `report_parts`), `features` (rows of `collect_features`), `device` (results of methods of the chosen
        accelerator), `ops` (rows of `collect_ops`).
    """
    why = collect_why()
    from deepspeed.accelerator.current import explain
    from deepspeed.cli.report_parts import build_ops, collect_machine, collect_ops, collect_paths, collect_toolkits

    choice = None if why["chosen"]["error"] else explain()
    return {
        "versions": versions(),
        **why,
        "paths": collect_paths(),
        "toolkits": collect_toolkits(),
        "machine": collect_machine(),
        "features": collect_features(),
        "device": {} if choice is None else _device(choice),
        "ops": [] if choice is None or not (ops or build) else build_ops() if build else collect_ops(),
    }


def collect_why() -> dict[str, Any]:
    """Return the part of the report about the choice.

    Keys: `torch_backends` (rows of `import_torch`), the keys of `collect_choice` (`chosen`, `accelerators`,
    `environment`), `overwritten_by` (version of a foreign `deepspeed` distribution, or None).
    """
    backends = import_torch()
    from deepspeed.cli.report_parts import collect_choice

    return {"torch_backends": backends, **collect_choice(), "overwritten_by": foreign_deepspeed()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.completion:
        sys.stdout.write(Path(__file__).with_name(f"completion.{options.completion}").read_text(encoding="utf-8"))
        return 0
    with _quiet() if options.hide_errors_and_warnings else nullcontext():
        report = (
            collect_why() if options.explain_accelerator else collect(options.build, not options.hide_operator_status)
        )
    if options.all_ranks:
        return _compare_ranks(report, options)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report, make_console(), options)
    unbuilt = options.build and any(row["state"] == "failed" for row in report.get("ops", []))
    torch_fails = any(row["error"] for row in report["torch_backends"])
    return 1 if report["chosen"]["error"] or torch_fails or report["overwritten_by"] or unbuilt else 0


def _compare_ranks(report: dict[str, Any], options: argparse.Namespace) -> int:
    """Show the reports of all ranks on rank 0. Return 1 if this rank has no accelerator, or a rank is unreachable."""
    from deepspeed.cli.report_parts import differences, facts_of, gather, show
    from deepspeed.errors import DeepSpeedError

    with answer_stream() if options.json else nullcontext(sys.stdout) as answer:
        try:
            by_rank = gather(facts_of(report))
        except DeepSpeedError as error:
            sys.stderr.write(f"ds_report: {error}\n")
            return 1
        if os.environ["RANK"] == "0" and options.json:
            answer.write(json.dumps({"ranks": by_rank, "different": differences(by_rank)}, indent=2) + "\n")
        elif os.environ["RANK"] == "0":
            show(by_rank, make_console())
    return 1 if report["chosen"]["error"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "ds_report", "Report the accelerators, ops, versions and paths that are found on this machine."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--explain-accelerator", action="store_true", help="only the accelerators: who was asked, who won, why"
    )
    what.add_argument(
        "--all-ranks", action="store_true", help="compare the ranks of a job; a launcher starts the command on each"
    )
    what.add_argument("--completion", choices=("bash", "zsh"), help="print what a shell needs to complete our commands")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers pass it
    parser.add_argument("-v", "--verbose", action="store_true", help="also origins and tracebacks of plugins")
    parser.add_argument("--hide_operator_status", action="store_true", help="omit the ops")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="omit warnings, and what is wrong with ops and packages"
    )
    parser.add_argument("--build", action="store_true", help="compile every op that has a kernel here, then report")
    return parser


def versions(*others: str) -> dict[str, str | None]:
    """Return the versions of Python, torch, this package, its libraries and `others`; None: not installed."""
    import torch

    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "ds-core": CORE_VERSION,
        "DeepSpeed API": DEEPSPEED_API,
        "plugin API": PLUGIN_API,
    }
    for name in (*_LIBRARIES, *others):
        label = "distribution deepspeed" if name == "deepspeed" else name
        try:
            versions[label] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            versions[label] = None
    return versions


def _device(choice: "AcceleratorChoice") -> dict[str, Any]:
    """Return method name -> result for the methods `_ASKED` of the chosen accelerator, and "faults"."""
    answers = {name: _answer(getattr(choice.accelerator, name)) for name in _ASKED}
    return {**answers, "faults": _answer(lambda: _faults(choice.accelerator))}


def _faults(accelerator: Any) -> dict[str, dict[str, int]] | str:
    """Return device name -> fault counts, or a text that says why there are no counts."""
    import torch

    manager = plugin_manager()
    if not manager.providers("ds_device_faults"):
        return "not counted by any plugin"
    found: dict[str, dict[str, int]] = {}
    for number in range(accelerator.device_count()):
        device = torch.device(accelerator.device_name(number))
        counts, reasons = manager.device_faults(device.index)
        if reasons and not counts:
            return "; ".join(reasons)
        by_kind: Counter[str] = Counter()
        for (_, kind), count in counts.items():
            by_kind[kind] += count
        found[str(device)] = dict(by_kind)
    return found


def _answer(method: Callable[[], Any]) -> Any:
    """Return the method's result, with dtypes as names, or a vendor's exception as text."""
    try:
        answer = method()
    except Exception as error:  # noqa: BLE001 - a report shows a broken vendor package, whatever it raises
        return f"failed: {type(error).__name__}: {error}"
    return [str(each).removeprefix("torch.") for each in answer] if isinstance(answer, list) else answer


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log lines and Python warnings inside the block."""
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _show(report: dict[str, Any], console: Console, options: argparse.Namespace) -> None:
    from deepspeed.cli.report_parts import show_explanation

    if options.explain_accelerator:
        show_explanation(report, console, options.verbose and not options.hide_errors_and_warnings)
    else:
        _show_all(report, console, options)
    if not options.hide_errors_and_warnings:
        _show_faults(report, console)


def _show_all(report: dict[str, Any], console: Console, options: argparse.Namespace) -> None:
    from deepspeed.cli.report_parts import show_choice, show_machine

    verbose = options.verbose and not options.hide_errors_and_warnings
    _show_pasted(report, console, ops=not options.hide_operator_status)
    console.print(_table("Versions", ("what", "version"), report["versions"].items()))
    show_machine(report, console)
    show_choice(report, console, verbose)
    if report["device"]:
        console.print(_table("The chosen device", ("what", "answer"), _shown_device(report["device"]).items()))
    if not options.hide_operator_status:
        _show_ops(report["ops"], console, remarks=not options.hide_errors_and_warnings)
    show_features(report["features"], console, verbose)


def _shown_device(device: dict[str, Any]) -> dict[str, Any]:
    """Return the answers with the nonzero fault counts as text."""
    faults = device["faults"]
    if not isinstance(faults, dict):
        return device
    kinds = [f"{name}: {count} {kind}" for name, counts in faults.items() for kind, count in counts.items() if count]
    return {**device, "faults": "; ".join(kinds) or ("none" if any(faults.values()) else "this machine counts none")}


def _show_pasted(report: dict[str, Any], console: Console, *, ops: bool) -> None:
    """Print the headings and rows of DeepSpeed's report, which people paste into bug reports and scripts parse."""
    lines = []
    if ops:
        lines += [
            _RULE,
            "DeepSpeed C++/CUDA extension op report",
            _RULE,
            f"{_dotted('op name', 'installed')} .. compatible",
        ]
        lines.append(_RULE)
        for row in report["ops"]:
            installed = "[YES]" if row["state"] == "prebuilt" else "[NO]"
            fits = "[OKAY]" if row["offered"] and row["state"] != "failed" else "[NO]"
            lines.append(f"{_dotted(row['op'], installed)} {'.' * (13 - len(installed))} {fits}")
    versions, paths, machine = report["versions"], report["paths"], report["machine"]
    shared = machine["shared_memory_bytes"]
    facts = {
        "torch install path": [paths["torch"]],
        "torch version": versions["torch"],
        "deepspeed install path": [paths["deepspeed"]],
        "deepspeed info": f"{versions['DeepSpeed API']}+core.{versions['ds-core']}",
        "python version": versions["python"],
        "shared memory (/dev/shm) size": "none" if shared is None else f"{shared / 2**30:.2f} GB",
    }
    lines += [
        _RULE,
        "DeepSpeed general environment info:",
        *(_dotted(name, value) for name, value in facts.items()),
        _RULE,
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _dotted(name: str, value: Any) -> str:
    return f"{name} {'.' * max(1, 33 - len(name))} {value}"


def _show_faults(report: dict[str, Any], console: Console) -> None:
    """Print problems of the whole installation."""
    for row in report["torch_backends"]:
        if row["error"]:
            console.print(describe(row), style="bold red", markup=False)
    if report["overwritten_by"]:
        console.print(
            f"{foreign_files_warning(report['overwritten_by'])}.", style="bold red", markup=False, soft_wrap=True
        )


def _show_ops(ops: Sequence[dict[str, Any]], console: Console, remarks: bool) -> None:
    """Print the ops that have a builder, and the others in two lines; with `remarks` also reasons and failures."""
    offered = [row for row in ops if row["offered"]]
    columns = ("op", "from", "state", "builder", *(["remarks"] if remarks else []))
    rows = [(row["op"], row["source"], row["state"], row["builder"] or "none", _remarks(row)) for row in offered]
    if rows:
        console.print(_table("Ops of this accelerator", columns, (row[: len(columns)] for row in rows)))
    others = [row for row in ops if not row["offered"]]
    if remarks:
        _show_failed_ops(ops, console)
    for title, fronts in (("On their torch reference", True), ("Not in this version", False)):
        names = [row["op"] for row in others if bool(row["front"]) is fronts]
        if names:
            console.print(f"{title}, as no extension has a kernel for them: {', '.join(names)}", markup=False)
    if remarks:
        _show_rejections(others, console)


def _show_failed_ops(ops: Sequence[dict[str, Any]], console: Console) -> None:
    for row in ops:
        if row["state"] == "failed" and row["remark"]:  # compiler output and a path are too long for a cell
            console.print(f"{row['op']} failed: {row['remark']}", style="red", markup=False, soft_wrap=True)


def _show_rejections(ops: Sequence[dict[str, Any]], console: Console) -> None:
    """Print each place that could not be searched for a kernel of `ops` once."""
    rejections = {tuple(rejection) for row in ops for rejection in row["rejected"]}
    for where, reason in sorted(rejections):
        if not reason.startswith(("has no ", "serves ")):
            console.print(f"{where} has none: {reason}", markup=False)


def _remarks(row: dict[str, Any]) -> str:
    remark = "why is said below" if row["state"] == "failed" and row["remark"] else row["remark"]
    return "; ".join([*(f"{where}: {reason}" for where, reason in row["rejected"]), *filter(None, [remark])])


def _table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> Table:
    return make_table(title, columns, (map(_cell, row) for row in rows))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "not installed" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
