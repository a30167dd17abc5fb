"""Time the host extension's optimizer kernels: ratios to torch's time, compared with the targets.

    python benchmarks/cpu_adam.py                                 # 1 M and 50 M parameters, 1 and 2 threads
    python benchmarks/cpu_adam.py --numels 1e6 --threads 1        # quick
    python benchmarks/cpu_adam.py --numels 1e6 --calls 5          # short turns: the caches hold the peer's data
    python benchmarks/cpu_adam.py --runs 7 --rounds 15 --readme   # the table of extensions/ds-ext-cpu/README.md

Each row compares ours with torch in one run. The two take turns (A B A B ...) after one warm-up. The placement of
memory changes a ratio by 5%, and so do neighbors on a shared machine: with `--runs`, each run is a new process. Prints
medians with minimum and maximum of milliseconds per step over all rounds, and of the runs' ratios; a run's ratio is the
ratio of its medians. Ours are the optimizer classes that users call. "mixed" is a step of a bf16 model with fp32 master
weights: torch casts the gradients, clips them by their norm, steps, and copies the weights back. Ours computes the norm
of the bf16 gradients, and does everything else in one pass.
"""

import argparse
import gc
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import torch
from deepspeed.ops import registry
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.optimizer import OnePass
from torch import nn
from torch.nn.utils import get_total_norm

Step = Callable[[], object]
Cell = tuple[str, int, int]  # row, numel, threads
Times = tuple[list[float], list[float]]  # milliseconds per step of each round: ours, theirs
MAX_NORM = 1.0
# Consecutive steps of 1 M parameters per turn. The first step finds the peer's tensors in the caches; with this number
# of steps it has little weight.
CALLS_OF_1M = 30
OPS = ("cpu_adam", "cpu_lion", "cpu_adagrad", "fused_lamb")


def params_of(numel: int) -> list[nn.Parameter]:
    """Return one flat fp32 parameter with a gradient, like the engine's master weights."""
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel) * 0.1
    return [param]


class TorchLion(DeepSpeedCPULion):
    """Lion without the kernel, in torch operations."""

    kernel_op = None


class TorchLamb(FusedLamb):
    """LAMB without the kernel, in torch operations."""

    kernel_op = None


def adam(numel: int) -> tuple[Step, Step]:
    ours = DeepSpeedCPUAdam(params_of(numel), lr=1e-3, weight_decay=0.01)
    theirs = torch.optim.AdamW(params_of(numel), lr=1e-3, weight_decay=0.01, fused=True)
    return ours.step, theirs.step


def mixed(numel: int) -> tuple[Step, Step]:
    masters, torch_masters = params_of(numel), params_of(numel)
    grads = [master.grad.bfloat16() for master in masters if master.grad is not None]
    weights = [master.detach().bfloat16() for master in masters]
    for param in [*masters, *torch_masters]:
        param.grad = None
    ours = DeepSpeedCPUAdam(masters, lr=1e-3, weight_decay=0.01)
    theirs = torch.optim.AdamW(torch_masters, lr=1e-3, weight_decay=0.01, fused=True)

    def one_pass() -> None:
        scale = min(1.0, MAX_NORM / (float(get_total_norm(grads)) + 1e-6))
        ours.step(one_pass=OnePass([grads], [weights], scale))

    def four_passes() -> None:
        for master, grad in zip(torch_masters, grads, strict=True):
            master.grad = grad.float()
        nn.utils.clip_grad_norm_(torch_masters, MAX_NORM)
        theirs.step()
        with torch.no_grad():
            for weight, master in zip(weights, torch_masters, strict=True):
                weight.copy_(master)

    return one_pass, four_passes


def lion(numel: int) -> tuple[Step, Step]:
    ours, theirs = (front(params_of(numel), lr=1e-4, weight_decay=0.01) for front in (DeepSpeedCPULion, TorchLion))
    return ours.step, theirs.step


def adagrad(numel: int) -> tuple[Step, Step]:
    ours = DeepSpeedCPUAdagrad(params_of(numel), lr=1e-2)
    theirs = torch.optim.Adagrad(params_of(numel), lr=1e-2)
    return ours.step, theirs.step


def lamb(numel: int) -> tuple[Step, Step]:
    ours, theirs = (front(params_of(numel), lr=1e-3, weight_decay=0.01) for front in (FusedLamb, TorchLamb))
    return ours.step, theirs.step


