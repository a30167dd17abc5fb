"""Compute token-wise parts of a model in tiles of the sequence (arXiv 2506.13996, section 3).

The MLP and the logits of a long sequence need far more memory than its hidden states. Here each tile is computed, its
intermediate values are dropped, and the backward recomputes it: this takes the memory of one tile, and the time of one
more forward. Gradients equal those of the whole. Each tile is a `torch.utils.checkpoint`, so parameters, hooks of ZeRO
and random states work as in any recomputed block, and every parameter's gradient arrives once.

    y_BTD = TiledMLP.apply(mlp_forward, mlp, x_BTD, 4, None)             # mlp_forward(mlp, x), tile by tile
    loss = TiledFusedLogitsLoss.apply(loss_fn, model, x_BTD, labels_BT, None, 8, None, "mean")

Tiles are cut like `torch.chunk`, as in DeepSpeed: all tiles but the last have ceil(T / shards) tokens, so short
sequences give fewer tiles; more than (shards - 1)^2 tokens always give `shards` tiles. With ZeRO stage 3 all ranks need
the same number of tiles, since tiles gather parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from deepspeed._absent import absent_members
from deepspeed.errors import counted

#: the dim of tokens in tensors that are divided into tiles
TOKEN_DIM = 1

Reduction = Literal["mean", "sum"] | None


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction = "mean",
) -> torch.Tensor:
    """Call `fn(**kwargs)` for each tile of the sequence, and join or reduce the results.

    Args:
        fn: returns a tensor per tile.
        seqlen: number of tokens of the tensors in `kwargs_to_shard`.
        shards: the maximum number of tiles.
        kwargs_to_shard: tensors with tokens in dim 1; each call gets a tile. Other values are passed unchanged.
        kwargs_to_pass: other arguments, the same in each call.
        grad_requiring_tensor_key: the key in `kwargs_to_shard` of a tensor that takes part in autograd; others may,
            too.
        compute_params: accepted for DeepSpeed's signature; gradients reach all parameters that `fn` uses.
        output_unshard_dimension: the dim along which results are concatenated; 0: the results are scalars to reduce.
        output_reduction: the reduction of scalars: "mean" or "sum"; None stacks them.

    Raises:
        ValueError: an argument does not fit; the error names it and what would fit.
    """
    values = kwargs_to_shard.get(grad_requiring_tensor_key)
    if not isinstance(values, torch.Tensor):
        raise ValueError(
            f"sequence_tiled_compute: grad_requiring_tensor_key is {grad_requiring_tensor_key!r}, but the tensors in "
            f"kwargs_to_shard are {', '.join(kwargs_to_shard) or 'none'}; give one of them"
        )
    if output_unshard_dimension == 0:
        _check_reduction(output_reduction)
    tiles = [
        _tiles(value, shards, seqlen, key) if isinstance(value, torch.Tensor) else repeat(value)
        for key, value in kwargs_to_shard.items()
    ]
    results = []
    for tile in zip(*tiles, strict=False):  # at least one tensor, and all tensors have equally many tiles
        arguments = dict(zip(kwargs_to_shard, tile, strict=True))
        results.append(checkpoint(fn, use_reentrant=False, **arguments, **kwargs_to_pass))
    if output_unshard_dimension == 0:
        return _reduced(results, output_reduction)
    return torch.cat(results, dim=output_unshard_dimension)


@absent_members("runtime.sequence_parallel.ulysses_sp:SequenceTiledCompute")
class SequenceTiledCompute:
    """`apply` calls `sequence_tiled_compute` with positional arguments, as autograd functions take them."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction,
        *args: Any,
    ) -> torch.Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, then of `keys_to_pass`.

        Raises:
            ValueError: see `sequence_tiled_compute`; also if the numbers of values and keys differ.
        """
        keys = [*keys_to_shard, *keys_to_pass]
        if len(args) != len(keys):
            raise ValueError(
                f"SequenceTiledCompute: found {counted(len(args), 'value')} for the keys {', '.join(keys)}"
            )
        values = dict(zip(keys, args, strict=True))
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            {key: values[key] for key in keys_to_shard},
            {key: values[key] for key in keys_to_pass},
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


@absent_members("runtime.sequence_parallel.ulysses_sp:TiledMLP")
class TiledMLP:
    """An MLP in tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute `fn(self, x)` in tiles, concatenated along the tokens.

        Args:
            fn: the MLP's forward, for a tile.
            self: its first argument, the module.
            x: [B, T, D], or [T, D].
            shards: the maximum number of tiles.
            compute_params: accepted for DeepSpeed's signature.
        """
        dim = x.dim() - 2
        tiles = _tiles(x, shards, x.shape[dim], "x", dim)
        return torch.cat([checkpoint(fn, self, tile, use_reentrant=False) for tile in tiles], dim=dim)


@absent_members("runtime.sequence_parallel.ulysses_sp:TiledFusedLogitsLoss")
class TiledFusedLogitsLoss:
    """Logits and loss in tiles of the sequence; logits of at most one tile exist at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
        output_reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """Sum or average the scalars `fn(self, x, y)`, or `fn(self, x, y, mask)` with a mask, over all tiles.

        As in DeepSpeed, batch and tokens are one dim for `fn`: a tile is [N, D], [N] and [N].

        "mean" averages over tiles. If tiles have different numbers of tokens that count, let `fn` sum, use "sum", and
        divide by the number of all tokens that count.

        Args:
            fn: returns a scalar for a tile.
            self: its first argument, the model.
            x: [B, T, D] hidden states.
            y: [B, T] labels.
            mask: [B, T], or None.
            shards: the maximum number of tiles.
            compute_params: accepted for DeepSpeed's signature.
            output_reduction: "mean" or "sum".
        """
        _check_reduction(output_reduction)
        tensors = {"x": x.flatten(0, -2), "y": y.flatten(), **({} if mask is None else {"mask": mask.flatten()})}
        tiles = [_tiles(tensor, shards, tensors["x"].shape[0], name, dim=0) for name, tensor in tensors.items()]
        results = [checkpoint(fn, self, *tile, use_reentrant=False) for tile in zip(*tiles, strict=True)]
        return _reduced(results, output_reduction)


def _tiles(tensor: torch.Tensor, shards: int, length: int, name: str, dim: int = TOKEN_DIM) -> Sequence[torch.Tensor]:
    if tensor.dim() <= dim or tensor.shape[dim] != length:
        raise ValueError(
            f"tiled compute: {name} has the shape {tuple(tensor.shape)}; dim {dim} must have {counted(length, 'token')}"
        )
    if shards < 1:
        raise ValueError(f"tiled compute: found {counted(shards, 'shard')}; give 1 or more")
    return tensor.chunk(shards, dim=dim)


def _check_reduction(reduction: object) -> None:
    if reduction not in ("mean", "sum", None):
        raise ValueError(f'tiled compute: output_reduction is {reduction!r}; give "mean" or "sum"')


def _reduced(results: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    stacked = torch.stack(tuple(results))
    if reduction is None:
        return stacked
    return stacked.sum() if reduction == "sum" else stacked.mean()
