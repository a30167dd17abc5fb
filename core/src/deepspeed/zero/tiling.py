"""`TiledLinear` splits a large linear layer into a grid of small ones, so that stage 3 gathers one tile at a time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import counted
from deepspeed.zero.gather import GatheredParameters


class TiledLinear(nn.Module):
    """`TiledLinear` is a linear layer of `out_splits` x `in_splits` tiles, which divides the memory of whole weights.

    Args:
        in_features: size of the last dimension of inputs.
        out_features: size of the last dimension of outputs.
        bias: whether there is a bias; it is in the last tile of each row.
        in_splits: number of parts of the inputs.
        out_splits: number of parts of the outputs.
        input_is_already_split: `forward` gets a list of `in_splits` tensors.
        combine_out_splits: False makes `forward` return a list of `out_splits` tensors.
        linear_cls: class of a tile, called as `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a linear layer whose weights are copied to the tiles.
        kwargs: further arguments for `linear_cls`.

    Raises:
        ValueError: if a number of splits is not between 1 and the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _boundaries("in_splits", in_splits, in_features)
        self.out_parts = _boundaries("out_splits", out_splits, out_features)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Map `[..., in_features]` to `[..., out_features]`, or lists of parts, as the constructor's options say."""
        parts = self._parts(input_)
        return self._combine(
            [self._sum([tile(part) for tile, part in zip(row, parts, strict=True)]) for row in self._rows()]
        )

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row.children()) for row in self.linears]

    def _parts(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        parts = input_ if self.input_is_already_split else input_.split(_sizes(self.in_parts), dim=-1)  # type: ignore[union-attr]
        if len(parts) != self.in_splits:
            raise ValueError(
                f"TiledLinear: found {counted(len(parts), 'part')} of the input, in_splits is {self.in_splits}"
            )
        return parts  # type: ignore[return-value]

    def _sum(self, outputs: list[Any]) -> Any:
        return sum(outputs[1:], start=outputs[0])

    def _combine(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weights of a linear layer of the same size. A collective if either layer is sharded.

        Raises:
            ValueError: if one of the two layers has a bias and the other one has none.
        """
        if (getattr(other, "bias", None) is not None) != self.use_bias:
            raise ValueError(f"copy_params_from: bias is {self.use_bias} here; the other layer must have the same")
        for row, (top, bottom) in zip(self._rows(), pairwise(self.out_parts), strict=True):
            for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                with GatheredParameters([*other.parameters(), *tile.parameters()], modifier_rank=0):
                    tile.get_parameter("weight").copy_(other.get_parameter("weight")[top:bottom, left:right])
                    if tile.bias is not None:
                        tile.get_parameter("bias").copy_(other.get_parameter("bias")[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinearReturnBias` is `TiledLinear` for layers that return (output, bias), like Megatron's; so does it."""

    def _sum(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._sum([output for output, _ in outputs]), biases[-1] if biases else None

    def _combine(self, rows: list[Any]) -> Any:
        outputs, biases = [output for output, _ in rows], [bias for _, bias in rows]
        if not self.combine_out_splits:
            return outputs, biases
        return super()._combine(outputs), None if biases[0] is None else torch.cat(biases, dim=-1)


def _boundaries(name: str, splits: int, features: int) -> list[int]:
    """Return the offsets of the parts, and the end; the first parts are the larger ones."""
    if not 1 <= splits <= features:
        raise ValueError(f"TiledLinear: {name} is {splits}; it must be from 1 to the number of features, {features}")
    size, larger = divmod(features, splits)
    return [size * part + min(part, larger) for part in range(splits + 1)]


def _sizes(boundaries: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(boundaries)]
