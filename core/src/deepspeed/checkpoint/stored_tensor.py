"""A tensor that lies in a file, in pieces, and of which each rank reads the elements that it needs."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class StoredTensor(ABC):
    """Args:
    shape, dtype: of the whole tensor.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    @abstractmethod
    def read(self, start: int, numel: int) -> Tensor:
        """[numel] elements from `start` on, in row-major order, in memory of their own.

        Raises:
            CheckpointError: names the file that cannot be read.
        """

    def whole(self) -> Tensor:
        """All of it, with its shape."""
        return self.read(0, self.numel()).view(self.shape)


def elements_of(value: Any, start: int, numel: int) -> Tensor:
    """[numel] elements of a tensor, or of a stored one, from `start` on."""
    if isinstance(value, StoredTensor):
        return value.read(start, numel)
    flat: Tensor = value.reshape(-1)
    return flat[start : start + numel]
