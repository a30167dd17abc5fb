"""A tensor that lies in a file, in pieces, and of which each rank reads the elements that it needs."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
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


class StackedTensor(StoredTensor):
    """A tensor whose rows, all of one shape, are in several files."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        super().__init__(torch.Size((len(rows), *rows[0].shape)), rows[0].dtype)
        self.rows = rows

    def read(self, start: int, numel: int) -> Tensor:
        size = self.rows[0].numel()
        values = torch.empty(numel, dtype=self.dtype)
        for index, row in enumerate(self.rows):
            first, stop = max(start, index * size), min(start + numel, (index + 1) * size)
            if first < stop:
                values[first - start : stop - start] = row.reshape(-1)[first - index * size : stop - index * size]
        return values


class JoinedTensor(StoredTensor):
    """A tensor whose elements are those of others, one behind the other.

    Args:
        shape: of it.
        pieces: of one dtype.
    """

    def __init__(self, shape: torch.Size, pieces: Sequence[StoredTensor]) -> None:
        super().__init__(shape, pieces[0].dtype)
        self.pieces = pieces
        self._starts = list(accumulate((piece.numel() for piece in pieces), initial=0))
        assert self._starts[-1] == self.numel()

    def read(self, start: int, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=self.dtype)
        stop = start + numel
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self.pieces)):
            first, last = max(start, self._starts[index]), min(stop, self._starts[index + 1])
            if first >= stop:
                break
            values[first - start : last - start] = self.pieces[index].read(first - self._starts[index], last - first)
        return values


def elements_of(value: Any, start: int, numel: int) -> Tensor:
    """[numel] elements of a tensor, or of a stored one, from `start` on."""
    if isinstance(value, StoredTensor):
        return value.read(start, numel)
    flat: Tensor = value.reshape(-1)
    return flat[start : start + numel]
