"""Stages send each other values, a tensor or a tuple of tensors, and a header that describes the value.

A header is an int64 tensor of `HEADER_NUMEL`: whether the value is a tuple, the number of tensors, and for each tensor
dtype, whether it requires a gradient, number of dimensions, dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ConfigError, counted

HEADER_NUMEL = 256

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class TensorSpec:
    """A `TensorSpec` describes a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a tensor of this spec, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ValueSpec:
    """A `ValueSpec` describes a tensor, or a tuple of tensors, without values."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @property
    def gradients(self) -> "ValueSpec":
        """The spec that the gradients have: a tuple of the tensors that require a gradient."""
        return ValueSpec(tuple(tensor for tensor in self.tensors if tensor.needs_grad), is_tuple=True)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value that a layer takes: `tensors` as a tuple, or the only one of them."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def header(self) -> Tensor:
        """Return the header on the host; ConfigError if there is no room for all shapes."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for tensor in self.tensors:
            numbers += [_DTYPES.index(tensor.dtype), int(tensor.needs_grad), len(tensor.shape), *tensor.shape]
        if len(numbers) > HEADER_NUMEL:
            raise ConfigError(
                f"PipelineModule: a stage sends {counted(len(self.tensors), 'tensor')}, whose shapes are "
                f"{counted(len(numbers), 'number')}; there is room for {HEADER_NUMEL}, so concatenate some of them"
            )
        header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device="cpu")
        header[: len(numbers)] = torch.tensor(numbers)
        return header

    def __str__(self) -> str:
        shown = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in self.tensors]
        return f"({', '.join(shown)})" if self.is_tuple else shown[0]


def read_header(header: Tensor) -> ValueSpec:
    """Return the spec from which `ValueSpec.header` made the header."""
    numbers = iter(header.tolist())
    is_tuple, num_tensors = bool(next(numbers)), next(numbers)
    tensors = []
    for _ in range(num_tensors):
        dtype, needs_grad, num_dims = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        tensors.append(TensorSpec(tuple(next(numbers) for _ in range(num_dims)), dtype, needs_grad))
    return ValueSpec(tuple(tensors), is_tuple)


def spec_of(value: Any, where: str) -> ValueSpec:
    """The spec of what a stage is to send.

    Args:
        where: names the stage, for the error.

    Raises:
        ConfigError: it is neither a tensor nor a tuple of tensors.
    """
    tensors = tensors_of(value)
    for each in tensors:
        if not isinstance(each, Tensor) or each.dtype not in _DTYPES:
            raise ConfigError(
                f"PipelineModule: the last layer of {where} returned {_kind(value)}; between stages go a tensor or a "
                "tuple of tensors, so return these"
            )
    specs = (TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
    return ValueSpec(tuple(specs), isinstance(value, tuple))


def tensors_of(value: Any) -> tuple[Any, ...]:
    """The elements of a tuple, or the value alone."""
    return value if isinstance(value, tuple) else (value,)


def _kind(value: Any) -> str:
    return (
        f"a tuple of {', '.join(type(each).__name__ for each in value)}"
        if isinstance(value, tuple)
        else type(value).__name__
    )
