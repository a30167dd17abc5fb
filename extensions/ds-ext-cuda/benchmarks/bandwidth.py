"""How much of the card's bandwidth do the kernels use? Each beside a plain copy on the same card, in turn, in one run.

    python extensions/ds-ext-cuda/benchmarks/bandwidth.py            # needs a GPU, a CUDA build of torch, and nvcc
    python extensions/ds-ext-cuda/benchmarks/bandwidth.py --json figures.json --check

Prints median microseconds of the card [minimum, maximum], GB/s, the share of the copy's GB/s, and the median
microseconds that the host takes to launch a call; the card is given something to wait for first, so that these are not
in its time. A kernel's bytes are those that
its operator has to move at least: each input and output once. (`lamb_step_` reads what it has written once more, since
the trust ratio needs the whole parameter; that second reading is counted.) Tensors are far larger than the cache.
`--check` fails when one of the kernels with a target is under 80% of the copy.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ds_ext_cuda import op_builder
from torch import Tensor

TARGET = 0.8
NUMEL = 1 << 27  # 512 MiB of fp32
ROW = 4096
GROUP = 2048
ROUNDS = 20
# The card's clock cycles before a measured call, about 1.5 ms: longer than any call takes to be launched.
WAIT_CYCLES = 3_000_000

LoadOp = Callable[[type], Any]


@dataclass(frozen=True)
class Case:
    """One operator call, and how many bytes it has to move at least."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    has_target: bool = True


@dataclass(frozen=True)
class Figure:
    """What one case came to. `share`: of the copy's bandwidth; `launch_us`: of the host."""

    name: str
    median_us: float
    min_us: float
    max_us: float
    gb_per_s: float
    share: float
    launch_us: float
    has_target: bool


def copy_case(numel: int, device: str) -> Case:
    """The yardstick: torch copies fp32 within the card."""
    source, target = (torch.ones(numel, device=device) for _ in range(2))
    return Case("copy", lambda: target.copy_(source), 8 * numel, has_target=False)


