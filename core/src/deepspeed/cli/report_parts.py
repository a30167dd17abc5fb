"""Parts of `ds_report`: the machine, the choice of the accelerator, the ops, and what all ranks have installed.

The machine: install paths, toolkits, limits on memory. A toolkit is a compiler that op builders use: the C++ compiler,
and the results of `OpBuilder.toolchain` of the builders in installed extensions. Nothing is compiled.

The choice: every candidate, which one won and why, and failures. `ds_report --explain-accelerator` shows only this.

The ops: the builder of each op, whether the op is built, and why no better place serves it. Only `--build` compiles.

    prebuilt    came in the wheel
    cached      compiled before, on this machine or one that shares its folder
    not built   compiled at first use (takes seconds)
    by itself   the builder compiles at first use, in its own way
    reference   torch's operators

A whole job: `--all-ranks` compares the installations of the ranks, and so of the hosts. Each rank makes its own report.
Rank 0 shows the equal facts in a few lines, and every fact that differs, with the ranks that have each value.

    deepspeed --hostfile hosts --module deepspeed.cli.report --all-ranks
    srun -n 16 python -m deepspeed.cli.report --all-ranks
"""

import dataclasses
import importlib.util
import itertools
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed.accelerator.candidates import list_candidates
from deepspeed.accelerator.current import PLAIN, VARIABLE, AcceleratorChoice, explain
from deepspeed.cli.build import warm
from deepspeed.cli.console import make_table
from deepspeed.errors import ConfigError, DeepSpeedError, OpUnavailable, PluginError
from deepspeed.ops import registry
from deepspeed.ops.implementations import implemented
from deepspeed.ops.op_builder import OpBuilder, jit, loading
from deepspeed.ops.op_builder.toolchain import Toolchain, find_compiler, identify
from deepspeed.plugins import plugin_manager
from deepspeed.plugins.admission import AUTOLOAD_VARIABLE, BLOCK_VARIABLE, NAMES_VARIABLE, TIMEOUT_VARIABLE

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written


def collect_paths() -> dict[str, str | None]:
    """Return the folders of deepspeed, torch and the accelerator plugins; None for a plugin that failed to load."""
    manager = plugin_manager()
    plugins = {f"accelerator {name!r}": manager.folder(name) for name in manager.names()}
    return {"deepspeed": _folder("deepspeed"), "torch": _folder("torch"), **plugins}


def collect_machine() -> dict[str, int | None]:
    """Return memory limits of this machine in bytes.

    Keys: `shared_memory_bytes` and `shared_memory_free_bytes` of /dev/shm, which ranks and data loader workers share
    (None: /dev/shm does not exist), `memlock_bytes`, which one process may pin (None: unlimited).
    """
    shared = shutil.disk_usage(_SHARED_MEMORY) if Path(_SHARED_MEMORY).is_dir() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "shared_memory_bytes": None if shared is None else shared.total,
        "shared_memory_free_bytes": None if shared is None else shared.free,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
    }


def collect_toolkits() -> list[dict[str, Any]]:
    """Return one row per toolkit, or per reason why a toolkit is missing.

    Keys: `used_by` ("core", and names of accelerators), `command`, `version` (one line of its own output), `reason`
    (why it is missing; `command` and `version` are None then; "" for a toolkit that exists).
    """
    rows: dict[tuple[str | None, str | None, str], list[str]] = {}
    for user, (command, version, reason) in _found():
        users = rows.setdefault((command, version, reason), [])
        if user not in users:
            users.append(user)
    return [
        {"used_by": users, "command": command, "version": version, "reason": reason}
        for (command, version, reason), users in rows.items()
    ]


