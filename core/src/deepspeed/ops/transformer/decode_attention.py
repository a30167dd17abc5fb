"""Attention of the newest tokens of each sequence over a key-value cache, contiguous or paged in blocks.

    y[b, h, i] = sum_j softmax_j(scale q[b, h, i] . k[b, g, j] + bias) v[b, g, j],      g = h // (heads / kv_heads)

The cache holds `lengths[b]` tokens of sequence b, including the Q new ones. So query i is token p = lengths[b] - Q + i,
and attends to j <= p; with a window, to p - window < j <= p. With ALiBi (arXiv 2108.12409) the bias is
slope[h] (j - p). A softcap c replaces s = scale q . k by c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2).
Grouped heads: arXiv 2305.13245. Paged cache and block tables: arXiv 2309.06180.
Arithmetic is fp32, rounded once to q's dtype.
"""

import torch
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import FLOATS, operator_for

OP = "ragged_device_ops"


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention for the newest tokens. Called after their keys and values are written to the cache.

    Operator: `decode_attention(q, k_cache, v_cache, lengths, scale, block_table, alibi_slopes, window)`.

    Args:
        q: (B, heads, Q, D) in fp32, bf16 or fp16. Q may be 1, a few, or a part of a prompt.
        k_cache, v_cache: (B, kv_heads, max_tokens, D); with a block table (num_blocks, block_size, kv_heads, D). They
            have q's dtype. Only the last dimension must be contiguous.
        lengths: int32 or int64 (B,), number of tokens in the cache, including the new ones: Q to max_tokens. Values on
            the host are checked; values on a device are not.
        scale: factor of the products, usually D^-0.5.
        block_table: int32 or int64 (B, blocks of the longest): token j is in block `block_table[b, j // block_size]`.
        alibi_slopes: fp32 (heads,).
        window: number of tokens that a query attends to, including itself; None: all tokens up to it.
        softcap: the bound c of the scores, or None. No kernel supports it, so the torch reference runs.

    Returns:
        A contiguous tensor of q's shape and dtype.

    Raises:
        ConfigError: shapes, dtypes or values do not fit; the message names the argument.

    >>> q, k, v = torch.ones(1, 2, 1, 4), torch.zeros(1, 1, 8, 4), torch.arange(8.0).view(1, 1, 8, 1).expand(1, 1, 8, 4)
    >>> decode_attention(q, k, v, torch.tensor([5]), scale=0.5)[0, :, 0, 0]        # the mean of 0, 1, 2, 3, 4
    tensor([2., 2.])
    """
    _check(q, k_cache, v_cache, lengths, block_table, alibi_slopes, window)
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap: found {softcap}, but it must be positive")
    kernel = None if softcap is not None else operator_for(OP, "decode_attention", q, k_cache, v_cache, alibi_slopes)
    if kernel is not None:
        return kernel(q, k_cache, v_cache, lengths, scale, block_table, alibi_slopes, window)
    return decode_attention_reference(q, k_cache, v_cache, lengths, scale, block_table, alibi_slopes, window, softcap)


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The torch reference of `decode_attention`, over the full cache. Tests compare kernels with it."""
    batch, heads, num_queries, head_dim = q.shape
    keys, values = (_whole(cache, block_table) for cache in (k_cache, v_cache))
    kv_heads, num_tokens = keys.shape[1:3]
    queries = q.float().reshape(batch, kv_heads, -1, head_dim)  # the heads of a group are adjacent
    scores = (queries @ keys.float().mT).mul(scale).view(batch, heads, num_queries, num_tokens)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    first = lengths.to(q.device).view(-1, 1, 1, 1) - num_queries
    position = first + torch.arange(num_queries, device=q.device).view(1, 1, -1, 1)
    distance = torch.arange(num_tokens, device=q.device) - position  # (B, 1, Q, tokens), 0 at the query's own token
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float().view(1, -1, 1, 1) * distance
    hidden = (distance > 0) if window is None else (distance > 0) | (distance <= -window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    # values beyond a sequence's end may be nan, and 0 times nan is nan
    beyond = torch.arange(num_tokens, device=q.device).view(1, 1, -1, 1) >= lengths.to(q.device).view(-1, 1, 1, 1)
    wide = values.float().masked_fill(beyond, 0.0)
    out = weights.view(batch, kv_heads, -1, num_tokens) @ wide
    return out.view(q.shape).to(q.dtype)


def _whole(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """Return the cache as (B, kv_heads, tokens, D)."""
    if block_table is None:
        return cache
    entries = block_table.long().clamp(0, max(cache.shape[0] - 1, 0))  # entries beyond a sequence's end are arbitrary
    return cache[entries].flatten(1, 2).transpose(1, 2)


# ----- checks --------------------------------------------------------------------------------------------------------

_INTEGERS = (torch.int32, torch.int64)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    window: int | None,
) -> None:
    if q.dim() != 4 or q.dtype not in FLOATS or not q.numel():
        raise ConfigError(
            f"q: found {q.dtype} of shape {tuple(q.shape)}, but it must be float32, bfloat16 or float16 of shape (B, "
            "heads, Q, D), not empty"
        )
    batch, heads, num_queries, head_dim = q.shape
    paged = block_table is not None
    layout = "(num_blocks, block_size, kv_heads, D)" if paged else "(B, kv_heads, max_tokens, D)"
    heads_dim = 2 if paged else 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        fits = cache.dim() == 4 and cache.shape[3] == head_dim and cache.shape == k_cache.shape
        fits = fits and cache.shape[heads_dim] > 0 and heads % cache.shape[heads_dim] == 0
        if not fits or cache.dtype != q.dtype or not (paged or cache.shape[0] == batch):
            raise ConfigError(
                f"{name}: found {cache.dtype} of shape {tuple(cache.shape)}, but for q, {q.dtype} of shape "
                f"{tuple(q.shape)}, it must be of its dtype and {layout} with kv_heads that divide {heads}"
            )
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.dtype not in _INTEGERS:
            raise ConfigError(
                f"block_table: found {block_table.dtype} of shape {tuple(block_table.shape)}, but it must be int32 or "
                f"int64 of shape ({batch}, blocks)"
            )
    if lengths.shape != (batch,) or lengths.dtype not in _INTEGERS:
        raise ConfigError(
            f"lengths: found {lengths.dtype} of shape {tuple(lengths.shape)}, but it must be int32 or int64 of shape "
            f"({batch},)"
        )
    if alibi_slopes is not None and (alibi_slopes.shape != (heads,) or alibi_slopes.dtype != torch.float32):
        raise ConfigError(
            f"alibi_slopes: found {alibi_slopes.dtype} of shape {tuple(alibi_slopes.shape)}, but it must be float32 of "
            f"shape ({heads},)"
        )
    if window is not None and window < 1:
        raise ConfigError(f"window: found {window}, but it must be 1 or more")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_on_host(num_queries, k_cache, lengths, block_table)


def _check_on_host(num_queries: int, k_cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """Check values of host tensors; for device tensors this would synchronize."""
    block_size = k_cache.shape[2] if block_table is None else k_cache.shape[1]
    capacity = block_size if block_table is None else block_size * block_table.shape[1]
    given = lengths.tolist()
    for row, length in enumerate(given):
        if not num_queries <= length <= capacity:
            raise ConfigError(
                f"lengths[{row}]: found {length}, but it must be from {num_queries}, the new tokens, to {capacity}, "
                "what the cache holds"
            )
    if block_table is not None and block_table.device.type == "cpu":
        num_blocks = k_cache.shape[0]
        for row, (length, blocks) in enumerate(zip(given, block_table.tolist(), strict=True)):
            used = blocks[: -(-length // block_size)]
            if used and not 0 <= min(used) <= max(used) < num_blocks:
                raise ConfigError(f"block_table[{row}]: found {used}, but the cache has blocks 0 to {num_blocks - 1}")
