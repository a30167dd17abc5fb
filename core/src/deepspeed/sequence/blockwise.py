"""Exact attention in blocks of queries and keys: the softmax is combined from the sums of the blocks.

    forward of a block:   s = q k^T * scale,  l = logsumexp(s),  o = exp(s - l) v
    two blocks of keys:   l' = log(exp(l1) + exp(l2)),  o' = exp(l1 - l') o1 + exp(l2 - l') o2
    backward of a block:  p = exp(s - l'),  ds = p * (do v^T - sum(do * o')) * scale
                          dq = ds k,  dk = ds^T q,  dv = p^T do

(arXiv 2205.14135, appendix B; arXiv 2310.01889, section 3.) Ring attention and chunked attention are loops over these.
All sums are in fp32. Shape legend: B batch, H query heads, G KV heads, T queries, S keys, K width of a head. Query
heads of a group share a KV head: G divides H.

`ChunkedAttention` implements the method of FPDT (arXiv 2408.16978, section 4) as a local attention: queries, keys,
values and the context are cut into chunks that stay on the host, and the device computes one pair of chunks at a time.
Autograd still passes whole inputs, contexts and gradients; only the tensors that attention saves for the backward are
on the host. Copies back to the device are asynchronous if the host memory is page-locked.

    DistributedAttention(ChunkedAttention(chunk_size=65536), group, scatter_idx=2, gather_idx=1)
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.accelerator import get_accelerator


def forward_block(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scale: float, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    """Return the context [B, H, T, K] and the log-sum [B, H, T] over the keys of one block, fp32.

    Args:
        q_BHTK: queries.
        k_BGSK: keys.
        v_BGSK: values.
        scale: factor of the scores.
        diagonal: None: every query sees every key; d: query t sees keys up to t + d, at least one key.
    """
    scores = _scores(q_BHTK, k_BGSK, scale, diagonal)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp_()
    return (weights @ v_BGSK[:, :, None].float()).flatten(1, 2), lse.flatten(1, 2)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the contexts and log-sums of two sets of keys."""
    total = torch.logaddexp(lse, block_lse)
    return out * (lse - total).exp()[..., None] + block_out * (block_lse - total).exp()[..., None], total


