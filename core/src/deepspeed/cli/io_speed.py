"""`ds_io`: measure how fast tensors are written to a folder and read from it with given `aio` parameters.

    ds_io --folder /local_nvme --io_size 1G --block_size 1M --queue_depth 32 --overlap_events

Each write and each read moves `--io_size` bytes between a page-locked tensor and one file, and bypasses the page cache
if the file system has O_DIRECT. The result is the median of `--loops`. The file is removed, also after Ctrl-C. Exit
code 0; 1 if the folder or the op cannot be used; 130 after Ctrl-C.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.cli.console import make_parser, size_bytes
from deepspeed.errors import DeepSpeedError
from deepspeed.ops.aio import FolderReport, aio_handle, preflight

INTERRUPTED = 130


@dataclass(frozen=True)
class Parameters:
    """The `aio` section of a configuration: the arguments of `aio_handle`."""

    block_size: int = 1_048_576
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True


@dataclass(frozen=True)
class Speed:
    """A `Speed` holds the measured rates in bytes per second; a rate that was not measured is None."""

    read: float | None
    write: float | None

    @property
    def seconds_per_byte(self) -> float:
        """The seconds to read and write one byte; the fastest parameters minimize it, because offload does both."""
        return sum(1 / rate for rate in (self.read, self.write) if rate)


class Bench:
    """A file and a tensor for measurements with any parameters. `bench_in` creates it, and removes the file.

    Args:
        path: path of the file.
        num_bytes: size of the file and of the tensor.
        loops: repetitions of each measurement; the median is used.
        kinds: "read", "write" or both.
    """

    def __init__(self, path: Path, num_bytes: int, loops: int, kinds: Sequence[str]) -> None:
        import torch

        self.path, self.num_bytes, self.loops, self.kinds = str(path), num_bytes, loops, kinds
        handle = aio_handle()
        self.engine: str = getattr(handle, "get_engine", lambda: "a vendor's")()
        self.tensor = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8)).fill_(1)
        handle.sync_pwrite(self.tensor, self.path)

    def measure(self, parameters: Parameters) -> Speed:
        """Write and read the file `loops` times each, and return the median rates."""
        handle = aio_handle(**dataclasses.asdict(parameters))
        calls = {"write": handle.sync_pwrite, "read": handle.sync_pread}
        rates = {kind: self._rate(calls[kind]) if kind in self.kinds else None for kind in calls}
        return Speed(**rates)

    def _rate(self, call: Callable[..., int]) -> float:
        seconds = []
        for _ in range(self.loops):
            start = time.perf_counter()
            call(self.tensor, self.path)
            seconds.append(time.perf_counter() - start)
        return self.num_bytes / statistics.median(seconds)


@contextmanager
def bench_in(options: argparse.Namespace) -> Iterator[tuple[Bench, FolderReport]]:
    """Check `options.folder`, and yield a bench in it. The bench's file is removed even if a signal ends the process.

    Raises:
        DeepSpeedError: the folder or the op cannot be used.
    """
    report = preflight(options.folder, options.io_size, locked_bytes=options.io_size)
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix=".ds_io_", dir=options.folder) as folder:
        yield Bench(Path(folder) / "file", options.io_size, options.loops, _kinds(options)), report


def add_common_arguments(parser: argparse.ArgumentParser, io_size: str, loops: int) -> None:
    """Add the arguments that `ds_io` and `ds_nvme_tune` share."""
    parser.add_argument("--folder", "--nvme_dir", required=True, help="an existing folder on the disk to measure")
    parser.add_argument(
        "--io_size",
        type=size_bytes,
        default=size_bytes(io_size),
        help=f"size of the file, such as 500M or 1G (default {io_size})",
    )
    parser.add_argument(
        "--loops", type=positive, default=loops, help=f"how often each measurement runs (default {loops})"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--read", "--no_write", action="store_true", help="measure reads only")
    only.add_argument("--write", "--no_read", action="store_true", help="measure writes only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(program: str, action: Callable[[], None]) -> int:
    """Run `action`, print an error as one line, and return the exit code."""
    try:
        action()
    except (DeepSpeedError, OSError, ValueError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted; its files are removed\n")
        return INTERRUPTED
    return 0


def describe(bench: Bench, report: FolderReport) -> dict[str, Any]:
    """Return the head of the JSON: folder, engine, and size and number of the transfers of each measurement."""
    return {
        "folder": report.folder,
        "file_system": report.file_system,
        "direct": report.direct,
        "engine": bench.engine,
        "io_size": bench.num_bytes,
        "loops": bench.loops,
        "remarks": list(report.remarks),
    }


def rate_text(rate: float | None) -> str:
    """Format a rate in GB/s (10**9 bytes)."""
    return "" if rate is None else f"{rate / 1e9:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = make_parser("ds_io", "Measure how fast tensors are written to a folder and read from it.")
    add_common_arguments(parser, io_size="1G", loops=3)
    default = Parameters()
    parser.add_argument(
        "--block_size", type=size_bytes, default=default.block_size, help="size of a request (default 1M)"
    )
    parser.add_argument(
        "--queue_depth", type=positive, default=default.queue_depth, help="how many requests are in flight (default 8)"
    )
    parser.add_argument(
        "--intra_op_parallelism",
        "--io_parallel",
        type=positive,
        default=1,
        help="how many threads share the file (default 1)",
    )
    parser.add_argument("--single_submit", action="store_true", help="submit requests one by one")
    overlap = argparse.BooleanOptionalAction
    parser.add_argument("--overlap_events", action=overlap, default=True, help="refill the queue at once")
    options = parser.parse_args(arguments)
    return run("ds_io", lambda: _measure(options))


def _measure(options: argparse.Namespace) -> None:
    parameters = Parameters(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Parameters)})
    with bench_in(options) as (bench, report):
        speed = bench.measure(parameters)
    head = describe(bench, report)
    if options.json:
        told = {**head, "aio": dataclasses.asdict(parameters), **dataclasses.asdict(speed)}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    figures = [f"{kind} {rate_text(getattr(speed, kind))} GB/s" for kind in ("read", "write") if getattr(speed, kind)]
    direct = "O_DIRECT" if report.direct else "no O_DIRECT"
    where = f"{report.folder} ({report.file_system}, {direct}, {bench.engine})"
    sys.stdout.write("\n".join([f"{', '.join(figures)}: {where}", *report.remarks]) + "\n")


def _kinds(options: argparse.Namespace) -> tuple[str, ...]:
    return ("read",) if options.read else ("write",) if options.write else ("read", "write")


def positive(text: str) -> int:
    """Parse a whole number of at least 1 for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C, so that its files are removed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
