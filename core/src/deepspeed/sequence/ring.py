"""`RingAttention`: attention over divided sequences that divides no heads (arXiv 2310.01889).

Each rank keeps its queries. Keys and values travel around the ring of ranks, one neighbor per step, while the block
that is there is computed; after as many steps as ranks each query has seen every key. In the backward keys, values and
their gradients travel once more. It needs no more heads than one, where Ulysses needs one per rank, and sends more:

    bytes sent per rank, P ranks, N tokens, G KV heads of width d, e bytes per element, KV = 2 * N / P * G * d * e:
    forward (P - 1) KV;  backward (P - 1) KV, and P KV of gradients in fp32

With a causal mask rank r has r + 1 blocks to compute, and the last rank is the slowest: use Ulysses where heads allow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.sequence.blockwise import backward_block, delta, forward_block, merge
from deepspeed.sequence.channel import channel, check_layout


class RingAttention(torch.nn.Module):
    """Attention of this rank's queries to all keys of the sequence.

    Args:
        sequence_process_group: the ranks that share a sequence, in the order of its equal parts.
        causal: whether a token sees only itself and those before it.
        scale: on the scores; default: the width of a head to the power -1/2.
    """

    def __init__(self, sequence_process_group: ProcessGroup, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.spg = sequence_process_group
        self.causal = causal
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, T, K] in the queries' dtype, as `scaled_dot_product_attention` over the whole sequence.

        Args:
            query: [B, H, T, K], this rank's tokens.
            key: [B, G, T, K]; G divides H.
            value: as `key`.

        Raises:
            ValueError: on every rank, for heads that form no groups, and for shapes that differ between ranks.
        """
        backend = channel(self.spg)
        check_layout(backend, (query, key, value), "RingAttention")
        if query.shape[1] % key.shape[1] or key.shape != value.shape or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"RingAttention: found query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; give [B, H, T, K] and twice [B, G, T, K] where G divides H"
            )
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        return _Ring.apply(query, key, value, backend, self.causal, scale)  # type: ignore[no-any-return,no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, backend: GroupBackend, causal: bool, scale: float
    ) -> Tensor:
        held = torch.stack((key.detach(), value.detach()))
        out, lse = None, None
        for step in range(backend.world_size):
            arriving, work = _pass_on(backend, held) if step < backend.world_size - 1 else (held, None)
            is_seen, diagonal = _block(backend, step, causal)
            if is_seen:
                block = forward_block(query, held[0], held[1], scale, diagonal)
                out, lse = block if out is None or lse is None else merge(out, lse, *block)
            if work is not None:
                work.wait()
            held = arriving
        assert out is not None  # each token sees its own block
        assert lse is not None
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.backend, ctx.causal, ctx.scale = backend, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        backend: GroupBackend = ctx.backend
        delta_BHT = delta(grad, out)
        held = torch.stack((key, value))
        grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        grad_held = torch.zeros(held.shape, dtype=torch.float32, device=held.device)
        for step in range(backend.world_size):
            arriving, work = _pass_on(backend, held) if step < backend.world_size - 1 else (held, None)
            is_seen, diagonal = _block(backend, step, ctx.causal)
            if is_seen:
                block = backward_block(grad, query, held[0], held[1], delta_BHT, lse, ctx.scale, diagonal)
                grad_query += block[0]
                grad_held[0] += block[1]
                grad_held[1] += block[2]
            if work is not None:
                work.wait()
            held = arriving
            grad_held, work = _pass_on(backend, grad_held)  # after the last step they are home
            work.wait()
        grads = grad_query.to(query.dtype), grad_held[0].to(key.dtype), grad_held[1].to(value.dtype)
        return (*grads, None, None, None)


def _block(backend: GroupBackend, step: int, causal: bool) -> tuple[bool, int | None]:
    """Whether this rank's queries see the keys that are here in a step, and their diagonal."""
    if not causal:
        return True, None
    source = (backend.rank - step) % backend.world_size
    return source <= backend.rank, 0 if source == backend.rank else None


def _pass_on(backend: GroupBackend, held: Tensor) -> tuple[Tensor, Work]:
    """Start to send to the next rank, and to receive from the one before."""
    arriving = torch.empty_like(held)
    sends, receives = [0] * backend.world_size, [0] * backend.world_size
    sends[(backend.rank + 1) % backend.world_size] = held.numel()
    receives[(backend.rank - 1) % backend.world_size] = held.numel()
    return arriving, backend.all_to_all(arriving.view(-1), held.view(-1), receives, sends, tag="ring")