def backward_block(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    delta_BHT: Tensor,
    lse_BHT: Tensor,
    scale: float,
    diagonal: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's contributions to the gradients of queries, keys and values, fp32.

    Args:
        grad_BHTK: gradient of the context over all keys.
        q_BHTK: as in the forward.
        k_BGSK: as in the forward.
        v_BGSK: as in the forward.
        delta_BHT: sum over K of gradient times context, fp32.
        lse_BHT: log-sum over all keys.
        scale: as in the forward.
        diagonal: as in the forward.
    """
    num_kv = k_BGSK.shape[1]
    grad, q = (_grouped(each, num_kv).float() for each in (grad_BHTK, q_BHTK))
    k, v = (each[:, :, None].float() for each in (k_BGSK, v_BGSK))
    scores = _scores(q_BHTK, k_BGSK, scale, diagonal)
    weights = (scores - lse_BHT.unflatten(1, (num_kv, -1))[..., None]).exp_()
    grad_v = (weights.transpose(-1, -2) @ grad).sum(dim=2)
    grad_scores = weights * (grad @ v.transpose(-1, -2) - delta_BHT.unflatten(1, (num_kv, -1))[..., None]) * scale
    return (grad_scores @ k).flatten(1, 2), (grad_scores.transpose(-1, -2) @ q).sum(dim=2), grad_v


def delta(grad_BHTK: Tensor, out_BHTK: Tensor) -> Tensor:
    """Return the sum over K of gradient times context, [B, H, T], fp32."""
    return (grad_BHTK.float() * out_BHTK.float()).sum(dim=-1)


def _scores(q_BHTK: Tensor, k_BGSK: Tensor, scale: float, diagonal: int | None) -> Tensor:
    """Return the masked scores [B, G, H / G, T, S]."""
    scores = _grouped(q_BHTK, k_BGSK.shape[1]).float() @ k_BGSK[:, :, None].float().transpose(-1, -2) * scale
    if diagonal is None:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_(diagonal)
    return scores.masked_fill(~visible, float("-inf"))


def _grouped(tensor_BHTK: Tensor, num_kv: int) -> Tensor:
    return tensor_BHTK.unflatten(1, (num_kv, -1))


class ChunkedAttention(torch.nn.Module):
    """Attention to all keys, chunk by chunk.

    Args:
        chunk_size: tokens per chunk.
        causal: whether a token sees only itself and earlier tokens.
        offload: keep the chunks of a device in host memory.
        scale: factor of the scores; default: the width of a head to the power -1/2.
        sequence_dim: token dim of the inputs and the context; default: [B, T, H, K].
        head_dim: head dim of the inputs and the context.
    """

    def __init__(
        self,
        chunk_size: int,
        causal: bool = True,
        offload: bool = True,
        scale: float | None = None,
        sequence_dim: int = 1,
        head_dim: int = 2,
    ) -> None:
        super().__init__()
        if chunk_size < 1:
            raise ValueError(f"ChunkedAttention: chunk_size is {chunk_size}; give at least one token")
        (batch_dim,) = {0, 1, 2} - {sequence_dim, head_dim}
        self.chunk_size, self.causal, self.offload, self.scale = chunk_size, causal, offload, scale
        self._order = (batch_dim, head_dim, sequence_dim, 3)
        self._back = tuple(self._order.index(dim) for dim in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the context in the layout and dtype of the queries; key and value may have fewer heads."""
        tensors = (each.permute(self._order) for each in (query, key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        context: Tensor = _Chunked.apply(*tensors, self.chunk_size, self.causal, self.offload, scale)  # type: ignore[no-untyped-call]
        return context.permute(self._back)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunk_size: int, causal: bool, offload: bool, scale: float
    ) -> Tensor:
        ctx.device, ctx.causal, ctx.scale, ctx.offload = query.device, causal, scale, offload
        queries, keys, values = (
            [_store(each, offload) for each in t.split(chunk_size, dim=2)] for t in (query, key, value)
        )
        outs, sums = [], []
        context = torch.empty_like(query)
        for number, stored in enumerate(queries):
            q = _load(stored, ctx.device)
            out, lse = None, None
            for other in range(number + 1 if causal else len(keys)):
                k, v = _load(keys[other], ctx.device), _load(values[other], ctx.device)
                block = forward_block(q, k, v, scale, 0 if causal and other == number else None)
                out, lse = block if out is None or lse is None else merge(out, lse, *block)
            assert out is not None
            assert lse is not None
            context.narrow(2, number * chunk_size, q.shape[2]).copy_(out)
            outs.append(_store(out.to(query.dtype), offload))
            sums.append(_store(lse, offload))
        ctx.chunk_size = chunk_size
        ctx.numbers = [len(each) for each in (queries, keys, values, outs, sums)]
        ctx.save_for_backward(*queries, *keys, *values, *outs, *sums)  # chunks without a copy are views of the inputs
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        queries, keys, values, outs, sums = ([*islice(saved, number)] for number in ctx.numbers)
        grads = grad.split(ctx.chunk_size, dim=2)
        deltas = [delta(part, _load(out, ctx.device)) for part, out in zip(grads, outs, strict=True)]
        grad_q: dict[int, Tensor] = {}
        grad_k, grad_v = [], []
        for other in range(len(keys)):
            k, v = _load(keys[other], ctx.device), _load(values[other], ctx.device)
            sum_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
            sum_v = torch.zeros_like(sum_k)
            for number in range(other if ctx.causal else 0, len(queries)):
                q, lse = _load(queries[number], ctx.device), _load(sums[number], ctx.device)
                diagonal = 0 if ctx.causal and other == number else None
                own, of_k, of_v = backward_block(grads[number], q, k, v, deltas[number], lse, ctx.scale, diagonal)
                sum_k += of_k
                sum_v += of_v
                former = grad_q.get(number)
                grad_q[number] = _store(own if former is None else own + _load(former, ctx.device), ctx.offload)
            grad_k.append(_store(sum_k.to(grad.dtype), ctx.offload))
            grad_v.append(_store(sum_v.to(grad.dtype), ctx.offload))
        whole = []
        for chunks in ([grad_q[number] for number in range(len(queries))], grad_k, grad_v):
            whole.append(torch.cat([_load(each, ctx.device).to(grad.dtype) for each in chunks], dim=2))
        return (*whole, None, None, None, None)


def _store(tensor: Tensor, offload: bool) -> Tensor:
    """Return a chunk in host memory with `offload`, else the chunk itself."""
    if not offload or tensor.device.type == "cpu":
        return tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return get_accelerator().pin_memory(host).copy_(tensor.detach())


def _load(stored: Tensor, device: torch.device) -> Tensor:
    return stored.to(device, non_blocking=True)
