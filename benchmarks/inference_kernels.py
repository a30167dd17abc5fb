"""Compare the host's kernels of a generation step with their floor and with torch, in turn, in one run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/inference_kernels.py
    OMP_NUM_THREADS=2 python benchmarks/inference_kernels.py --threads 2 --markdown

Linear layers: a pass multiplies x of 1 or more rows once with the weights of a Llama-shaped model (the four products of
each layer, or one shape, with enough layers to exceed the last cache by far). The floor is the bytes of weights and
scales divided by the speed of torch's sum of a large fp32 tensor, measured in every round. Ratios are of medians. The
cases swap places from round to round, and the first round is dropped.
Attention: our kernel against `scaled_dot_product_attention` on the same cache, for the given lengths. Gate: against
`silu(gate) * up` in torch.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from deepspeed.ops import registry
from deepspeed.ops.quantizer import pack_weight
from torch import Tensor

# name -> (out, in) of each product of a layer, and the number of layers
MODELS = {
    "Llama 126 M": ([(2304, 768), (768, 768), (4096, 768), (768, 2048)], 12),
    "4096 x 4096": ([(4096, 4096)], 8),
}
GROUP = 128
# batch, heads, key-value heads, head size, tokens
ATTENTION = [
    (1, 12, 12, 64, 128),
    (1, 12, 12, 64, 1024),
    (1, 32, 8, 128, 1024),
    (8, 12, 12, 64, 512),
    (8, 32, 8, 128, 1024),
]


@dataclass
class Case:
    """A pass to time, and the bytes that it must read."""

    name: str
    run: Callable[[], object]
    num_bytes: float = 0
    times: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median(self.times[1:]) * 1e3

    def spread(self) -> str:
        kept = self.times[1:]
        return f"{self.ms:.3f} ({min(kept) * 1e3:.3f} {max(kept) * 1e3:.3f})"


def timed(cases: list[Case], rounds: int) -> None:
    """Measure the times of all cases; the order reverses every round."""
    for number in range(rounds + 1):
        for case in cases if number % 2 else reversed(cases):
            begin = time.perf_counter()
            case.run()
            case.times.append(time.perf_counter() - begin)


def linear_cases(shapes: list[tuple[int, int]], layers: int, rows: int) -> list[Case]:
    """Return the cases of torch's and our products for each kind of weight."""
    ops = registry.require("inference_core_ops")
    linear, packed_linear = ops.linear.default, ops.packed_linear.default
    weights = [torch.randn(shape) / shape[1] ** 0.5 for _ in range(layers) for shape in shapes]
    halves = [weight.bfloat16() for weight in weights]
    x = {cols: torch.randn(rows, cols) for cols in {shape[1] for shape in shapes}}
    xb = {cols: one.bfloat16() for cols, one in x.items()}
    numel = sum(weight.numel() for weight in weights)

    def over(
        kind: list[Tensor], call: Callable[[Tensor, Tensor], object], inputs: dict[int, Tensor]
    ) -> Callable[[], None]:
        def run() -> None:
            for weight in kind:
                call(inputs[weight.shape[1]], weight)

        return run

    cases = [
        Case("fp32, torch", over(weights, F.linear, x), 4 * numel),
        Case("fp32", over(weights, lambda x, w: linear(x, w, None), x), 4 * numel),
        Case("bf16, torch", over(halves, F.linear, xb), 2 * numel),
        Case("bf16", over(halves, lambda x, w: linear(x, w, None), xb), 2 * numel),
    ]
    per_channel = [(pack.data, pack.scales[:, 0].bfloat16()) for pack in map(pack_weight, weights)]
    cases.append(
        Case(
            "int8, torch (_weight_int8pack_mm)",
            lambda: [torch._weight_int8pack_mm(xb[data.shape[1]], data, scales) for data, scales in per_channel],
            numel,
        )
    )
    for bits, group_size, symmetric in ((8, 0, True), (8, GROUP, True), (4, GROUP, True), (4, 32, False)):
        packs = [pack_weight(weight, bits, group_size, symmetric) for weight in weights]

        def run(packs=packs):
            for pack in packs:
                packed_linear(xb[pack.shape[1]], pack.data, pack.scales, pack.zeros, None, pack.bits)

        name = (
            f"int{bits}" + (f", groups of {group_size}" if group_size else "") + ("" if symmetric else ", asymmetric")
        )
        cases.append(Case(name, run, sum(pack.num_bytes for pack in packs)))
    fours = [
        torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, weight.shape, dtype=torch.int32), 1)
        for weight in weights
    ]
    params = [torch.randn(weight.shape[1] // GROUP, weight.shape[0], 2).bfloat16() for weight in weights]

    def torch_int4() -> None:
        for weight, four, param in zip(weights, fours, params, strict=True):
            torch.ops.aten._weight_int4pack_mm_for_cpu(xb[weight.shape[1]], four, GROUP, param)

    cases.append(
        Case(f"int4, groups of {GROUP}, torch (_weight_int4pack_mm_for_cpu)", torch_int4, numel * (0.5 + 4 / GROUP))
    )
    return cases


def attention_cases(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[Case]:
    """Return the cases of torch's attention, ours over the same cache, and ours over blocks of 16 tokens."""
    batch, heads, kv_heads, head_dim, tokens = shape
    attend = registry.require("ragged_device_ops").decode_attention.default
    q = torch.randn(batch, heads, 1, head_dim).to(dtype)
    keys, values = (torch.randn(batch, kv_heads, tokens, head_dim).to(dtype) for _ in range(2))
    blocks = [one.transpose(1, 2).reshape(-1, 16, kv_heads, head_dim).contiguous() for one in (keys, values)]
    table = torch.arange(batch * tokens // 16).view(batch, -1)
    lengths, scale = torch.full((batch,), tokens), head_dim**-0.5
    num_bytes = 2 * keys.numel() * keys.element_size()
    calls = max(1, int(4e7 / num_bytes))
    return [
        Case(name, lambda call=call: [call() for _ in range(calls)], num_bytes * calls)
        for name, call in (
            ("torch", lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=kv_heads != heads)),
            ("ours", lambda: attend(q, keys, values, lengths, scale, None, None, None)),
            ("ours, in blocks", lambda: attend(q, *blocks, lengths, scale, table, None, None)),
        )
    ]


def gate_cases(rows: int, cols: int, dtype: torch.dtype) -> list[Case]:
    """Return the cases of a feed-forward layer's gate over the halves of one tensor."""
    gated = registry.require("inference_core_ops").gated_activation.default
    gate, up = torch.randn(rows, 2 * cols).to(dtype).chunk(2, -1)
    calls = max(1, int(2e6 / (rows * cols)))
    return [
        Case("torch", lambda: [F.silu(gate) * up for _ in range(calls)]),
        Case("ours", lambda: [gated(gate, up, 0) for _ in range(calls)]),
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", choices=["linear", "attention", "gate"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        if options.only in (None, "linear"):
            for model in options.models:
                _print_linear(model, options)
        if options.only in (None, "attention"):
            _print_attention(options)
        if options.only in (None, "gate"):
            _print_gate(options)


def _print_linear(model: str, options: argparse.Namespace) -> None:
    big = torch.randn(64 << 20)
    for rows in options.rows:
        reading = Case("read", big.sum, 4 * big.numel())
        cases = linear_cases(*MODELS[model], rows)
        timed([reading, *cases], options.rounds)
        speed = reading.num_bytes / reading.ms
        threads = f"{options.threads} thread" + "s" * (options.threads > 1)
        print(
            f"\n{model}, {rows} rows, {threads}; read at {speed / 1e6:.1f} GB/s\n\n| weight | ms | x floor | to bf16 |"
        )
        print("|---|--:|--:|--:|")
        bf16 = next(case.ms for case in cases if case.name == "bf16")
        for case in cases:
            floor = case.num_bytes / speed
            print(f"| {case.name} | {case.spread()} | {case.ms / floor:.2f} | {case.ms / bf16:.2f} |", flush=True)


def _print_attention(options: argparse.Namespace) -> None:
    print(f"\nAttention, {options.threads} threads; us, and the ratio to torch\n")
    print("| batch, heads, kv heads, head, tokens | dtype | torch | ours | ours in blocks |")
    print("|---|---|--:|--:|--:|")
    for shape in ATTENTION:
        for dtype in (torch.float32, torch.bfloat16):
            cases = attention_cases(shape, dtype)
            timed(cases, options.rounds)
            calls = max(1, int(4e7 / (2 * shape[0] * shape[2] * shape[3] * shape[4] * dtype.itemsize)))
            first, ours, blocks = (case.ms / calls * 1e3 for case in cases)
            name, kind = ", ".join(map(str, shape)), str(dtype)[6:]
            mine = " | ".join(f"{one:.0f}: {one / first:.2f}" for one in (ours, blocks))
            print(f"| {name} | {kind} | {first:.0f} | {mine} |", flush=True)


def _print_gate(options: argparse.Namespace) -> None:
    print(f"\nsilu(gate) * up, {options.threads} threads\n\n| rows | dtype | ours to torch |\n|--:|---|--:|")
    for rows in (1, 8, 512):
        for dtype in (torch.float32, torch.bfloat16):
            cases = gate_cases(rows, 2048, dtype)
            timed(cases, options.rounds)
            print(f"| {rows} | {str(dtype)[6:]} | {cases[1].ms / cases[0].ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
