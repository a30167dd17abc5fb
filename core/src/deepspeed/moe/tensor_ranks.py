"""`drop_tokens` and `gather_tokens`: tensor-parallel ranks that have the same tokens divide them, and join them again.

For layers of one's own: between the two each rank sends its part of the tokens to experts that are whole on every
tensor-parallel rank. `deepspeed.moe.mappings` has these functions. The ranks are those of `deepspeed.utils.groups`.
"""

from typing import Any

import torch
from torch import Tensor

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups

_TAG = "tokens of tensor-parallel ranks"


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's part of `input_`, equal on all ranks, along `dim`. The gradient is that of all parts: collective.

    Raises:
        ConfigError: if the ranks do not divide the dim.
    """
    backend = _ranks()
    if input_.shape[dim] % backend.world_size:
        raise ConfigError(
            f"drop_tokens: found {input_.shape[dim]} along dim {dim}, which {backend.world_size} tensor-parallel ranks "
            f"cannot divide; pad it to {input_.shape[dim] + -input_.shape[dim] % backend.world_size}"
        )
    return _Drop.apply(input_, dim, backend) if backend.world_size > 1 else input_  # type: ignore[no-any-return,no-untyped-call]


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks, of one shape, along `dim`: a collective. The gradient, equal on all ranks, is that of
    this rank's part."""
    backend = _ranks()
    return _Gather.apply(input_, dim, backend) if backend.world_size > 1 else input_  # type: ignore[no-any-return,no-untyped-call]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, backend: GroupBackend) -> Tensor:
        ctx.dim, ctx.backend = dim, backend
        return _own(whole, dim, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Gather.apply(grad, ctx.dim, ctx.backend), None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, backend: GroupBackend) -> Tensor:
        ctx.dim, ctx.backend = dim, backend
        return _all(own, dim, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Drop.apply(grad, ctx.dim, ctx.backend), None, None  # type: ignore[no-untyped-call]


def _own(whole: Tensor, dim: int, backend: GroupBackend) -> Tensor:
    return whole.chunk(backend.world_size, dim)[backend.rank].contiguous()


def _all(own: Tensor, dim: int, backend: GroupBackend) -> Tensor:
    gathered = backend.allocate(own.numel() * backend.world_size, own.dtype, own.device)
    backend.all_gather(gathered, own.contiguous().view(-1), tag=_TAG).wait()
    return torch.cat(gathered.view(backend.world_size, *own.shape).unbind(), dim)


def _ranks() -> GroupBackend:
    backend = dist.group_backend(groups._get_model_parallel_group())
    backend.connect()
    return backend
