"""Compare the host's norms, gelu, rotary and quantizer with torch. Both take turns in one run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/host_ops.py            # one thread, sizes in L2 and in memory

Prints median milliseconds, [minimum, maximum], and the ratio of medians. Target for norms and gelu: 0.9 or less.
"floor" is the minimum memory traffic of the op (each input and output once) at the speed of torch.neg on a tensor of
the same size and dtype in the same run, allocation of the result included. fp32 layer norm from memory has no target:
both sides are memory-bound, and the public function calls torch's own.
Sizes: "L2" is 256 KiB of fp32 in and out. "memory" is 16 MiB in and out, with four sets of tensors in turn. They are
not larger, because the C library returns larger results to the system after each use, so both sides would mostly clear
pages. With one thread, the clock is the thread's CPU time. torch and ours swap places every round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from deepspeed.ops import registry
from deepspeed.ops.quantizer.groups import dequantize_reference, fake_quantize_reference, quantize_reference
from deepspeed.ops.transformer.rotary import apply_rotary_reference, rotary_table
from torch import Tensor

COLS = 1024
ROWS = {"L2": 64, "memory": 4096}
# sets of tensors used in turn, so that tensors of "memory" leave the last cache before they are reused
NUM_SETS = {"L2": 1, "memory": 4}
TARGET = 0.9


@dataclass(frozen=True)
class Case:
    """Torch's function and ours, without arguments, and the minimum number of bytes that the op moves."""

    name: str
    torch: Callable[[], object]
    ours: Callable[[], object]
    num_bytes: int
    has_target: bool = True


def cases(rows: int, dtype: torch.dtype) -> list[Case]:
    """Return the cases of all ops for one size and dtype."""
    x, residual = torch.randn(rows, COLS).to(dtype), torch.randn(rows, COLS).to(dtype)
    weight, bias = torch.ones(COLS, dtype=dtype), torch.zeros(COLS, dtype=dtype)
    heads = x.view(1, rows, 16, 64)
    cos, sin = rotary_table(torch.arange(rows), 64)
    blocks = x.numel() // 128
    kernel = registry.require("transformer_inference")
    quantizer = registry.require("quantizer")
    size = x.numel() * x.element_size()
    found = [
        Case(
            "layer norm",
            lambda: F.layer_norm(x, (COLS,), weight, bias),
            lambda: kernel.layer_norm(x, weight, bias, 1e-5),
            2 * size,
        ),
        Case(
            "residual + layer norm",
            lambda: _residual_layer_norm(x, residual, weight, bias),
            lambda: kernel.layer_norm_residual(x, residual, weight, bias, 1e-5),
            4 * size,
        ),
        Case(
            "RMS norm", lambda: F.rms_norm(x, (COLS,), weight, 1e-6), lambda: kernel.rms_norm(x, weight, 1e-6), 2 * size
        ),
        Case(
            "residual + RMS norm",
            lambda: _residual_rms_norm(x, residual, weight),
            lambda: kernel.rms_norm_residual(x, residual, weight, 1e-6),
            4 * size,
        ),
        Case("gelu", lambda: F.gelu(x), lambda: kernel.gelu(x, False), 2 * size),
        Case("gelu tanh", lambda: F.gelu(x, approximate="tanh"), lambda: kernel.gelu(x, True), 2 * size),
        Case("bias + gelu", lambda: F.gelu(x + bias), lambda: kernel.bias_gelu(x, bias, False), 2 * size),
        Case(
            "bias + gelu tanh",
            lambda: F.gelu(x + bias, approximate="tanh"),
            lambda: kernel.bias_gelu(x, bias, True),
            2 * size,
        ),
        Case(
            "rotary, halves",
            lambda: apply_rotary_reference(heads, cos, sin, False, 1),
            lambda: kernel.rotary(heads, cos, sin, False, 1),
            2 * size,
            False,
        ),
        Case(
            "rotary, neighbours",
            lambda: apply_rotary_reference(heads, cos, sin, True, 1),
            lambda: kernel.rotary(heads, cos, sin, True, 1),
            2 * size,
            False,
        ),
    ]
    for bits in (8, 4):
        packed = x.numel() * bits // 8
        q, params = quantize_reference(x, blocks, bits, True)
        found += [
            Case(
                f"quantize int{bits}",
                lambda bits=bits: quantize_reference(x, blocks, bits, True),
                lambda bits=bits: quantizer.quantize_groups(x, blocks, bits, True),
                size + packed,
                False,
            ),
            Case(
                f"dequantize int{bits}",
                lambda q=q, params=params, bits=bits: dequantize_reference(q, params, 128, bits, dtype),
                lambda q=q, params=params, bits=bits: quantizer.dequantize_groups(q, params, 128, bits, dtype),
                size + packed,
                False,
            ),
        ]
    found.append(
        Case(
            "fake quantization, asymmetric",
            lambda: fake_quantize_reference(x, blocks, 8, False),
            lambda: quantizer.fake_quantize_groups(x, blocks, 8, False),
            2 * size,
            False,
        )
    )
    return found


