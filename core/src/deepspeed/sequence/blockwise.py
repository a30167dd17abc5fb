"""Attention in blocks of queries and keys, exact: the softmax is put together from the blocks' sums.

    forward of a block:   s = q k^T * scale,  l = logsumexp(s),  o = exp(s - l) v
    two blocks of keys:   l' = log(exp(l1) + exp(l2)),  o' = exp(l1 - l') o1 + exp(l2 - l') o2
    backward of a block:  p = exp(s - l'),  ds = p * (do v^T - sum(do * o')) * scale
                          dq = ds k,  dk = ds^T q,  dv = p^T do

(arXiv 2205.14135, appendix B; arXiv 2310.01889, section 3.) Ring attention and chunked attention are loops over these.
All sums are in fp32. Shape legend: B batch, H query heads, G KV heads, T queries, S keys, K width of a head. Query
heads of a group share a KV head: G divides H.
"""

import torch
from torch import Tensor


def forward_block(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scale: float, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    """The context [B, H, T, K] and log-sum [B, H, T] over the keys of one block, fp32.

    Args:
        q_BHTK: queries.
        k_BGSK: keys.
        v_BGSK: values.
        scale: on the scores.
        diagonal: None: every query sees every key; d: query t sees keys up to t + d, at least one of them.
    """
    scores = _scores(q_BHTK, k_BGSK, scale, diagonal)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp_()
    return (weights @ v_BGSK[:, :, None].float()).flatten(1, 2), lse.flatten(1, 2)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Context and log-sum over the keys of both."""
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
    """This block's parts of the gradients of queries, keys and values, fp32.

    Args:
        grad_BHTK: of the context over all keys.
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
    """Sum over K of gradient times context, [B, H, T], fp32."""
    return (grad_BHTK.float() * out_BHTK.float()).sum(dim=-1)


def _scores(q_BHTK: Tensor, k_BGSK: Tensor, scale: float, diagonal: int | None) -> Tensor:
    """[B, G, H / G, T, S]."""
    scores = _grouped(q_BHTK, k_BGSK.shape[1]).float() @ k_BGSK[:, :, None].float().transpose(-1, -2) * scale
    if diagonal is None:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_(diagonal)
    return scores.masked_fill(~visible, float("-inf"))


def _grouped(tensor_BHTK: Tensor, num_kv: int) -> Tensor:
    return tensor_BHTK.unflatten(1, (num_kv, -1))