# row -> (function to time, name of the peer, target ratio or None)
ROWS: dict[str, tuple[Callable[[int], tuple[Step, Step]], str, float | None]] = {
    "Adam fp32": (adam, "AdamW(fused=True)", 1.00),
    "Adam mixed, one pass": (mixed, "cast + clip + AdamW(fused=True) + copy", 0.60),
    "Lion fp32": (lion, "torch operations", 0.35),
    "Adagrad fp32": (adagrad, "torch.optim.Adagrad", 0.35),
    "LAMB fp32": (lamb, "torch operations", None),
}


def timed(step: Step, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        step()
    return (time.perf_counter() - start) / num_calls * 1e3


def measure(row: str, numel: int, num_threads: int, num_rounds: int, calls_of_1m: int = CALLS_OF_1M) -> Times:
    """Return the milliseconds per step of each round."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    pair = ROWS[row][0](numel)
    times: Times = ([], [])
    num_calls = max(1, calls_of_1m * 1_000_000 // numel)
    if num_calls > 1:  # short rounds: run more of them
        num_rounds *= 2
    for number in range(num_rounds + 1):
        for step, its_times in zip(pair, times, strict=True):
            its_times.append(timed(step, num_calls))
            if number == 0:  # the first round warms up
                its_times.clear()
    del pair
    gc.collect()
    return times


def measure_all(arguments: argparse.Namespace) -> dict[Cell, Times]:
    """Measure every cell of the table in one run."""
    for op in OPS:
        registry.require(op)  # never time the reference under the kernel's name
    found = {}
    for cell in itertools.product(arguments.rows, arguments.numels, arguments.threads):
        found[cell] = measure(*cell, arguments.rounds, arguments.calls)
        row, numel, num_threads = cell
        done = f"{row}, {numel // 10**6} M, threads {num_threads}: {ratio(found[cell]):.2f}"
        print(done, file=sys.stderr, flush=True)  # progress; the table follows the last run
    return found


def measure_runs(arguments: argparse.Namespace) -> list[dict[Cell, Times]]:
    """Measure each run in a separate process."""
    runs = []
    for number in range(arguments.runs):
        print(f"run {number + 1} of {arguments.runs}", file=sys.stderr, flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs.append(pool.apply(measure_all, (arguments,)))
    return runs


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} [{min(values):.2f}, {max(values):.2f}]"


def ratio(times: Times) -> float:
    ours, theirs = times
    return statistics.median(ours) / statistics.median(theirs)


def print_table(runs: list[dict[Cell, Times]]) -> bool:
    """Print the table, and return whether the medians of the runs meet all targets."""
    print(f"{'row':22}{'numel':>7}{'threads':>8}   {'ours, ms':28}{'theirs, ms':28}{'ratio':22}{'target':>8}")
    met = True
    for cell in runs[0]:
        row, numel, num_threads = cell
        ours, theirs = (list(itertools.chain(*times)) for times in zip(*(run[cell] for run in runs), strict=True))
        ratios, target = [ratio(run[cell]) for run in runs], ROWS[row][2]
        met = met and (target is None or statistics.median(ratios) <= target)
        wanted = "" if target is None else f"<={target:.2f}"
        numbers = f"{spread(ours):28}{spread(theirs):28}{spread(ratios):22}{wanted:>8}"
        print(f"{row:22}{numel // 10**6:>5} M{num_threads:>8}   {numbers}")
    return met


def print_readme(arguments: argparse.Namespace, runs: list[dict[Cell, Times]]) -> None:
    columns = list(itertools.product(arguments.numels, arguments.threads))
    titles = [f"{numel // 10**6} M, {n} thread{'s' * (n > 1)}" for numel, n in columns]
    print(f"| step | beside | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
    for row in arguments.rows:
        cells = [(row, numel, num_threads) for numel, num_threads in columns]
        found = [statistics.median(ratio(run[cell]) for run in runs) for cell in cells]
        print(f"| {row} | {ROWS[row][1]} | {' | '.join(f'{one:.2f}x' for one in found)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numels", type=lambda text: int(float(text)), nargs="+", default=[10**6, 5 * 10**7])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=1, help="processes, one after the other")
    parser.add_argument("--calls", type=int, default=CALLS_OF_1M, help="steps of 1 M parameters in a row")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--readme", action="store_true", help="print the README's table as well")
    arguments = parser.parse_args()
    runs = measure_runs(arguments)
    met = print_table(runs)
    if arguments.readme:
        print_readme(arguments, runs)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
