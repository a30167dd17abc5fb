"""Parameters that are sharded before a model is divided: `zero.Init` releases the weights of a module as it is built.

What divides a model changes them through the object that sharded them, and knows nothing of shards:

    reshard(linear.weight, part.take, mesh.gradient_group())
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter


class Reshard(Protocol):
    """Replaces the values of a sharded parameter, and the ranks that hold them."""

    def __call__(self, param: Parameter, take: Callable[[Tensor], Tensor], group: ProcessGroup) -> None:
        """`reshard` for one parameter."""


def whole_shape(param: Tensor) -> torch.Size:
    """The shape of a parameter's weight, also where it is sharded, and its own shape is that of nothing."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def is_sharded(param: Tensor) -> bool:
    """Whether another object has the weight of a parameter."""
    return hasattr(param, "ds_id")


def can_reshard(param: Tensor) -> bool:
    """Whether a sharded parameter may still be given other values: no engine has it."""
    return _of(param) is not None


def reshard(param: Parameter, take: Callable[[Tensor], Tensor], group: ProcessGroup) -> None:
    """Shard another value of a parameter over other ranks. One weight is whole meanwhile.

    A collective of the ranks that hold the shards now, which call it for the same parameters in the same order.

    Args:
        take: gives the new value from the present one.
        group: the ranks that hold the new one, equal on all of them.
    """
    change = _of(param)
    assert change is not None, "asked for by can_reshard"
    change(param, take, group)


def _of(param: Tensor) -> Reshard | None:
    unit: Any = getattr(param, "ds_unit", None)
    return getattr(unit, "reshard", None)
