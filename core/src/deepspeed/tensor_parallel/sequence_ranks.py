"""Collectives over parts of a sequence. Shapes: whole [B, T, D], a part [B, T/W, D].

Each is the backward of another one, so that gradients have gradients.
"""

from typing import Any

import torch
from torch import Tensor

from deepspeed.tensor_parallel.ranks import TensorRanks


def take_part(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of what all ranks have; the gradients of the parts are gathered."""
    result: Tensor = _TakePart.apply(whole, ranks)
    return result


def gather_for_all(part: Tensor, ranks: TensorRanks) -> Tensor:
    """The whole, which all ranks use alike: each takes its part of the gradient."""
    result: Tensor = _GatherForAll.apply(part, ranks)
    return result


def gather_for_block(part: Tensor, ranks: TensorRanks) -> Tensor:
    """The whole, of which each rank uses other features: the gradient is summed and scattered."""
    result: Tensor = _GatherForBlock.apply(part, ranks)
    return result


def scatter_sum(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of the sum of `whole` over the ranks; the gradients of the parts are gathered."""
    result: Tensor = _ScatterSum.apply(whole, ranks)
    return result


def _part_of(whole: Tensor, ranks: TensorRanks) -> Tensor:
    return whole.chunk(ranks.world_size, dim=1)[ranks.rank].contiguous()


def _gathered(part: Tensor, ranks: TensorRanks) -> Tensor:
    return torch.cat(ranks.gather(part).unbind(0), dim=1)


def _scattered(whole: Tensor, ranks: TensorRanks) -> Tensor:
    parts = torch.stack(whole.chunk(ranks.world_size, dim=1))
    own = torch.empty_like(parts[0])
    ranks.backend.reduce_scatter(own.view(-1), parts.view(-1)).wait()
    return own


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _part_of(whole, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_for_all(grads[0], ctx.ranks), None


class _GatherForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(part, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return take_part(grads[0], ctx.ranks), None


class _GatherForBlock(_GatherForAll):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(grads[0], ctx.ranks), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _scattered(whole, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_for_block(grads[0], ctx.ranks), None
