"""Parts of `ds_report`: the machine, the choice of the accelerator, the ops, and what all ranks have installed.

The machine: where packages are installed, which toolkits there are, limits on memory. A toolkit is what an op builder
compiles with: the C++ compiler, and what the builders of installed extensions answer in `OpBuilder.toolchain`. Nothing
is compiled.

The choice: every candidate, who won, why, and what failed. `ds_report --explain-accelerator` shows this part alone.

The ops: who serves each, whether it is built, why no better place does. `--build` alone compiles.

    prebuilt    came in the wheel
    cached      compiled before, on this machine or one that shares its folder
    not built   compiled when it is first used (seconds)
    by itself   its builder compiles by means of its own, when it is first used
    reference   torch's operators

A whole job: `--all-ranks` compares what the ranks, and so the hosts, have installed. Each rank makes its own report;
rank 0 shows what all have in common in few lines, and every fact in which they differ with the ranks that have each
value.

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
    """The folders of deepspeed, torch and the accelerator plugins; None for a plugin that could not be loaded."""
    manager = plugin_manager()
    plugins = {f"accelerator {name!r}": manager.folder(name) for name in manager.names()}
    return {"deepspeed": _folder("deepspeed"), "torch": _folder("torch"), **plugins}


def collect_machine() -> dict[str, int | None]:
    """Limits of this machine in bytes.

    Keys: `shared_memory_bytes` and `shared_memory_free_bytes` of /dev/shm, which ranks and the workers of data loaders
    share (None: there is none), `memlock_bytes`, what one process may pin (None: unlimited).
    """
    shared = shutil.disk_usage(_SHARED_MEMORY) if Path(_SHARED_MEMORY).is_dir() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "shared_memory_bytes": None if shared is None else shared.total,
        "shared_memory_free_bytes": None if shared is None else shared.free,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
    }


def collect_toolkits() -> list[dict[str, Any]]:
    """One row per toolkit, or per reason why there is none.

    Keys: `used_by` ("core", and names of accelerators), `command`, `version` (what it says of itself, in one line),
    `reason` ("" where there is one; `command` and `version` are None otherwise).
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
    """Print what the three functions above found, under `paths`, `machine` and `toolkits` of `report`."""
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
    """(who uses it, (command, version, reason)), a toolkit as often as a builder names it."""
    yield "core", _asked(find_compiler)
    yield "core", _asked(lambda: identify(("cmake",)))
    manager = plugin_manager()
    for name in manager.names():
        try:
            builders = manager.op_builders(name)
        except PluginError:  # the part on the choice shows why
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
    """The first line that holds a version: some compilers begin with their name and a copyright."""
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
    """The choice as plain values; it is made now if none was.

    Keys: `chosen` (name, class, plugin, why, or error), `accelerators` (fields of `Candidate`, likeliest first, the
    plain device last), `environment` (the variables that decide -> value or None).
    """
    choice, error = None, None
    try:
        choice = explain()
    except DeepSpeedError as failure:
        error = str(failure)
    try:
        rows = [dataclasses.asdict(each) for each in list_candidates(choice)]  # after the choice, which may break one
    except DeepSpeedError as failure:  # a variable that holds nonsense
        rows, error = [], str(failure)
    return {
        "chosen": _chosen(choice, error),
        "accelerators": rows,
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def show_choice(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print what `collect_choice` found, as one part of the whole report; `verbose` adds origins and tracebacks."""
    console.print(_table(report["accelerators"], verbose))
    _show_chosen(report["chosen"], console)
    if verbose:
        show_tracebacks(report["accelerators"], console)


def show_explanation(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print all of it: each candidate with its verdict, the rules, and what was chosen; `verbose` adds tracebacks."""
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
    """One row per op for the current accelerator, those that have a builder first.

    Keys: `op`, `front` (what users import, or None), `offered` (a place has a builder, or could not be read),
    `builder` (import path of the class that serves, or None), `source` ("device", "host", "plugin", "reference"),
    `state` (those above; "failed" when its builder broke, or no place serves it and one could not be read), `library`
    (path, or None), `rejected` ([place, reason] of each better place), `remark` (of the builder: why nothing is built,
    or what it chose for this machine).
    """
    return sorted((_row(op) for op in registry.op_names()), key=lambda row: (not row["offered"], row["op"]))


def build_ops() -> list[dict[str, Any]]:
    """Compile every op that has a kernel here and is not built yet, as its first use would. Called by `--build`.

    Returns:
        The rows of `collect_ops` afterwards; one that could not be built says so in `remark`, its `state` is "failed".
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
    if builder is None and resolution.failed:  # what the place that failed would have served is unknown
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
    """(state, library, remark) of a builder that serves its op. Compiles nothing."""
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
    """The report of this rank as lines "part.name" -> value, with its host first and an op's state per op."""
    found = {"host": platform.node()}
    for part in _PARTS:
        found.update({f"{part}.{name}": str(value) for name, value in report[part].items()})
    found.update({f"ops.{row['op']}": row["state"] for row in report["ops"] if row["offered"]})
    return {name: value for name, value in found.items() if name not in _NEVER_EQUAL}


def gather(facts: Mapping[str, str]) -> list[dict[str, str]]:
    """The facts of every rank of the job, in rank order. A collective over the host's network.

    Raises:
        ConfigError: this process is no rank of a job.
        CommError: a rank did not come, or ended.
    """
    import deepspeed.comm as dist
    from deepspeed.comm.environment import is_rank
    from deepspeed.comm.values import all_gather_values

    if not is_rank(os.environ):
        raise ConfigError(
            "--all-ranks compares the ranks of a job, and no launcher has started this process; run deepspeed "
            "--hostfile HOSTFILE --module deepspeed.cli.report --all-ranks"
        )
    dist.init_distributed("gloo")  # values of the host: devices may be what differs
    try:
        return all_gather_values(dict(facts))
    finally:
        dist.destroy_process_group()


def differences(by_rank: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Return the facts in which ranks differ: by the fact's name, the ranks that have each value.

    The value of a fact that a rank lacks is "absent".
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
    """Print what the ranks have in common, and a table of what differs."""
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
    """Sorted ranks in few words: "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
