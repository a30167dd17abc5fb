"""`RingAttention` is attention over divided sequences that does not divide heads (arXiv 2310.01889).

Each rank keeps its queries. Keys and values move around the ring of ranks, to the next neighbor in each step, while the
rank computes the block that it has. With P ranks, each query has seen every key after P steps. In the backward, keys,
values and their gradients go around once more. One head is enough, while Ulysses needs one per rank, but it sends more:

    bytes sent per rank, P ranks, N tokens, G KV heads of width d, e bytes per element, KV = 2 * N / P * G * d * e:
    forward (P - 1) KV;  backward (P - 1) KV, and P KV of gradients in fp32

With a causal mask, rank r of P computes r + 1 of its P blocks, so the last rank is the slowest. With `zigzag`, the
sequence is cut into 2 P chunks, and rank r has the chunks r and 2 P - 1 - r (striped attention, arXiv 2311.09431,
balances in a similar way). Then every rank computes half of each block that it receives.

    ring = RingAttention(group, zigzag=True)
    tokens, positions, labels = (zigzag_part(each, group.rank(), group.size(), dim=1) for each in batch)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.errors import counted
from deepspeed.sequence.blockwise import backward_block, delta, forward_block, merge
from deepspeed.sequence.exchange import channel, check_layout


class RingAttention(torch.nn.Module):
    """Attention of this rank's queries to all keys of the sequence.

    Args:
        sequence_process_group: the ranks that share a sequence, in the order of its equal parts.
        causal: whether a token sees only itself and earlier tokens.
        scale: factor of the scores; default: the width of a head to the power -1/2.
        zigzag: each rank has the tokens of `zigzag_part`; otherwise consecutive tokens.
    """

    def __init__(
        self,
        sequence_process_group: ProcessGroup,
        causal: bool = True,
        scale: float | None = None,
        zigzag: bool = False,
    ) -> None:
        super().__init__()
        self.zigzag = zigzag
        self.spg = sequence_process_group
        self.causal = causal
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [B, H, T, K] in the queries' dtype, equal to `scaled_dot_product_attention` over the whole sequence.

        Args:
            query: [B, H, T, K], this rank's tokens.
            key: [B, G, T, K]; G divides H.
            value: as `key`.

        Raises:
            ValueError: on every rank, if heads do not form groups, the number of tokens is odd with `zigzag`, or
                shapes differ between ranks.
        """
        backend = channel(self.spg)
        check_layout(backend, (query, key, value), "RingAttention")
        if query.shape[1] % key.shape[1] or key.shape != value.shape or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"RingAttention: found query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; give [B, H, T, K] and twice [B, G, T, K] where G divides H"
            )
        if self.zigzag and query.shape[2] % 2:
            raise ValueError(
                f"RingAttention: found {counted(query.shape[2], 'token')} per rank with zigzag=True, where a rank has "
                "two equal chunks; pad the sequence to a multiple of twice the number of ranks"
            )
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        order = _Order(self.causal, self.zigzag, query.shape[2])
        return _Ring.apply(query, key, value, backend, order, scale)  # type: ignore[no-any-return,no-untyped-call]


def zigzag_part(tensor: Tensor, rank: int, num_ranks: int, dim: int) -> Tensor:
    """Return the chunks `rank` and 2 * `num_ranks` - 1 - `rank` of 2 * `num_ranks` chunks of a sequence along `dim`.

    Raises:
        ValueError: if the chunks would not be of equal size.
    """
    if tensor.shape[dim] % (2 * num_ranks):
        raise ValueError(
            f"zigzag_part: found {counted(tensor.shape[dim], 'token')} for {num_ranks} ranks; pad them to a multiple "
            f"of {2 * num_ranks}"
        )
    chunks = tensor.chunk(2 * num_ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


@dataclass(frozen=True)
class _Order:
    """`_Order` determines which keys of one rank the queries of another see; each rank has `num_tokens` tokens."""

    causal: bool
    zigzag: bool
    num_tokens: int

    def seen(self, rank: int, source: int) -> tuple[slice, slice, int | None] | None:
        """Return the queries of `rank` that see keys of `source`, these keys, and their diagonal; None if none."""
        every = slice(None)
        if not self.causal:
            return every, every, None
        if source == rank:
            return every, every, 0
        if not self.zigzag:
            return (every, every, None) if source < rank else None
        half = self.num_tokens // 2
        return (every, slice(0, half), None) if source < rank else (slice(half, None), every, None)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, backend: GroupBackend, order: _Order, scale: float
    ) -> Tensor:
        held = torch.stack((key.detach(), value.detach()))
        out, lse = None, None
        for step in range(backend.world_size):
            arriving, work = _pass_on(backend, held) if step < backend.world_size - 1 else (held, None)
            seen = order.seen(backend.rank, (backend.rank - step) % backend.world_size)
            if seen is not None:
                queries, keys, diagonal = seen
                block = forward_block(query[:, :, queries], held[0][:, :, keys], held[1][:, :, keys], scale, diagonal)
                if out is None or lse is None:  # the first block has the rank's own keys, which all its queries see
                    out, lse = block
                else:
                    merged = merge(out[:, :, queries], lse[:, :, queries], *block)
                    out[:, :, queries], lse[:, :, queries] = merged
            if work is not None:
                work.wait()
            held = arriving
        assert out is not None
        assert lse is not None
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.backend, ctx.order, ctx.scale = backend, order, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        backend: GroupBackend = ctx.backend
        delta_BHT = delta(grad, out)
        held = torch.stack((key, value))
        grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        grad_held = torch.zeros(held.shape, dtype=torch.float32, device=held.device)
        for step in range(backend.world_size):
            arriving, work = _pass_on(backend, held) if step < backend.world_size - 1 else (held, None)
            seen = ctx.order.seen(backend.rank, (backend.rank - step) % backend.world_size)
            if seen is not None:
                queries, keys, diagonal = seen
                block = backward_block(
                    grad[:, :, queries],
                    query[:, :, queries],
                    held[0][:, :, keys],
                    held[1][:, :, keys],
                    delta_BHT[:, :, queries],
                    lse[:, :, queries],
                    ctx.scale,
                    diagonal,
                )
                grad_query[:, :, queries] += block[0]
                grad_held[0][:, :, keys] += block[1]
                grad_held[1][:, :, keys] += block[2]
            if work is not None:
                work.wait()
            held = arriving
            grad_held, work = _pass_on(backend, grad_held)  # after the last step they are back on their own rank
            work.wait()
        grads = grad_query.to(query.dtype), grad_held[0].to(key.dtype), grad_held[1].to(value.dtype)
        return (*grads, None, None, None)


def _pass_on(backend: GroupBackend, held: Tensor) -> tuple[Tensor, Work]:
    """Start to send to the next rank, and to receive from the previous rank."""
    arriving = torch.empty_like(held)
    sends, receives = [0] * backend.world_size, [0] * backend.world_size
    sends[(backend.rank + 1) % backend.world_size] = held.numel()
    receives[(backend.rank - 1) % backend.world_size] = held.numel()
    return arriving, backend.all_to_all(arriving.view(-1), held.view(-1), receives, sends, tag="ring")