def _residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + residual, (COLS,), weight, bias)


def _residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x + residual, (COLS,), weight, 1e-6)


def seconds(functions: list[Callable[[], object]], repeats: int) -> float:
    """Return the mean seconds of a call. With one thread, use its CPU time, which other processes do not affect."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time
    start = clock()
    for _ in range(repeats):
        for function in functions:
            function()
    return (clock() - start) / repeats / len(functions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    missed = []
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), medians of {arguments.rounds}, ms [min, max]")
    for dtype_name in arguments.dtypes:
        dtype = getattr(torch, dtype_name)
        for place, rows in ROWS.items():
            missed += table(place, rows, dtype, arguments.rounds)
    print(f"norms and gelu above {TARGET}x of torch: {', '.join(missed) or 'none'}")


def table(place: str, rows: int, dtype: torch.dtype, rounds: int) -> list[str]:
    """Print one size and dtype, and return the names of the cases that missed the target."""
    num_sets = NUM_SETS[place]
    plain = [torch.randn(rows, COLS).to(dtype) for _ in range(num_sets)]
    size = plain[0].numel() * plain[0].element_size()
    negations = [lambda x=x: torch.neg(x) for x in plain]
    repeats = max(1, (1 << 19) // plain[0].numel() // num_sets)
    sets = list(zip(*(cases(rows, dtype) for _ in range(num_sets)), strict=True))
    timed: list[tuple[list[float], list[float]]] = [([], []) for _ in sets]
    copies: list[float] = []
    for number in range(rounds + 1):
        copies.append(seconds(negations, repeats))
        for same, (theirs, ours) in zip(sets, timed, strict=True):
            pairs = [(theirs, [case.torch for case in same]), (ours, [case.ours for case in same])]
            for times, functions in pairs if number % 2 else reversed(pairs):
                times.append(seconds(functions, repeats) * 1e3)
    bandwidth = 2 * size / statistics.median(copies[1:])
    print(f"\n{dtype} {rows} x {COLS}, {place}; floor {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':30}{'torch':>26}{'ours':>26}{'ratio':>8}{'x floor':>9}")
    missed = []
    for (case, *_), both in zip(sets, timed, strict=True):
        theirs, ours = both[0][1:], both[1][1:]  # the first round warms up
        ratio = statistics.median(ours) / statistics.median(theirs)
        above = statistics.median(ours) / (case.num_bytes / bandwidth * 1e3)
        print(f"{case.name:30}{_spread(theirs):>26}{_spread(ours):>26}{ratio:>8.2f}{above:>9.1f}")
        torchs_own = dtype == torch.float32 and place == "memory" and "layer norm" in case.name
        if case.has_target and ratio > TARGET and not torchs_own:
            missed.append(f"{case.name} ({dtype}, {place}: {ratio:.2f})")
    return missed


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} [{min(times):.3f}, {max(times):.3f}]"


if __name__ == "__main__":
    main()