def optimizer_cases(load_op: LoadOp, numel: int, device: str) -> list[Case]:
    """Steps over one large tensor, over many small ones, and the one-pass step beside a bf16 model."""

    def fp32(value: float = 1.0) -> Tensor:
        return torch.full((numel,), value, device=device)

    adam = load_op(op_builder.FusedAdamBuilder).adam_step_
    lion = load_op(op_builder.FusedLionBuilder).lion_step_
    lamb = load_op(op_builder.FusedLambBuilder).lamb_step_
    param, grad, m, v = fp32(), fp32(0.1), fp32(0.0), fp32(0.0)
    half_grad, half_param = grad.bfloat16(), param.bfloat16()
    step, coeffs = torch.tensor(0.0), torch.zeros(1, device=device)
    pieces = [tensor.split(max(numel // 200, 8)) for tensor in (param, grad, m, v)]
    counts = [torch.tensor(0.0) for _ in pieces[0]]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "grad_scale": 1.0}
    moments = {**numbers, "eps": 1e-8, "bias_correction": True}
    modes = {**moments, "adam_w_mode": True, "maximize": False}
    bounds = {**moments, "eps_inside_sqrt": False, "min_coeff": 0.01, "max_coeff": 10.0}
    return [
        Case("adam fp32", lambda: adam([param], [grad], [m], [v], [step], [], **modes), 28 * numel),
        Case(
            "adam fp32, 200 tensors",
            lambda: adam(*(list(its) for its in pieces), counts, [], **modes),
            28 * numel,
        ),
        Case(
            "adam bf16 gradients and weights",
            lambda: adam([param], [half_grad], [m], [v], [step], [half_param], **modes),
            28 * numel,
        ),
        Case("lion fp32", lambda: lion([param], [grad], [m], [step], [], **numbers), 20 * numel, has_target=False),
        Case(
            "lamb fp32",
            lambda: lamb([param], [grad], [m], [v], [step], [], coeffs, **bounds),
            40 * numel,
            has_target=False,
        ),
    ]


def token_cases(load_op: LoadOp, numel: int, device: str) -> list[Case]:
    """Flatten, and the tokens of random layerwise token dropping."""
    utils, tokens = load_op(op_builder.UtilsBuilder), load_op(op_builder.RandomLTDBuilder)
    pieces = list(torch.ones(numel, device=device).split(max(numel // 200, 8)))
    length = max(numel // (8 * ROW), 2)
    whole = torch.ones(8, length, ROW, dtype=torch.bfloat16, device=device)
    indices = torch.arange(0, length, 2, dtype=torch.int32, device=device).repeat(8, 1)
    part = tokens.token_gather(whole, indices, True)
    moved = 2 * part.numel() * part.element_size()
    return [
        Case("flatten 200 tensors", lambda: utils.flatten(pieces), 8 * numel, has_target=False),
        Case("token gather", lambda: tokens.token_gather(whole, indices, True), moved, has_target=False),
        Case("token scatter", lambda: tokens.token_scatter_(whole, part, indices, True), moved, has_target=False),
    ]


def row_cases(load_op: LoadOp, numel: int, device: str) -> list[Case]:
    """Norms, gelu and rotary over bf16 rows."""
    ops = load_op(op_builder.InferenceBuilder)
    x, residual = (torch.randn(max(numel // ROW, 1), ROW, device=device).bfloat16() for _ in range(2))
    weight, bias = torch.ones(ROW, device=device).bfloat16(), torch.zeros(ROW, device=device).bfloat16()
    size = x.numel() * x.element_size()
    return [
        Case("layer norm", lambda: ops.layer_norm(x, weight, bias, 1e-5), 2 * size),
        Case("RMS norm", lambda: ops.rms_norm(x, weight, 1e-6), 2 * size),
        Case("residual + layer norm", lambda: ops.layer_norm_residual(x, residual, weight, bias, 1e-5), 4 * size),
        Case("residual + RMS norm", lambda: ops.rms_norm_residual(x, residual, weight, 1e-6), 4 * size),
        Case("gelu", lambda: ops.gelu(x, True), 2 * size, has_target=False),
        Case("bias + gelu", lambda: ops.bias_gelu(x, bias, True), 2 * size, has_target=False),
    ]


def quantizer_cases(load_op: LoadOp, numel: int, device: str) -> list[Case]:
    """bf16 to int8 and int4 by group, and back."""
    ops = load_op(op_builder.QuantizerBuilder)
    group = min(GROUP, numel)
    x = torch.randn(numel, device=device).bfloat16()
    groups = numel // group
    found = []
    for bits in (8, 4):
        q, params = ops.quantize_groups(x, groups, bits, True)
        moved = 2 * numel + q.numel() + 4 * params.numel()
        found.append(Case(f"quantize int{bits}", lambda bits=bits: ops.quantize_groups(x, groups, bits, True), moved))
        found.append(
            Case(
                f"dequantize int{bits}",
                lambda q=q, params=params, bits=bits: ops.dequantize_groups(q, params, group, bits, torch.bfloat16),
                moved,
            )
        )
    return found


def all_cases(load_op: LoadOp, numel: int, device: str) -> list[Callable[[], list[Case]]]:
    """Each kind of kernel, made when it is measured: the tensors of all together may be too many."""
    kinds = (optimizer_cases, token_cases, row_cases, quantizer_cases)
    return [lambda kind=kind: kind(load_op, numel, device) for kind in kinds]


def measure(cases: list[Case], copy: Case, rounds: int) -> list[Figure]:
    """Every case in turn with the copy, timed by the card."""
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in (copy, *cases)}
    for number in range(rounds + 3):  # the first ones warm up
        for case in (copy, *cases):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            start.record()
            before_s = time.perf_counter()
            case.call()
            launch_us = (time.perf_counter() - before_s) * 1e6
            end.record()
            end.synchronize()
            if number >= 3:
                times[case.name].append((start.elapsed_time(end) * 1e3, launch_us))
    speed_of_copy = copy.num_bytes / statistics.median(us for us, _ in times[copy.name]) / 1e3
    return [_figure(case, times[case.name], speed_of_copy) for case in (copy, *cases)]


def _figure(case: Case, times_us: list[tuple[float, float]], speed_of_copy: float) -> Figure:
    of_card, of_host = zip(*times_us, strict=True)
    median = statistics.median(of_card)
    speed, launch_us = case.num_bytes / median / 1e3, statistics.median(of_host)
    share = speed / speed_of_copy
    return Figure(case.name, median, min(of_card), max(of_card), speed, share, launch_us, case.has_target)


def report(figure: Figure) -> str:
    """One line of the table."""
    times = f"{figure.median_us:9.1f} [{figure.min_us:.1f}, {figure.max_us:.1f}]"
    missed = "  under the target" if figure.has_target and figure.share < TARGET else ""
    speed = f"{figure.gb_per_s:8.0f} GB/s  {figure.share:6.1%}"
    return f"{figure.name:34}{times:34}{speed}  launch {figure.launch_us:.0f} us{missed}"


def main() -> int:
    """Measure, print, and say by the exit code whether targets were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=NUMEL, help="elements of the large tensors")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bandwidth.py: this torch finds no GPU; nothing is measured", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.numel} elements")
    figures: list[Figure] = []
    for make in all_cases(lambda kind: kind().load(), arguments.numel, "cuda"):
        measured = measure(make(), copy_case(arguments.numel, "cuda"), arguments.rounds)
        for figure in measured[0 if not figures else 1 :]:
            figures.append(figure)
            print(report(figure), flush=True)
    if arguments.json:
        rows = [asdict(figure) for figure in figures]
        arguments.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "figures": rows}, indent=1) + "\n"
        )
    missed = any(figure.has_target and figure.share < TARGET for figure in figures)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