def show_machine(report: dict[str, Any], console: Console) -> None:
    """Print the results of the three functions above: `paths`, `machine` and `toolkits` of `report`."""
    paths = ((name, folder or "not loaded") for name, folder in report["paths"].items())
    console.print(make_table("Install paths", ("package", "folder"), paths))
    toolkits = (
        (row["command"] or "missing", row["version"] or row["reason"], ", ".join(row["used_by"]))
        for row in report["toolkits"]
    )
    console.print(make_table("Toolkits", ("toolkit", "version", "used by"), toolkits))
    limits = (
        (f"shared memory ({_SHARED_MEMORY})", _shared_memory(report["machine"])),
        ("locked memory (ulimit -l)", _size(report["machine"]["memlock_bytes"], "unlimited")),
    )
    console.print(make_table("Memory limits", ("what", "size"), limits))


def _folder(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _found() -> Iterator[tuple[str, tuple[str | None, str | None, str]]]:
    """Yield (user, (command, version, reason)) for each builder; toolkits may repeat."""
    yield "core", _asked(find_compiler)
    yield "core", _asked(lambda: identify(("cmake",)))
    manager = plugin_manager()
    for name in manager.names():
        try:
            builders = manager.op_builders(name)
        except PluginError:  # the part about the choice shows the reason
            continue
        for kind in builders.values():
            if issubclass(kind, OpBuilder):
                yield name, _asked(lambda kind=kind: kind().toolchain())


def _asked(toolchain: Any) -> tuple[str | None, str | None, str]:
    try:
        found: Toolchain = toolchain()
    except OpUnavailable as error:
        return None, None, str(error)
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return None, None, f"{type(error).__name__}: {error}"
    program, *flags = found.command
    return " ".join([shutil.which(program) or program, *flags]), _version_line(found.identity), ""


def _version_line(identity: str) -> str:
    """Return the first line that contains a version: some compilers print their name and a copyright first."""
    lines = identity.splitlines() or [""]
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), lines[0].strip())


def _shared_memory(machine: dict[str, int | None]) -> str:
    if machine["shared_memory_bytes"] is None:
        return "none"
    return f"{_size(machine['shared_memory_bytes'])}, {_size(machine['shared_memory_free_bytes'])} free"


def _size(num_bytes: int | None, without: str = "none") -> str:
    if num_bytes is None:
        return without
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


_VARIABLES = (VARIABLE, BLOCK_VARIABLE, AUTOLOAD_VARIABLE, NAMES_VARIABLE, TIMEOUT_VARIABLE)


