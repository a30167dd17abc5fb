"""Tensors inside nested containers: map over them, and drop storage that need not be saved.
`StoredTensor`: a tensor in files, in pieces, from which each rank reads the elements that it needs.
"""

import copy
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed.zero.pending_tensor import PendingTensor

# A storage is saved as it is if at least this part of it is wanted: copying costs as much memory as it saves disk.
_WORTH_SAVING_WHOLE = 0.9


def map_tensors(item: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return `item` with `change(t)` in place of each tensor `t` in dicts, lists and tuples (named ones too), rebuilt.
    A dict or list that occurs in several places, or in itself, does so in the result.

    Args:
        kind: type that is changed in place of tensors.
    """
    made: dict[int, Any] = {}  # by id of a dict or list

    def walk(item: Any) -> Any:
        if isinstance(item, kind):
            return change(item)
        if id(item) in made:
            return made[id(item)]
        if isinstance(item, dict):
            mapped = made[id(item)] = copy.copy(item)  # keeps the type, and a module's `state_dict()._metadata`
            for key, value in item.items():
                mapped[key] = walk(value)
            return mapped
        if isinstance(item, list):
            items = made[id(item)] = type(item)()
            items.extend(walk(value) for value in item)
            return items
        if isinstance(item, tuple) and not isinstance(item, torch.Size):
            values = [walk(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        return item

    return walk(item)


def with_placeholders(state: Any, change: Callable[[PendingTensor], Tensor]) -> Any:
    """Return `state` with `change(t)` in place of each `PendingTensor`; the same object if it has none."""
    found: list[PendingTensor] = []
    map_tensors(state, found.append, PendingTensor)
    return map_tensors(state, change, PendingTensor) if found else state


def compact(state: Any) -> Any:
    """Return `state` with copies of tensors that are small views of large storages. Called before `torch.save`.

    `torch.save` writes the whole storage behind a tensor, so a shard that is a view of a flat buffer would drag in the
    whole buffer. Views that together cover their storage are not copied; views of the same elements (tied weights) stay
    one tensor.
    """
    views: dict[int, set[tuple[Any, ...]]] = {}
    sizes: dict[int, int] = {}
    for tensor in _dense_tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        views.setdefault(storage.data_ptr(), set()).add(_view(tensor))
    wasteful = {
        pointer
        for pointer, size in sizes.items()
        if sum(nbytes for nbytes, *_ in views[pointer]) < _WORTH_SAVING_WHOLE * size
    }
    if not wasteful:
        return state
    copies: dict[tuple[Any, ...], Tensor] = {}

    def separate(tensor: Tensor) -> Tensor:
        if not _is_dense(tensor) or tensor.untyped_storage().data_ptr() not in wasteful:
            return tensor
        key = (tensor.untyped_storage().data_ptr(), *_view(tensor))
        if key not in copies:
            copies[key] = tensor.detach().clone()
        return copies[key]

    return map_tensors(state, separate)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is a plain view of bytes somewhere (not sparse, quantized, meta, nor a subclass's facade)."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


def _dense_tensors(item: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    map_tensors(item, lambda tensor: found.append(tensor) if _is_dense(tensor) else None)
    return iter(found)


class StoredTensor(ABC):
    """A `StoredTensor` is a tensor whose elements are read by range from where they are stored.

    Args:
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
        """Return [numel] elements from `start` on, in row-major order, in newly allocated memory.

        Raises:
            CheckpointError: names the file that cannot be read.
        """

    def whole(self) -> Tensor:
        """Return the whole tensor, with its shape."""
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
    """A tensor that concatenates the elements of other tensors.

    Args:
        shape: shape of this tensor.
        pieces: the other tensors, of one dtype.
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
    """Return [numel] elements of a tensor, or of a stored one, from `start` on."""
    if isinstance(value, StoredTensor):
        return value.read(start, numel)
    flat: Tensor = value.reshape(-1)
    return flat[start : start + numel]
