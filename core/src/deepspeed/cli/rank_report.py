"""The part of `ds_report` on a whole job: `--all-ranks` compares what the ranks, and so the hosts, have installed.

    deepspeed --hostfile hosts --module deepspeed.cli.report --all-ranks
    srun -n 16 python -m deepspeed.cli.report --all-ranks

Each rank makes its own report; rank 0 shows what all have in common in few lines, and every fact in which they differ
with the ranks that have each value.
"""

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from deepspeed.cli.console import make_table
from deepspeed.errors import ConfigError

_PARTS = ("versions", "chosen", "device", "paths", "machine")
_NEVER_EQUAL = frozenset({"machine.shared_memory_free_bytes"})


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
