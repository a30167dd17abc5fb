"""Queries, keys and values of a layer from one product, the rotary embedding, and attention with a mask.

Shape legend: B batch, T new tokens, S tokens with those of the cache, H query heads, G key-value heads, D head size.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.inference.injection.policies import Layout
from deepspeed.ops.operators import FLOATS, operator_for
from deepspeed.ops.transformer import decode_attention
from deepspeed.ops.transformer.decode_attention import OP as DECODE


@runtime_checkable
class AttendingCache(Protocol):
    """A cache that computes attention itself, because it knows which tokens belong to which sequence."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        *,
        scale: float,
        alibi_slopes: Tensor | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Write keys and values of new tokens, and return their attention output, [B, T, H D].

        Args:
            query: [B, H, T, D]. key, value: [B, G, T, D].
            alibi_slopes: [H].
            window: number of tokens that a query sees; None: all.
            softcap: see `decode_attention`.
        """
        ...


def split_heads(qkv: Tensor, layout: Layout, head_dim: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, T, outputs] into views [B, H, T, D], [B, G, T, D], [B, G, T, D] of queries, keys and values.

    Args:
        sizes: output sizes of the query, key and value linears if separate; (0, number of groups) if grouped.
    """
    if layout == "separate":
        query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, -1))
    elif layout == "by_part":
        query, key, value = qkv.unflatten(-1, (3, -1, head_dim)).unbind(2)
    elif layout == "by_head":
        query, key, value = qkv.unflatten(-1, (-1, 3, head_dim)).unbind(3)
    else:
        num_groups = sizes[1]
        groups = qkv.unflatten(-1, (num_groups, -1, head_dim))
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of D features: (x_1, x_2) -> (x_1 cos - x_2 sin, x_2 cos + x_1 sin), x_1 the first half.

    Args:
        x: [B, heads, T, D].
        cos, sin: [B or 1, 1, T, R], the halves repeated.
    """
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    first, second = turned.chunk(2, -1)
    rotated = turned * cos + torch.cat((-second, first), -1) * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate like `rotate_halves`, but x_1 are the even and x_2 the odd elements; cos, sin: [B or 1, 1, T, R/2]."""
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    is_causal: bool,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T + mask) v, as [B, T, H D].

    Args:
        query: [B, H, T, D]. key, value: [B, G, S, D].
        mask: added, or bool (True: visible), [B or 1, H or 1, T, S]; None: all tokens, or no later ones if `is_causal`.
        softcap: c; scores s become c tanh(s / c) before the mask. No kernel supports it.
    """
    if softcap is not None:
        return _capped(query, key, value, mask, scale, is_causal, softcap)
    num_new = query.shape[2]
    sees_all = num_new == 1 and mask is None and query.dtype in FLOATS
    if sees_all and operator_for(DECODE, "decode_attention", query, key, value) is not None:  # torch's own is next best
        lengths = torch.full((query.shape[0],), key.shape[2], dtype=torch.int32, device=query.device)
        return decode_attention(query, key, value, lengths, scale).transpose(1, 2).flatten(2)
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal and mask is None and num_new > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context.transpose(1, 2).flatten(2)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, softcap: float
) -> Tensor:
    num_heads, num_new, num_seen = query.shape[1], query.shape[2], key.shape[2]
    key, value = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    if mask is not None:
        scores = scores + _added(mask, scores.dtype)
    elif is_causal and num_new > 1:
        later = torch.ones(num_new, num_seen, dtype=torch.bool, device=query.device).triu(num_seen - num_new + 1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
    context = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value
    return context.transpose(1, 2).flatten(2)


def within_window(mask: Tensor | None, num_new: int, num_seen: int, window: int, like: Tensor) -> Tensor:
    """Return `mask` that also hides tokens `window` or more positions before the query, and tokens after it."""
    position = torch.arange(num_seen - num_new, num_seen, device=like.device).unsqueeze(1)
    distance = position - torch.arange(num_seen, device=like.device)
    hidden = (distance < 0) | (distance >= window)
    base = like.new_zeros(1, 1, num_new, num_seen) if mask is None else _added(mask[..., :num_seen], like.dtype)
    return base.masked_fill(hidden, torch.finfo(like.dtype).min)


def with_alibi(mask: Tensor | None, alibi: Tensor, batch: int, is_causal: bool, num_new: int) -> Tensor:
    """Return `mask` plus the bias [B H, 1, S], as [B, H, T, S]."""
    bias = alibi.unflatten(0, (batch, -1))
    if mask is not None:
        return bias + _added(mask, alibi.dtype)
    if not is_causal or num_new == 1:
        return bias
    num_seen = alibi.shape[-1]
    later = torch.ones(num_new, num_seen, dtype=torch.bool, device=alibi.device).triu(num_seen - num_new + 1)
    return bias.expand(-1, -1, num_new, -1).masked_fill(later, torch.finfo(alibi.dtype).min)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
