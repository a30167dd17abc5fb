"""`ds_nvme_tune`: find the fastest `aio` parameters for a folder, and print the section for the configuration.

    ds_nvme_tune --nvme_dir /local_nvme                      # a minute or two
    ds_nvme_tune --nvme_dir /local_nvme --io_size 4G --json

Every combination of `--block_size`, `--queue_depth`, `--intra_op_parallelism` (lists, `256K,1M`), `single_submit` and
`overlap_events` is measured like in `ds_io`. The best one takes the least time to read and write a byte; among those
within 3% of it, the smallest parameters win. Progress goes to stderr. Exit codes are those of `ds_io`.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed.cli.console import make_console, make_parser, make_table, size_bytes
from deepspeed.cli.io_speed import (
    Parameters,
    Speed,
    add_common_arguments,
    bench_in,
    describe,
    positive,
    rate_text,
    run,
)

_AS_GOOD = 1.03
_NUM_SHOWN = 10


class Trial(NamedTuple):
    """One combination of parameters and its measured speed."""

    parameters: Parameters
    speed: Speed


def combinations(options: argparse.Namespace) -> list[Parameters]:
    """Return the combinations to measure, small numbers first."""
    sizes = (options.intra_op_parallelism, options.queue_depth, options.block_size)
    flags = ((False, True), (True, False))
    return [
        Parameters(block_size, queue_depth, workers, single_submit, overlap_events)
        for workers, queue_depth, block_size, single_submit, overlap_events in itertools.product(*sizes, *flags)
    ]


def best_of(rows: Sequence[Trial]) -> Trial:
    """Return the first trial that takes at most 3% more time than the fastest; `rows` start with small numbers."""
    least = min(row.speed.seconds_per_byte for row in rows)
    return next(row for row in rows if row.speed.seconds_per_byte <= _AS_GOOD * least)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = make_parser("ds_nvme_tune", "Find the fastest aio parameters for a folder.")
    add_common_arguments(parser, io_size="256M", loops=3)
    numbers = _listed(positive)
    parser.add_argument(
        "--block_size",
        type=_listed(size_bytes),
        default=[1 << 18, 1 << 20, 1 << 23],
        help="sizes of a request to try (default 256K,1M,8M)",
    )
    parser.add_argument(
        "--queue_depth", type=numbers, default=[8, 32], help="numbers of requests in flight to try (default 8,32)"
    )
    parser.add_argument(
        "--intra_op_parallelism", type=numbers, default=[1, 2, 4], help="numbers of threads to try (default 1,2,4)"
    )
    options = parser.parse_args(arguments)
    return run("ds_nvme_tune", lambda: _tune(options))


def _tune(options: argparse.Namespace) -> None:
    with bench_in(options) as (bench, report):
        rows = [Trial(parameters, bench.measure(parameters)) for parameters in _followed(combinations(options))]
    best = best_of(rows)
    section = {"aio": dataclasses.asdict(best.parameters)}
    head = describe(bench, report)
    if options.json:
        measured = [{**dataclasses.asdict(row.parameters), **dataclasses.asdict(row.speed)} for row in rows]
        sys.stdout.write(json.dumps({**head, "measured": measured, "best": section}, indent=2) + "\n")
        return
    _show(head, rows)
    sys.stdout.write(f"\nThe best, to paste into the configuration:\n{json.dumps(section, indent=4)[2:-2]}\n")


def _show(head: dict[str, Any], rows: Sequence[Trial]) -> None:
    console = make_console()
    direct = "O_DIRECT" if head["direct"] else "no O_DIRECT"
    title = f"Fastest in {head['folder']} ({head['file_system']}, {direct}, {head['engine']}), GB/s"
    columns = ("read", "write", *(field.name for field in dataclasses.fields(Parameters)))
    fastest = sorted(rows, key=lambda row: row.speed.seconds_per_byte)[:_NUM_SHOWN]
    cells = [
        (rate_text(row.speed.read), rate_text(row.speed.write), *map(str, dataclasses.astuple(row.parameters)))
        for row in fastest
    ]
    console.print(make_table(title, columns, cells))
    for remark in head["remarks"]:
        console.print(remark, markup=False, soft_wrap=True)


def _followed(found: Sequence[Parameters]) -> Iterator[Parameters]:
    """Yield the items of `found`, with a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(found))
        for one in found:
            bar.update(task, description=f"{one.block_size >> 10} KiB x {one.queue_depth} x {one.intra_op_parallelism}")
            yield one
            bar.advance(task)


def _listed(convert: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return a parser for argparse of a list such as `256K,1M`."""

    def numbers(text: str) -> list[int]:
        return sorted(convert(part) for part in text.split(","))

    return numbers


if __name__ == "__main__":
    sys.exit(main())
