"""`StoredTensor`: a tensor in files, in pieces, from which each rank reads the elements that it needs.

`open_weights` opens files of weights as other libraries save them: safetensors, and files of `torch.save`.

    with open_weights(path) as file:
        file.tensors["lm_head.weight"].read(start, numel)

A tensor is read only on request, and only the elements asked for: `pread` into memory of the caller's own, without
maps, whose pages would count as the process's. Only the form of torch before 1.6 is read whole.
"""

import json
import os
import pickle
import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepspeed.checkpoint.index import TensorRecord, check_regular
from deepspeed.checkpoint.tensor_index import TorchFile
from deepspeed.errors import CheckpointError, counted, first_line


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


_SAFETENSORS_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_HEADER_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100 * 2**20  # the limit of safetensors itself
_DEEPEST = 8  # dicts within dicts: Megatron's files have four
#: keys of the weights, in files that have more: DeepSpeed's, Megatron's, Lightning's
_INSIDE = ("module", "model", "state_dict")


class WeightFile(AbstractContextManager["WeightFile"]):
    """`WeightFile` is an open file.

    Args:
        path: of the file.

    Attributes:
        tensors: by name; nested dicts are joined with dots.
        content: other values in a file of `torch.save`, with `TensorRecord`s in place of tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.content: Mapping[str, Any] = {}
        self._whole: dict[str, Tensor] | None = None
        self._in_order: tuple[StoredTensor, Tensor] | None = None
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115

    def __exit__(self, *_: object) -> None:
        self.release()
        self._file.close()

    def pread(self, offset: int, values: Tensor) -> None:
        """Fill `values`, which is contiguous and in host memory, from the byte `offset` of the file on."""
        buffer: Any = values.view(torch.uint8).numpy()
        left = memoryview(buffer)
        while left:
            try:
                num_bytes = os.preadv(self._file.fileno(), [left[: 2**30]], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error}") from error
            if not num_bytes:
                raise CheckpointError(f"{self.path} is cut short: it ends at byte {offset}; copy it again")
            left, offset = left[num_bytes:], offset + num_bytes

    def release(self) -> None:
        """Drop what was read whole."""
        self._whole = self._in_order = None

    def in_order(self, tensor: StoredTensor, read: Callable[[], Tensor]) -> Tensor:
        """Return the elements of a tensor that is stored in another order, from one `read` of all of it. They are kept
        until `release`, or until another such tensor is read."""
        if self._in_order is None or self._in_order[0] is not tensor:
            self._in_order = None  # before the other one is read
            self._in_order = tensor, read()
        return self._in_order[1]

    def loaded(self) -> dict[str, Tensor]:
        """Return all tensors of a file in torch's form before 1.6, which is read whole and kept until `release`."""
        if self._whole is None:
            try:
                self._whole = dict(_flat(_inside(torch.load(self.path, map_location="cpu", weights_only=True)), Tensor))
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{self.path} is neither a safetensors file nor one of torch.save that holds plain tensors "
                    f"({type(error).__name__}: {first_line(error)}); it is damaged, or of another kind"
                ) from error
        return self._whole


class _InFile(StoredTensor):
    """A tensor whose place in the file is known."""

    def __init__(
        self, file: WeightFile, shape: torch.Size, dtype: torch.dtype, offset: int, stride: tuple[int, ...] | None
    ) -> None:
        super().__init__(shape, dtype)
        self._file, self._offset = file, offset
        self.stride = stride

    def read(self, start: int, numel: int) -> Tensor:
        if self.stride is None:
            values = torch.empty(numel, dtype=self.dtype)
            self._file.pread(self._offset + start * self.dtype.itemsize, values)
            return values
        return self._file.in_order(self, self._read_strided)[start : start + numel].clone()

    def _read_strided(self) -> Tensor:
        assert self.stride is not None
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        stored = torch.empty(extent if self.numel() else 0, dtype=self.dtype)
        self._file.pread(self._offset, stored)
        return stored.as_strided(self.shape, self.stride).reshape(-1)


