"""Tokens to experts and back: sorted by expert, sent to the ranks that hold them, and summed with their weights.

    rows = x[token of every choice, sorted by expert]      N rows: what no gate dropped
    rows to the ranks of their experts                      all-to-all; sorted by expert again
    experts                                                 one contiguous slice each
    rows back                                               all-to-all
    y[token] = sum over its choices of weight * row

The numbers are those of GShard's einsum over masks of [T, E, capacity], without the masks and without padding: memory
is linear in the number of tokens, and an expert computes the rows that it got.

Shape legend: T tokens, K choices of a token, N rows, E experts of all ranks, L experts of this rank, W ranks, H width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.moe.gate import Routing
from deepspeed.moe.token_ranks import send_counts, send_rows

#: the experts of a rank: rows sorted by expert, and how many each gets -> their outputs
RunExperts = Callable[[Tensor, Sequence[int]], Tensor]


def dispatch(x_TH: Tensor, routing: Routing, run: RunExperts, ranks: GroupBackend | None) -> Tensor:
    """The outputs of the experts, weighted and summed for every token; in the dtype of `x_TH`.

    Args:
        run: called once, also if no row came.
        ranks: hold the experts in equal parts, in the order of experts; None: this rank holds all. A collective.
    """
    k = routing.experts.shape[1]
    sorted_N, counts_E = sort_by_expert(routing)
    if ranks is None or ranks.world_size == 1:
        counts = counts_E.tolist()
        choices_N = sorted_N[: sum(counts)]
        out_NH = run(x_TH.index_select(0, choices_N // k), counts)
    else:
        counts_WL = counts_E.view(ranks.world_size, -1)
        received_WL = send_counts(counts_WL, ranks)
        to_each, from_each = torch.stack([counts_WL.sum(1), received_WL.sum(1)]).tolist()
        choices_N = sorted_N[: sum(to_each)]
        rows_NH = send_rows(x_TH.index_select(0, choices_N // k), to_each, from_each, ranks)
        out_NH = send_rows(_run_received(rows_NH, received_WL, run), from_each, to_each, ranks)
    return _combine(out_NH.to(x_TH.dtype), choices_N, routing.weights)


def sort_by_expert(routing: Routing) -> tuple[Tensor, Tensor]:
    """Choices (token * K + which) by expert, then by token, with those that are dropped at the end; and the number of
    those that stay, by expert."""
    num_experts = len(routing.counts)
    chosen_N = torch.where(routing.kept, routing.experts, num_experts).view(-1)
    return chosen_N.argsort(stable=True), torch.bincount(chosen_N, minlength=num_experts)[:num_experts]


def _run_received(rows_NH: Tensor, received_WL: Tensor, run: RunExperts) -> Tensor:
    """Rows that come by rank and then by expert, and return so."""
    num_ranks, num_own = received_WL.shape
    counts = received_WL.sum(0).tolist()
    if num_own == 1:
        return run(rows_NH, counts)
    expert_of_block = torch.arange(num_own, device=rows_NH.device).repeat(num_ranks)
    by_expert_N = expert_of_block.repeat_interleave(received_WL.reshape(-1)).argsort(stable=True)
    back_N = torch.empty_like(by_expert_N)
    back_N[by_expert_N] = torch.arange(len(by_expert_N), device=rows_NH.device)
    return run(rows_NH.index_select(0, by_expert_N), counts).index_select(0, back_N)


def _combine(out_NH: Tensor, choices_N: Tensor, weights_TK: Tensor) -> Tensor:
    """Without atomic additions, so that sums are the same in every run."""
    num_tokens, k = weights_TK.shape
    out_TKH = out_NH.new_zeros(num_tokens * k, out_NH.shape[1]).index_copy(0, choices_N, out_NH)
    if k == 1:
        return out_TKH * weights_TK.to(out_NH.dtype)
    return torch.bmm(weights_TK.to(out_NH.dtype)[:, None], out_TKH.view(num_tokens, k, out_NH.shape[1]))[:, 0]
