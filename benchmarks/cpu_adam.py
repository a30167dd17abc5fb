"""Are the host extension's optimizer kernels as fast as the memory lets them be? Ratios to torch, beside the targets.

    python benchmarks/cpu_adam.py                                 # 1 M and 50 M parameters, 1 and 2 threads
    python benchmarks/cpu_adam.py --numels 1e6 --threads 1        # quick
    python benchmarks/cpu_adam.py --numels 1e6 --calls 5          # turns so short that the caches are the other's
    python benchmarks/cpu_adam.py --readme                        # the table of extensions/ds-ext-cpu/README.md

Each row sets ours beside torch's in one run, in turn (A B A B ...), after one warm-up; printed are medians, with
the smallest and the largest, of milliseconds per step, and the ratio of the medians. Ours are the fronts as users call
them. "mixed" is one step of a bf16 model with fp32 masters: torch casts the gradients, clips them by their norm, steps
and copies the weights back; ours takes the norm of the bf16 gradients and does all else in one pass.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from deepspeed.ops import registry
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.reference_optimizer import OnePass
from torch import nn
from torch.nn.utils import get_total_norm

Step = Callable[[], object]
MAX_NORM = 1.0
# Steps of 1 M parameters in a row before it is the other's turn: enough that the first, which finds the other's tensors
# in the caches, weighs little.
CALLS_OF_1M = 30
OPS = ("cpu_adam", "cpu_lion", "cpu_adagrad", "fused_lamb")


def params_of(numel: int) -> list[nn.Parameter]:
    """One flat fp32 parameter with a gradient, as the engine keeps its masters."""
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel) * 0.1
    return [param]


class TorchLion(DeepSpeedCPULion):
    """Lion in torch operations alone."""

    kernel_op = None


class TorchLamb(FusedLamb):
    """LAMB in torch operations alone."""

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


# row -> (what to time, beside what, target ratio or None)
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


def measure(
    row: str, numel: int, num_threads: int, num_rounds: int, calls_of_1m: int = CALLS_OF_1M
) -> tuple[list[float], list[float]]:
    """Milliseconds per step of each round: ours, theirs."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    pair = ROWS[row][0](numel)
    times: tuple[list[float], list[float]] = ([], [])
    num_calls = max(1, calls_of_1m * 1_000_000 // numel)
    if num_calls > 1:  # short rounds: more of them fit between what else runs here
        num_rounds *= 2
    for number in range(num_rounds + 1):
        for step, its_times in zip(pair, times, strict=True):
            its_times.append(timed(step, num_calls))
            if number == 0:  # the first round warms up
                its_times.clear()
    del pair
    gc.collect()
    return times


def spread(times: list[float]) -> str:
    return f"{statistics.median(times):8.2f} [{min(times):.2f}, {max(times):.2f}]"


def results(arguments: argparse.Namespace) -> Iterator[tuple[str, int, int, list[float], list[float]]]:
    for row in arguments.rows:
        for numel in arguments.numels:
            for num_threads in arguments.threads:
                ours, theirs = measure(row, numel, num_threads, arguments.rounds, arguments.calls)
                yield row, numel, num_threads, ours, theirs


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def print_table(arguments: argparse.Namespace) -> bool:
    """Whether all targets are met."""
    print(f"{'row':22}{'numel':>7}{'threads':>8}   {'ours, ms':28}{'theirs, ms':28}{'ratio':>6}{'target':>8}")
    met = True
    for row, numel, num_threads, ours, theirs in results(arguments):
        found, target = ratio(ours, theirs), ROWS[row][2]
        met = met and (target is None or found <= target)
        wanted = "" if target is None else f"<={target:.2f}"
        numbers = f"{spread(ours):28}{spread(theirs):28}{found:6.2f}{wanted:>8}"
        print(f"{row:22}{numel // 10**6:>5} M{num_threads:>8}   {numbers}", flush=True)
    return met


def print_readme(arguments: argparse.Namespace) -> None:
    columns = [
        f"{numel // 10**6} M, {n} thread{'s' * (n > 1)}" for numel in arguments.numels for n in arguments.threads
    ]
    print(f"| step | beside | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    cells: dict[str, list[str]] = {}
    for row, _, _, ours, theirs in results(arguments):
        cells.setdefault(row, []).append(f"{ratio(ours, theirs):.2f}x")
    for row, its_cells in cells.items():
        print(f"| {row} | {ROWS[row][1]} | {' | '.join(its_cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numels", type=lambda text: int(float(text)), nargs="+", default=[10**6, 5 * 10**7])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=CALLS_OF_1M, help="steps of 1 M parameters in a row")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--readme", action="store_true", help="print the README's table instead")
    arguments = parser.parse_args()
    for op in OPS:
        registry.require(op)  # a figure of the reference under the kernel's name would be worth nothing
    if arguments.readme:
        print_readme(arguments)
        return 0
    return 0 if print_table(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
