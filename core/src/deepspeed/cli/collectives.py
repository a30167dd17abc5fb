"""`ds_bench`: measure the speed of a job's collectives by message size.

    ds_bench --num_gpus 2 --scan                                    # this machine
    deepspeed --hostfile hosts --module deepspeed.cli.collectives --scan
    srun -n 16 python -m deepspeed.cli.collectives --scan --all-reduce

Without a launcher, `ds_bench` starts itself on this machine through `deepspeed`. The time of a call is the mean of
`--trials` calls on the slowest rank. With W ranks and messages of S bytes, the algorithm bandwidth is S / time. The bus
bandwidth, which is comparable to the bandwidth of a link, is the algorithm bandwidth times 2 (W - 1) / W for an
all-reduce (the least that a rank must send: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009), (W - 1) / W for an all-gather, a reduce-scatter and an all-to-all, and 1 for a broadcast and a
point-to-point message. S counts the whole message: the output of an all-gather, the input of a reduce-scatter.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from deepspeed.cli.console import answer_stream, make_parser, size_bytes
from deepspeed.cli.io_speed import positive
from deepspeed.comm.environment import is_rank
from deepspeed.errors import ConfigError, DeepSpeedError

if TYPE_CHECKING:
    import torch

MODULE = "deepspeed.cli.collectives"
_OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "pt2pt")
_DTYPES = {
    **dict.fromkeys(("float", "float32", "fp32"), "float32"),
    **dict.fromkeys(("half", "float16", "fp16"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16", "bfloat"), "bfloat16"),
    **{name: name for name in ("float64", "uint8", "int8", "int32", "int64")},
}
_UNITS = {"Gbps": 8e-9, "GBps": 1e-9}  # per byte/s
_LEAST_POWER = 10  # a scan starts at 2**10 bytes, 1 KiB

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """One operation at one size: the time of a call on the slowest rank, and bandwidths in bytes per second."""

    op: str
    num_bytes: int
    latency_us: float
    algbw: float
    busbw: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code: 0; 1 if the job cannot measure; 2 for a wrong command line.

    Raises:
        ConfigError: on a rank only; the launcher then prints the error of all ranks once (`deepspeed.uncaught`).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if not is_rank(os.environ):
            if options.plot is not None:
                _pyplot()  # fail before the measurement, which takes minutes
            _start(options.num_gpus, arguments)
        if options.num_gpus is not None:
            parser.error(
                f"--num_gpus {options.num_gpus} is for starting a job, and a launcher has already started this one "
                f"(WORLD_SIZE={os.environ.get('WORLD_SIZE', 'unset')}); leave it out"
            )
        return _run(options)
    except DeepSpeedError as error:
        if isinstance(error, ConfigError) and is_rank(os.environ):
            raise
        sys.stderr.write(f"ds_bench: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


def measure(options: argparse.Namespace, show: Callable[[Timing], None] = lambda _: None) -> list[Timing]:
    """Measure each operation at each size, on all ranks together, and return the rows in that order.

    Args:
        show: called with each row after its measurement.

    Raises:
        CommError: a rank ended or did not join.
        ConfigError: the world has only one rank, or a message has less than one element per rank.
    """
    import torch

    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.values import all_gather_values

    num_ranks = dist.get_world_size()
    if num_ranks < 2:
        raise ConfigError("found 1 rank, which has nobody to exchange with; start two or more: ds_bench --num_gpus 2")
    library: ModuleType = torch.distributed if options.dist == "torch" else dist  # type: ignore[assignment]
    device = get_accelerator().current_device_name()
    dtype: torch.dtype = getattr(torch, options.dtype)
    messages = sizes(options)
    rows = []
    for op in options.operations or _OPERATIONS:
        for size in messages:
            numel = size // dtype.itemsize // num_ranks * num_ranks
            if numel == 0:
                raise ConfigError(f"found a message of {size} bytes; {num_ranks} ranks need one {options.dtype} each")
            call = make_call(op, library, torch.ones(numel, dtype=dtype, device=device), options.async_op)
            own_s = _seconds(call, options, dist)
            row = figures(op, numel * dtype.itemsize, max(all_gather_values(own_s)), num_ranks)
            rows.append(row)
            show(row)
    return rows


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the message sizes in bytes, ascending. With --mem-factor this call is a collective."""
    largest: int = options.size or 1 << options.maxsize
    if options.mem_factor is not None:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.comm.values import all_gather_values

        largest = int(min(all_gather_values(get_accelerator().available_memory())) * options.mem_factor)
    if not options.scan:
        return [largest]
    return [1 << power for power in range(_LEAST_POWER, largest.bit_length()) if 1 << power <= largest] or [largest]


