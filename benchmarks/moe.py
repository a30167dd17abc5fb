"""MoE layers: time and memory for several numbers of tokens and experts, against GShard's einsum over masks.

    python benchmarks/moe.py                       # two minutes on one core
    python benchmarks/moe.py --experts 64 --tokens 2048 --rounds 9 --markdown

Measures a forward and backward of a layer in fp32 on one core, with k = 2 and a capacity factor of 1. *ms* is the
median of interleaved rounds, with gradients cleared before each; *to einsum* is the ratio of the medians. *peak* is the
highest resident set of a step minus the resident set before. The weights already have gradients, so the peak contains
activations, masks, and one gradient being added. *us per token* and *KiB per token* stay constant if time and memory
are linear in tokens.

    stacked   MoE(expert=ExpertMLP(...)): grouped matrix products
    copies    MoE(expert=nn.Sequential(...)): a slice for each expert
    einsum    masks [T, E, capacity] (arXiv 2006.16668, algorithm 1), experts as one batched matrix product

All variants have the same weights. Their outputs are compared before the timing.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")  # return freed buffers to the system

import resident_memory
import torch
import torch.nn.functional as F
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

K, WIDTH, INNER = 2, 256, 512


class Einsum(nn.Module):
    """An MoE layer with masks and the weights of `moe`. T tokens, E experts, C capacity, H width, F inner width."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.wg, self.experts = moe.deepspeed_moe.gate.wg, moe.deepspeed_moe.experts

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        gates_TE = self.wg(x_TH).softmax(-1)
        num_tokens, num_experts = gates_TE.shape
        capacity = -(-K * num_tokens // num_experts)
        before_E = torch.zeros(num_experts, dtype=torch.int64)
        chosen = [F.one_hot(index, num_experts) for index in gates_TE.topk(K).indices.unbind(1)]
        loss = num_experts * (gates_TE.mean(0) * chosen[0].float().mean(0)).sum()
        weights, places = [], []
        for mask_TE in chosen:
            place_TE = mask_TE.cumsum(0) - 1 + before_E
            before_E = before_E + mask_TE.sum(0)
            kept_TE = mask_TE * (place_TE < capacity)
            weights.append(gates_TE * kept_TE)
            places.append(F.one_hot((place_TE * kept_TE).sum(1), capacity).float())
        total_T1 = sum(weights).sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        masks = [torch.einsum("te,tc->tec", w / total_T1, p) for w, p in zip(weights, places, strict=True)]
        combine_TEC = masks[0] + masks[1]
        rows_ECH = torch.einsum("tec,th->ech", (combine_TEC != 0).float(), x_TH)
        inner_ECF = F.gelu(torch.bmm(rows_ECH, self.experts.up.transpose(1, 2)))
        out_ECH = torch.bmm(inner_ECF, self.experts.down.transpose(1, 2))
        return torch.einsum("tec,ech->th", combine_TEC, out_ECH), loss


def build(num_experts: int) -> dict[str, nn.Module]:
    """Build the variants with the same weights."""
    arguments = {"num_experts": num_experts, "k": K, "min_capacity": 1, "top2_2nd_expert_sampling": False}
    torch.manual_seed(0)
    stacked = MoE(WIDTH, lambda: ExpertMLP(WIDTH, INNER), **arguments)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    copies = MoE(WIDTH, nn.Sequential(linear(WIDTH, INNER), nn.GELU(), linear(INNER, WIDTH)), **arguments)
    with torch.no_grad():
        copies.deepspeed_moe.gate.wg.weight.copy_(stacked.deepspeed_moe.gate.wg.weight)
        weights = stacked.deepspeed_moe.experts
        for expert, up, down in zip(
            copies.deepspeed_moe.experts.deepspeed_experts, weights.up, weights.down, strict=True
        ):
            expert[0].weight.copy_(up)
            expert[2].weight.copy_(down)
    return {"stacked": stacked, "copies": copies, "einsum": Einsum(stacked)}


def step(layer: nn.Module, x_TH: Tensor) -> Tensor:
    y_TH, loss = layer(x_TH)[:2]
    (y_TH.square().mean() + loss).backward()
    return y_TH.detach()


def measure(num_tokens: int, num_experts: int, num_rounds: int) -> list[tuple[str, float, float]]:
    """Return rows of (variant, median ms, peak bytes)."""
    layers = build(num_experts)
    x_TH = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    outputs = {name: step(layer, x_TH) for name, layer in layers.items()}  # warms up and creates gradients
    for output in outputs.values():
        torch.testing.assert_close(output, outputs["einsum"], rtol=1e-4, atol=1e-5)
    del outputs, output
    peaks = {}
    for name, layer in layers.items():
        before = resident_memory.resident_bytes()
        resident_memory.reset_peak()
        step(layer, x_TH)
        peaks[name] = resident_memory.peak_bytes() - before
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(num_rounds):
        for name, layer in layers.items():  # A B C A B C: other load affects all alike
            layer.zero_grad()
            x_TH.grad = None
            start = time.perf_counter()
            step(layer, x_TH)
            times[name].append((time.perf_counter() - start) * 1e3)
    return [(name, statistics.median(times[name]), peaks[name]) for name in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="print a table of markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ("experts", "tokens", "variant", "ms", "to einsum", "us per token", "peak MiB", "KiB per token")
    line = "| " + " | ".join(["{}"] * len(head)) + " |" if args.markdown else "{:>8}" * 2 + "{:>10}" + "{:>14}" * 5
    print(line.format(*head))
    if args.markdown:
        print("|" + "--:|" * len(head))
    for num_experts in args.experts:
        for num_tokens in args.tokens:
            rows = measure(num_tokens, num_experts, args.rounds)
            einsum_ms = next(ms for name, ms, _ in rows if name == "einsum")
            for name, ms, peak in rows:
                figures = (ms, ms / einsum_ms, ms * 1e3 / num_tokens, peak / 2**20, peak / 2**10 / num_tokens)
                texts = [f"{value:.{digits}f}" for value, digits in zip(figures, (0, 2, 1, 0, 1), strict=True)]
                print(line.format(num_experts, num_tokens, name, *texts), flush=True)


if __name__ == "__main__":
    main()