class _Loaded(StoredTensor):
    """A tensor of a file that is read whole."""

    def __init__(self, file: WeightFile, name: str, like: Tensor) -> None:
        super().__init__(like.shape, like.dtype)
        self._file, self._name = file, name

    def read(self, start: int, numel: int) -> Tensor:
        return self._file.loaded()[self._name].reshape(-1)[start : start + numel].clone()


def open_weights(path: Path) -> WeightFile:
    """Open a file, and read which tensors it has.

    Raises:
        CheckpointError: the file is missing, cut short, damaged, or of another kind.
    """
    check_regular(path)
    try:
        file = WeightFile(path)
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise CheckpointError(f"{path} {reason}; check base_dir and the names in the checkpoint's JSON") from error
    try:
        with open(path, "rb") as opened:
            if path.suffix == ".safetensors":
                _read_safetensors(file, opened)
            else:
                _read_torch(file, opened)
    except BaseException:
        file.__exit__()
        raise
    return file


def _read_safetensors(file: WeightFile, opened: BinaryIO) -> None:
    size = os.fstat(opened.fileno()).st_size
    head = opened.read(_HEADER_LENGTH.size)
    length = _HEADER_LENGTH.unpack(head)[0] if len(head) == _HEADER_LENGTH.size else 0
    start = _HEADER_LENGTH.size + length
    if len(head) == _HEADER_LENGTH.size and length > _LONGEST_HEADER:
        raise CheckpointError(f"{file.path} is no safetensors file: its header would have {counted(length, 'byte')}")
    if not length or start > size:
        raise CheckpointError(
            f"{file.path} is cut short: it ends within its header, after {counted(size, 'byte')}; copy it again"
        )
    end = start
    try:
        header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _SAFETENSORS_DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            first, stop = entry["data_offsets"]
            if stop - first != shape.numel() * dtype.itemsize or min(first, *shape, 0) < 0:
                raise ValueError(f"{name} of shape {tuple(shape)} in {counted(stop - first, 'byte')}")
            file.tensors[name] = _InFile(file, shape, dtype, start + first, None)
            end = max(end, start + stop)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file.path} is no safetensors file, or damaged: its header is not understood "
            f"({type(error).__name__}: {first_line(error)}); copy it again"
        ) from error
    if end > size:
        raise CheckpointError(
            f"{file.path} is cut short: it has {counted(size, 'byte')}, and its header speaks of {end}; copy it again"
        )


def _read_torch(file: WeightFile, opened: BinaryIO) -> None:
    is_zip = opened.read(2) == b"PK"
    if not is_zip:
        file.tensors = {name: _Loaded(file, name, value) for name, value in file.loaded().items()}
        file.release()
        return
    opened.seek(0)
    try:
        found = TorchFile.read(opened)
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(
            f"{file.path} is damaged: what it holds is not understood ({type(error).__name__}: {first_line(error)})"
        ) from error
    if found is None:
        raise CheckpointError(f"{file.path} is cut short, or damaged: its list of records is missing; copy it again")
    if not isinstance(found.value, Mapping):
        raise CheckpointError(f"{file.path}: found {type(found.value).__name__}, and no dict of tensors by name")
    file.content = found.value
    for name, record in _flat(_inside(found.value), TensorRecord):
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{file.path}: {name} has the unknown type {record.dtype}")
        file.tensors[name] = _InFile(file, torch.Size(record.shape), dtype, record.offset, record.stride)


def _inside(value: Any) -> Any:
    """Return the dict of weights in the content of a file."""
    if isinstance(value, Mapping):
        return next((value[key] for key in _INSIDE if isinstance(value.get(key), Mapping)), value)
    raise ValueError(f"found {type(value).__name__}, and no dict of tensors by name")


def _flat(value: Any, kind: type, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, kind):
            yield f"{prefix}{name}", item
        elif isinstance(item, Mapping) and depth < _DEEPEST:
            yield from _flat(item, kind, f"{prefix}{name}.", depth + 1)