def collect_choice() -> dict[str, Any]:
    """Return the choice of the accelerator as plain values. Makes the choice if there is none yet.

    Keys: `chosen` (name, class, plugin, why, or error), `accelerators` (fields of `Candidate`, likeliest first, the
    plain device last), `environment` (environment variables that affect the choice -> value or None).
    """
    choice, error = None, None
    try:
        choice = explain()
    except DeepSpeedError as failure:
        error = str(failure)
    try:
        rows = [dataclasses.asdict(each) for each in list_candidates(choice)]  # after the choice, which may fail one
    except DeepSpeedError as failure:  # an environment variable has an invalid value
        rows, error = [], str(failure)
    return {
        "chosen": _chosen(choice, error),
        "accelerators": rows,
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def show_choice(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print the result of `collect_choice` as a part of the whole report; `verbose` adds origins and tracebacks."""
    console.print(_table(report["accelerators"], verbose))
    _show_chosen(report["chosen"], console)
    if verbose:
        show_tracebacks(report["accelerators"], console)


def show_explanation(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print each candidate with its verdict, the rules, and the chosen accelerator; `verbose` adds tracebacks."""
    for row in report["accelerators"]:
        mark, priority = (
            "*" if row["chosen"] else " ",
            "" if row["priority"] is None else f", priority {row['priority']}",
        )
        console.print(f"{mark} {row['name']}: {row['state']}{priority}", style="bold", markup=False)
        api = f", for plugin API {row['api']}" if row["api"] else ""
        poses = [f"poses as torch's device {row['impersonates']!r}"] if row["impersonates"] else []
        for line in (row["reason"], *poses, row["verdict"], f"from {row['origin']}{api}"):
            console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    _show_rules(report["environment"], console)
    _show_chosen(report["chosen"], console)
    if verbose:
        show_tracebacks(report["accelerators"], console)
    elif any(row["traceback"] for row in report["accelerators"]):
        console.print("--verbose shows the traceback of each that is broken.", markup=False)


def show_tracebacks(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print where each broken plugin failed."""
    for row in rows:
        if row["traceback"]:
            console.print(f"\n{row['name']} failed:", style="bold", markup=False)
            console.print(row["traceback"], markup=False, highlight=False, soft_wrap=True)


def _chosen(choice: AcceleratorChoice | None, error: str | None) -> dict[str, Any]:
    if choice is None:
        return {"name": None, "class": None, "plugin": None, "why": None, "error": error}
    kind = type(choice.accelerator)
    return {
        "name": choice.accelerator._name,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "plugin": choice.plugin,
        "why": choice.why,
        "error": error,
    }


def _table(rows: Sequence[dict[str, Any]], verbose: bool) -> Table:
    columns = ("name", "priority", "state", "reason", *(["origin"] if verbose else []))
    shown = ({**row, "name": _shown_name(row)} for row in rows)
    cells = (["" if row[column] is None else str(row[column]) for column in columns] for row in shown)
    return make_table("Accelerators offered (* chosen)", columns, cells)


def _shown_name(row: dict[str, Any]) -> str:
    poses = f" (as {row['impersonates']})" if row["impersonates"] else ""
    return f"{row['name']}{poses}{' *' if row['chosen'] else ''}"


def _show_chosen(chosen: dict[str, Any], console: Console) -> None:
    if chosen["error"]:
        console.print(f"No accelerator: {chosen['error']}", style="bold red", markup=False)
    else:
        console.print(f"Chosen: {chosen['name']} ({chosen['class']}): {chosen['why']}", style="bold", markup=False)


def _show_rules(environment: dict[str, Any], console: Console) -> None:
    console.print(
        f"set_accelerator(...) beats {VARIABLE}, which beats the highest available priority, which beats {PLAIN!r}.",
        markup=False,
    )
    for name, value in environment.items():
        if value or name == VARIABLE:
            console.print(f"{name}: {value or f'not set ({PLAIN} asks for the device without plugin)'}", markup=False)


def collect_ops() -> list[dict[str, Any]]:
    """Return one row per op for the current accelerator; ops with a builder come first.

    Keys: `op`, `front` (module that users import, or None), `offered` (a place has a builder, or could not be read),
    `builder` (import path of the builder class, or None), `source` ("device", "host", "plugin", "reference"),
    `state` (see above; "failed" if the builder failed, or if no place serves the op and one could not be read),
    `library` (path, or None), `rejected` ([place, reason] of each better place), `remark` (the builder's text: why
    nothing is built, or the choice for this machine).
    """
    return sorted((_row(op) for op in registry.op_names()), key=lambda row: (not row["offered"], row["op"]))


def build_ops() -> list[dict[str, Any]]:
    """Compile every op that has a kernel here and is not built yet, like its first use. Called for `--build`.

    Returns:
        The rows of `collect_ops` afterwards. An op that failed to build has the `state` "failed", and a `remark`.
    """
    outcomes = [warm(op) for op in registry.op_names()]
    failures = {outcome.op: outcome.detail for outcome in outcomes if outcome.state == "failed"}
    rows = collect_ops()
    for row in rows:
        if row["op"] in failures:
            row["state"], row["remark"] = "failed", failures[row["op"]]
    return rows


def _row(op: str) -> dict[str, Any]:
    resolution = registry.resolve(op)
    builder = resolution.builder
    kind = type(builder)
    front = registry.OPS[op].front if op in registry.OPS else ""
    state, library, remark = ("reference", None, "") if builder is None else _state(builder)
    if builder is None and resolution.failed:  # the place that failed might have served the op
        state = "failed"
    return {
        "op": op,
        "front": f"deepspeed.ops.{front}" if front else None,
        "offered": state != "reference" or bool(implemented(registry.builder_name(op))),
        "builder": None if builder is None else f"{kind.__module__}.{kind.__qualname__}",
        "source": resolution.source,
        "state": state,
        "library": library,
        "rejected": [list(rejection) for rejection in resolution.rejected],
        "remark": remark,
    }


def _state(builder: Any) -> tuple[str, str | None, str]:
    """Return (state, library, remark) of a builder that serves its op. Compiles nothing."""
    if not isinstance(builder, OpBuilder) or type(builder).load is not OpBuilder.load:
        return "by itself", None, ""
    try:
        spec = builder.describe()
        chosen = builder.remark()
        library, remark = loading.find(builder.absolute_name(), spec)
        if library is not None:
            return "prebuilt", str(library), chosen
        if type(builder).jit_load is not OpBuilder.jit_load:
            return "by itself", None, remark
        library = jit.find(spec)
    except OpUnavailable as error:
        return "failed", None, str(error)
    except Exception as error:  # noqa: BLE001 - a vendor's sources() and flags, whatever they raise
        return "failed", None, f"{type(error).__name__}: {error}"
    remark = "; ".join(filter(None, (remark, chosen)))
    return ("not built", None, remark) if library is None else ("cached", str(library), remark)


_PARTS = ("versions", "chosen", "device", "paths", "machine")
_NEVER_EQUAL = frozenset({"machine.shared_memory_free_bytes", "device.faults"})


def facts_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Return this rank's report as "part.name" -> value: the host first, and the state of each op."""
    found = {"host": platform.node()}
    for part in _PARTS:
        found.update({f"{part}.{name}": str(value) for name, value in report[part].items()})
    found.update({f"ops.{row['op']}": row["state"] for row in report["ops"] if row["offered"]})
    return {name: value for name, value in found.items() if name not in _NEVER_EQUAL}


def gather(facts: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the facts of every rank of the job, in rank order. The call is a collective over gloo.

    Raises:
        ConfigError: this process is no rank of a job.
        CommError: a rank did not join, or ended.
    """
    import deepspeed.comm as dist
    from deepspeed.comm.environment import is_rank
    from deepspeed.comm.values import all_gather_values

    if not is_rank(os.environ):
        raise ConfigError(
            "--all-ranks compares the ranks of a job, and no launcher has started this process; run deepspeed "
            "--hostfile HOSTFILE --module deepspeed.cli.report --all-ranks"
        )
    dist.init_distributed("gloo")  # not the devices' backend: the ranks' devices may differ
    try:
        return all_gather_values(dict(facts))
    finally:
        dist.destroy_process_group()


def differences(by_rank: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Return fact name -> value -> ranks, for the facts that differ between ranks.

    The value "absent" stands for a fact that a rank lacks.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(by_rank))
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            values.setdefault(facts.get(name, "absent"), []).append(rank)
        if len(values) > 1:
            found[name] = values
    return found


def show(by_rank: Sequence[Mapping[str, str]], console: Console) -> None:
    """Print the facts that are equal on all ranks, and a table of the facts that differ."""
    different = differences(by_rank)
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(by_rank):
        hosts.setdefault(facts["host"], []).append(rank)
    rows = ((host, ranges(ranks)) for host, ranks in hosts.items())
    console.print(make_table(f"{len(by_rank)} ranks", ("host", "ranks"), rows))
    equal = [(name, value) for name, value in by_rank[0].items() if name not in different and name != "host"]
    console.print(make_table("Equal on all ranks", ("what", "value"), equal))
    rest = [
        (name if at == 0 else "", value, ranges(ranks))
        for name, values in different.items()
        if name != "host"
        for at, (value, ranks) in enumerate(values.items())
    ]
    if rest:
        console.print(make_table("Different", ("what", "value", "ranks"), rest))
    else:
        console.print("Nothing differs between the ranks.", markup=False)


def ranges(ranks: Sequence[int]) -> str:
    """Format sorted ranks as ranges: "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