def figures(op: str, num_bytes: int, seconds: float, num_ranks: int) -> Timing:
    """Return the row of one measurement; the module's docstring has the formulas."""
    algbw = num_bytes / seconds
    share = {"all-reduce": 2 * (num_ranks - 1) / num_ranks, "broadcast": 1.0, "pt2pt": 1.0}
    return Timing(op, num_bytes, seconds * 1e6, algbw, algbw * share.get(op, (num_ranks - 1) / num_ranks))


def make_call(op: str, library: ModuleType, full_N: "torch.Tensor", async_op: bool) -> Call:
    """Return the function that each trial calls on this rank. All trials share the tensors that are allocated here.

    Args:
        op: one of the operations of the command line.
        library: `deepspeed.comm` or `torch.distributed`.
        full_N: [N], N divisible by the number of ranks.
        async_op: whether the function returns a `Work` without waiting for it.
    """
    rank, num_ranks = library.get_rank(), library.get_world_size()
    if op == "all-reduce":
        return lambda: library.all_reduce(full_N, async_op=async_op)
    if op == "broadcast":
        return lambda: library.broadcast(full_N, 0, async_op=async_op)
    if op == "pt2pt":
        send, receive = (library.isend, library.irecv) if async_op else (library.send, library.recv)
        return {0: lambda: send(full_N, 1), 1: lambda: receive(full_N, 0)}.get(rank, lambda: None)
    if op == "all-to-all":
        other_N = full_N.new_empty(full_N.shape)
        return lambda: library.all_to_all_single(other_N, full_N, async_op=async_op)
    shard_S = full_N.new_ones(full_N.numel() // num_ranks)
    if op == "all-gather":
        return lambda: library.all_gather_into_tensor(full_N, shard_S, async_op=async_op)
    return lambda: library.reduce_scatter_tensor(shard_S, full_N, async_op=async_op)


def _seconds(call: Call, options: argparse.Namespace, dist: ModuleType) -> float:
    """Return the mean seconds of a call on this rank. All ranks start together."""
    from deepspeed.accelerator import get_accelerator

    def run(count: int) -> None:
        works = [call() for _ in range(count)]
        for work in works:
            if options.async_op and work is not None:
                work.wait()
        get_accelerator().synchronize()

    run(options.warmups)
    dist.barrier()
    start = time.perf_counter()
    run(options.trials)
    return (time.perf_counter() - start) / options.trials


def _start(num_gpus: int | None, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with the launcher of this command's ranks."""
    own = []
    rest = iter(arguments)
    for word in rest:
        if word == "--num_gpus":
            next(rest)
        elif not word.startswith("--num_gpus="):
            own.append(word)
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    number = ["--num_gpus", str(num_gpus)] if num_gpus else []
    os.execv(sys.executable, [*launcher, *number, "--module", MODULE, *own])  # noqa: S606 - words, no shell


def _run(options: argparse.Namespace) -> int:
    with answer_stream() if options.json else nullcontext(sys.stdout) as answer:
        return _measure_and_show(options, answer)


def _measure_and_show(options: argparse.Namespace, answer: TextIO) -> int:
    import torch.distributed as torch_dist

    import deepspeed.comm as dist

    dist.init_distributed(options.backend)
    num_ranks, backend, is_first = dist.get_world_size(), torch_dist.get_backend(), dist.get_rank() == 0
    try:
        if options.plot is not None:
            _pyplot()  # another launcher started this job, so `main` did not check
        show = _printer(options) if is_first and not options.json else lambda _: None
        if is_first and not options.json:
            answer.write(f"{num_ranks} ranks, {backend}, {options.dtype}, {options.trials} trials\n")
        rows = measure(options, show)
        if is_first and options.json:
            job = {"num_ranks": num_ranks, "backend": backend, "dtype": options.dtype}
            answer.write(json.dumps({**job, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
        if is_first and options.plot is not None:
            plot(rows, options.plot, options.bw_unit)
    finally:
        dist.destroy_process_group()
    return 0


def _printer(options: argparse.Namespace) -> Callable[[Timing], None]:
    """Return a function that prints a row, after a heading if its operation is new, in columns of fixed width."""
    seen: set[str] = set()

    from deepspeed.comm.record import readable

    def show(row: Timing) -> None:
        if row.op not in seen:
            seen.add(row.op)
            heading = ("size", "latency (us)", f"algbw ({options.bw_unit})", f"busbw ({options.bw_unit})")
            sys.stdout.write(f"\n{row.op}\n" + "".join(f"{cell:>16}" for cell in heading) + "\n")
        factor = _UNITS[options.bw_unit]
        size = str(row.num_bytes) if options.raw else readable(row.num_bytes)
        cells = (size, f"{row.latency_us:.1f}", f"{row.algbw * factor:.3f}", f"{row.busbw * factor:.3f}")
        sys.stdout.write("".join(f"{cell:>16}" for cell in cells) + "\n")
        sys.stdout.flush()

    return show


def plot(rows: Sequence[Timing], path: str, unit: str) -> None:
    """Plot the bus bandwidth of each operation over the message size into a file (PNG, SVG or PDF).

    Raises:
        ConfigError: matplotlib is not installed, or does not support the file's suffix.
        OSError: the file cannot be written.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots()
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        axes.plot([row.num_bytes for row in own], [row.busbw * _UNITS[unit] for row in own], marker="o", label=op)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the message", ylabel=f"bus bandwidth ({unit})")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:  # an unknown ending
        raise ConfigError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_bench", "Measure how fast the collectives of a job are, by size of the message.")
    parser.allow_abbrev = False  # `_start` searches for the full name --num_gpus
    parser.add_argument("--num_gpus", type=positive, help="the ranks to start on this machine (default: all devices)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers pass it
    parser.add_argument("--trials", type=positive, default=5, help="calls that are timed (default 5)")
    parser.add_argument("--warmups", type=positive, default=5, help="calls before those (default 5)")
    parser.add_argument(
        "--scan", action="store_true", help="measure powers of two from 1 KiB up to the largest message"
    )
    parser.add_argument(
        "--maxsize", type=_power, default=24, help="the largest message has 2**MAXSIZE bytes (default 24)"
    )
    parser.add_argument("--size", type=size_bytes, help="bytes of the largest message, such as 256M, for --maxsize")
    parser.add_argument(
        "--mem-factor", type=_share, help="the largest message is this share of the free memory, for --maxsize"
    )
    parser.add_argument("--dtype", type=_dtype, default="float32", help="of the elements (default float32)")
    parser.add_argument("--async-op", action="store_true", help="start all trials, then wait for them")
    parser.add_argument("--bw-unit", choices=tuple(_UNITS), default="Gbps", help="gigabits or gigabytes (default Gbps)")
    parser.add_argument("--backend", help="the communication backend (default: the accelerator's)")
    parser.add_argument(
        "--dist",
        choices=("deepspeed", "torch"),
        default="deepspeed",
        help="whose functions are called (default deepspeed)",
    )
    parser.add_argument("--raw", action="store_true", help="print sizes in bytes, without units")
    parser.add_argument("--json", action="store_true", help="print JSON, bandwidths in bytes per second")
    parser.add_argument("--plot", metavar="FILE", help="draw the bus bandwidths into a .png, .svg or .pdf (matplotlib)")
    for op in _OPERATIONS:
        parser.add_argument(
            f"--{op}", dest="operations", action="append_const", const=op, help=f"measure {op} (default: all)"
        )
    return parser


def _power(text: str) -> int:
    if not text.isdecimal() or not _LEAST_POWER <= int(text) <= 40:
        raise argparse.ArgumentTypeError(f"found {text!r}; give an exponent from {_LEAST_POWER} to 40: 24 is 16 MiB")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a number between 0 and 1")
    return share


def _dtype(text: str) -> str:
    name = _DTYPES.get(text.removeprefix("torch."))
    if name is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; give one of {', '.join(sorted(set(_DTYPES.values())))}")
    return name


if __name__ == "__main__":
    sys.exit(main())
