"""The operators of random layer-wise token dropping, with their gradients, under DeepSpeed's names.

Source: Yao, Wu, Li, Holmes, Zhang, Li, He, "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training
for Large-scale Transformers" (arXiv 2211.11586), section 3: a layer processes a random subset of the tokens in their
original order; the other tokens skip the layer.

Shapes: B batch, S tokens, R kept tokens, H hidden, L layers.
"""

from typing import Any

import torch
from torch import Tensor

from deepspeed._absent import complete
from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for

OP = "random_ltd"


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sample the tokens that the layers of a decoder keep, independently for each layer and sample.

    A mask that all samples share must be causal: the mask of R kept tokens in order is its first R rows and columns. A
    mask per sample, which may hide padding, is gathered at the kept tokens.

    Args:
        attn_mask: [S, S], [1, S, S] or [1, heads, S, S] for all samples; [B, heads, S or 1, S] or [B, S] per sample,
            only for one layer; None if the layer creates its own mask.

    Returns:
        The indices of the kept tokens, int32 [L, B, R], ascending in each row; and the mask with R for S, or None.

    Raises:
        ConfigError: `reserved_length` exceeds `seq_length` or is below 1, or the mask has another shape.
    """
    indices = _sample(reserved_length, seq_length, batch_size, layers, device)
    return indices, None if attn_mask is None else _of_decoder(attn_mask, indices, seq_length)


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sample the tokens that the layers of an encoder keep, independently for each layer and sample.

    Args:
        attn_mask: [B, 1, S or 1, S], the mask per sample, or None.

    Returns:
        The indices of the kept tokens, int32 [L, B, R], ascending in each row; the masks [L, B, 1, R or 1, R], or None.

    Raises:
        ConfigError: `reserved_length` exceeds `seq_length` or is below 1, or the mask has another batch size.
    """
    indices = _sample(reserved_length, seq_length, batch_size, layers, device)
    return indices, None if attn_mask is None else torch.stack([_masked(attn_mask, each) for each in indices])


def _sample(reserved: int, length: int, batch: int, layers: int, device: torch.device | str) -> Tensor:
    if not 0 < reserved <= length:
        raise ConfigError(f"random_ltd: asked to keep {reserved} of {length} tokens; keep 1 or more, and not above all")
    # uses torch's generator of the device, which activation checkpointing restores for the recomputation
    chosen = torch.rand(layers, batch, length, device=device).argsort(dim=-1)[..., :reserved]
    return chosen.sort(dim=-1).values.to(torch.int32)


def _of_decoder(mask: Tensor, indices: Tensor, length: int) -> Tensor:
    """Return the mask for the tokens at `indices` [L, B, R]; see `gpt_sample_tokens`."""
    layers, batch, kept = indices.shape
    shape, square = tuple(mask.shape), (length, length)
    is_shared = shape[-2:] == square and len(shape) < 5 and all(size == 1 for size in shape[:-3])
    is_shared &= len(shape) != 3 or shape[0] == 1
    # with batch size 1, a 4-D mask counts as per sample; [S, S] with S samples counts as shared
    is_own = shape in ((batch, length), (batch, *shape[1:2], 1, length), (batch, *shape[1:2], *square))
    if is_shared and not (is_own and layers == 1 and len(shape) == 4):
        return mask[..., :kept, :kept]
    if not is_own:
        raise ConfigError(
            f"random_ltd: found an attention mask of shape {shape} for {batch} samples of {length} tokens; it has to "
            "be tokens x tokens for all, or batch x heads x tokens (or 1) x tokens, or batch x tokens"
        )
    if layers > 1:
        raise ConfigError(
            f"random_ltd: asked for the tokens of {layers} layers with a mask of each sample's own, which is another "
            "one in each layer; ask for one layer at a time"
        )
    return mask.gather(1, indices[0].long()) if len(shape) == 2 else _masked(mask, indices[0])


def _masked(mask: Tensor, indices: Tensor) -> Tensor:
    """Return the rows and columns of a mask [B, heads, S or 1, S] at `indices` [B, R]."""
    if mask.dim() != 4 or mask.shape[0] not in (1, len(indices)):
        raise ConfigError(
            f"random_ltd: found an attention mask of shape {tuple(mask.shape)} for {len(indices)} samples; it has to "
            "be batch x heads x tokens (or 1) x tokens"
        )
    mask = mask.expand(len(indices), -1, -1, -1)
    columns = indices.long()[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1)
    mask = mask.gather(3, columns)
    if mask.shape[2] == 1:
        return mask
    rows = indices.long()[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
    return mask.gather(2, rows)


class GatherTokens(torch.autograd.Function):
    """`GatherTokens.apply(activations, sorted_indices, batch_first)` gathers the kept tokens of a layer's input.

    Operator: `token_gather(activations, indices, batch_first)`.

    Args:
        activations: [B, S, H], or [S, B, H] if `batch_first` is False.
        sorted_indices: int32 [B, R].

    Returns:
        `activations`, and the kept tokens [B, R, H] or [R, B, H].
    """

    @staticmethod
    def forward(ctx: Any, activations: Tensor, sorted_indices: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(sorted_indices)
        ctx.batch_first = batch_first
        return activations, _gather(activations, sorted_indices, batch_first)

    @staticmethod
    def backward(ctx: Any, a_gradients: Tensor, g_gradients: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        dim = 1 if ctx.batch_first else 0
        index = _index(indices, a_gradients.shape[2], ctx.batch_first)
        return a_gradients.scatter_add(dim, index, g_gradients), None, None


class ScatterTokens(torch.autograd.Function):
    """`ScatterTokens.apply(all_activations, layer_activations, sorted_indices, batch_first)` writes tokens back.

    Operator: `token_scatter_(all_activations, layer_activations, indices, batch_first)`, on a copy.

    Args:
        all_activations: see `GatherTokens`; not modified.
        layer_activations: [B, R, H] or [R, B, H].

    Returns:
        A copy of `all_activations` with the tokens of `layer_activations` at `sorted_indices`.
    """

    @staticmethod
    def forward(
        ctx: Any, all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool
    ) -> Tensor:
        ctx.save_for_backward(sorted_indices)
        ctx.batch_first = batch_first
        layer_activations = layer_activations.to(all_activations.dtype)
        kernel = operator_for(OP, "token_scatter_", all_activations, layer_activations)
        if kernel is not None:
            whole = all_activations.clone(memory_format=torch.contiguous_format)
            kernel(whole, layer_activations, sorted_indices, batch_first)
            return whole
        index = _index(sorted_indices, all_activations.shape[2], batch_first)
        return all_activations.scatter(1 if batch_first else 0, index, layer_activations)

    @staticmethod
    def backward(ctx: Any, out_gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        index = _index(indices, out_gradients.shape[2], ctx.batch_first)
        past = out_gradients.scatter(1 if ctx.batch_first else 0, index, 0.0)
        return past, _gather(out_gradients, indices, ctx.batch_first), None, None


def _gather(activations: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    kernel = operator_for(OP, "token_gather", activations)
    if kernel is not None:
        gathered: Tensor = kernel(activations, indices, batch_first)
        return gathered
    index = _index(indices, activations.shape[2], batch_first)
    return activations.gather(1 if batch_first else 0, index)


def _index(indices: Tensor, hidden: int, batch_first: bool) -> Tensor:
    """Return the index for torch's gather and scatter: [B, R, H] or [R, B, H]."""
    rows = indices.long() if batch_first else indices.long().t()
    return rows[:, :, None].expand(-1, -1, hidden)


complete(__name__)
