"""Send tokens to experts and back: sort them by expert, send them to the experts' ranks, and sum the weighted outputs.

    rows = x[token of every choice, sorted by expert]      N rows: the choices that the gate kept
    rows to the ranks of their experts                      all-to-all; sorted by expert again
    experts                                                 one contiguous slice each
    rows back                                               all-to-all
    y[token] = sum over its choices of weight * row

The result equals GShard's einsum over masks of [T, E, capacity], without masks and padding: memory is linear in the
number of tokens, and an expert computes only the rows that it receives.

Shape legend: T tokens, K choices of a token, N rows, E experts of all ranks, L experts of this rank, W ranks, H width.

A differentiable all-to-all with unequal counts sends the rows. It has separate process groups: a group of ZeRO may have
the same ranks, but ZeRO issues its collectives when gradients arrive, so their order among the collectives of the
model's backward differs between ranks.

`drop_tokens` and `gather_tokens` are for users' own layers: tensor-parallel ranks that have the same tokens divide the
tokens, and gather them again. In between, each rank sends its part of the tokens to experts that are whole on every
tensor-parallel rank. The ranks come from `deepspeed.utils.groups`.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.own_group import group_of_members
from deepspeed.comm.torch_group import group_backend
from deepspeed.errors import ConfigError
from deepspeed.moe.gate import Routing
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh

_TAG = "tokens of experts"
# By world group, the groups for tokens by their ranks: layers share groups, and groups die with their world.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def token_ranks(mesh: Mesh, ep_size: int) -> GroupBackend:
    """Return the backend of the ranks over which experts are divided. A collective of all ranks of the mesh.

    Raises:
        ConfigError: if `ep_size` does not divide dp x sp.
    """
    ranks = mesh.experts(ep_size).ranks("ep")
    made = _made.setdefault(mesh.world, {})
    if ranks not in made:
        made[ranks] = group_of_members(ranks)
    backend = group_backend(made[ranks])
    backend.connect()
    return backend


def send_counts(counts_WE: Tensor, ranks: GroupBackend) -> Tensor:
    """Send row r of `counts_WE`, int64, to rank r. Returns the received rows, by rank. A collective."""
    received_WE = torch.empty_like(counts_WE)
    ranks.all_to_all(received_WE.view(-1), counts_WE.contiguous().view(-1), tag=_TAG).wait()
    return received_WE


def send_rows(rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend) -> Tensor:
    """Send the first `to_each[0]` rows to rank 0, and so on. Returns the received rows, by rank. A collective, also in
    backward. `from_each` is the number of rows to receive from each rank.
    """
    sent: Tensor = _SendRows.apply(rows_NH, to_each, from_each, ranks)
    return sent


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend
    ) -> Tensor:
        ctx.to_each, ctx.from_each, ctx.ranks = to_each, from_each, ranks
        return _send(rows_NH, to_each, from_each, ranks)

    @staticmethod
    def backward(ctx: Any, *grads_NH: Tensor) -> tuple[Tensor, None, None, None]:
        return send_rows(grads_NH[0], ctx.from_each, ctx.to_each, ctx.ranks), None, None, None


def _send(rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend) -> Tensor:
    width = rows_NH.shape[1]
    received_NH = rows_NH.new_empty(sum(from_each), width)
    ranks.all_to_all(
        received_NH.view(-1),
        rows_NH.contiguous().view(-1),
        [count * width for count in from_each],
        [count * width for count in to_each],
        tag=_TAG,
    ).wait()
    return received_NH


#: runs the experts of a rank: (rows sorted by expert, number of rows per expert) -> outputs
RunExperts = Callable[[Tensor, Sequence[int]], Tensor]


def dispatch(x_TH: Tensor, routing: Routing, run: RunExperts, ranks: GroupBackend | None) -> Tensor:
    """Return the experts' outputs, weighted and summed per token, in the dtype of `x_TH`.

    Args:
        run: runs this rank's experts; called once, even without rows.
        ranks: the ranks that hold equal parts of the experts, in order; a collective. None: this rank holds all.
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
    """Return choices (token * K + choice) sorted by expert, then by token, with dropped choices last; and the number of
    kept choices per expert."""
    num_experts = len(routing.counts)
    chosen_N = torch.where(routing.kept, routing.experts, num_experts).reshape(-1)
    return chosen_N.argsort(stable=True), torch.bincount(chosen_N, minlength=num_experts)[:num_experts]


def _run_received(rows_NH: Tensor, received_WL: Tensor, run: RunExperts) -> Tensor:
    """Run the experts on rows that are sorted by rank, then by expert. Returns outputs in the same order."""
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
    """Sum the weighted outputs of each token. Uses no atomic additions, so the sums are deterministic."""
    num_tokens, k = weights_TK.shape
    out_TKH = out_NH.new_zeros(num_tokens * k, out_NH.shape[1]).index_copy(0, choices_N, out_NH)
    if k == 1:
        return out_TKH * weights_TK.to(out_NH.dtype)
    return torch.bmm(weights_TK.to(out_NH.dtype)[:, None], out_TKH.view(num_tokens, k, out_NH.shape[1]))[:, 0]


_TENSOR_TAG = "tokens of tensor-parallel ranks"


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part along `dim` of `input_`, which is equal on all ranks. Backward all-gathers the gradient.

    Raises:
        ConfigError: if the number of ranks does not divide the dim's size.
    """
    backend = _ranks()
    if input_.shape[dim] % backend.world_size:
        raise ConfigError(
            f"drop_tokens: found {input_.shape[dim]} along dim {dim}, which {backend.world_size} tensor-parallel ranks "
            f"cannot divide; pad it to {input_.shape[dim] + -input_.shape[dim] % backend.world_size}"
        )
    return _Drop.apply(input_, dim, backend) if backend.world_size > 1 else input_  # type: ignore[no-any-return,no-untyped-call]


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """All-gather parts of equal shape along `dim`. Backward keeps this rank's part of the gradient, which must be equal
    on all ranks."""
    backend = _ranks()
    return _Gather.apply(input_, dim, backend) if backend.world_size > 1 else input_  # type: ignore[no-any-return,no-untyped-call]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, backend: GroupBackend) -> Tensor:
        ctx.dim, ctx.backend = dim, backend
        return _own(whole, dim, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Gather.apply(grad, ctx.dim, ctx.backend), None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, backend: GroupBackend) -> Tensor:
        ctx.dim, ctx.backend = dim, backend
        return _all(own, dim, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Drop.apply(grad, ctx.dim, ctx.backend), None, None  # type: ignore[no-untyped-call]


def _own(whole: Tensor, dim: int, backend: GroupBackend) -> Tensor:
    return whole.chunk(backend.world_size, dim)[backend.rank].contiguous()


def _all(own: Tensor, dim: int, backend: GroupBackend) -> Tensor:
    gathered = backend.allocate(own.numel() * backend.world_size, own.dtype, own.device)
    backend.all_gather(gathered, own.contiguous().view(-1), tag=_TENSOR_TAG).wait()
    return torch.cat(gathered.view(backend.world_size, *own.shape).unbind(), dim)


def _ranks() -> GroupBackend:
    backend = dist.group_backend(groups._get_model_parallel_group())
    backend.connect()
    return backend
