"""`TorchFile` reads the structure of a file that `torch.save` wrote, without torch and without reading its tensors.

Such a file is a zip of uncompressed records: `data.pkl`, a pickle in which each tensor refers to a storage,
and `data/<number>`, the bytes of a storage. The pickle is loaded with placeholders for all classes: no code is run.
"""

import io
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

Key = tuple[str | int, ...]
"""The keys and positions that lead to a value in nested dicts and lists."""

_STORAGES = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool"},
    **{"ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64"},
}
_NAME_LENGTHS = struct.Struct("<26xHH")  # of a record's name and its extra field, in the header before its bytes
_HEADER_BYTES = 30


class TensorRecord(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Byte of the file at which its first element is."""
    stride: tuple[int, ...] | None = None
    """The strides in elements; None where the elements lie in row-major order without gaps."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TorchFile:
    """A `TorchFile` has the content of a file that `torch.save` wrote, and lists its tensors.

    Args:
        value: the saved object, with `TensorRecord`s in place of tensors. Objects that are neither tensors nor plain
            values are opaque.
    """

    value: Any

    @classmethod
    def read(cls, file: BinaryIO) -> "TorchFile | None":
        """Read the file; return None if `torch.save` did not write it, or wrote it in the form before torch 1.6.

        Raises:
            OSError: the file cannot be read.
            Exception: of any kind, if the file holds something that this version does not know.
        """
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile:
            return None
        found = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(found) != 1:
            return None
        folder = found[0].filename.removesuffix("data.pkl") + "data/"
        offsets = {
            info.filename.removeprefix(folder): _first_byte(file, info)
            for info in archive.infolist()
            if info.filename.startswith(folder)
        }
        file.seek(_first_byte(file, found[0]))  # not by `archive`, which compares checksums that our files do not have
        return cls(_Unpickler(io.BytesIO(file.read(found[0].file_size)), offsets).load())

    def tensors(self) -> dict[Key, TensorRecord]:
        """Return the tensors that have elements, in the order of the file."""
        return dict(_walk(self.value, (), set()))


class MemoryFile(io.RawIOBase):
    """Bytes in memory as a readable file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _first_byte(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    return info.header_offset + _HEADER_BYTES + sum(_NAME_LENGTHS.unpack(file.read(_HEADER_BYTES)))


def _walk(value: Any, key: Key, inside: set[int]) -> Iterator[tuple[Key, TensorRecord]]:
    """Yield each tensor in `value` that has elements, after the key that leads to it; `key` leads to `value`.

    Args:
        inside: the ids of the containers that `value` is in: one may hold itself.
    """
    if isinstance(value, TensorRecord):
        if value.numel:
            yield key, value
        return
    if id(value) in inside:
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = ((name, item) for name, item in value.items() if isinstance(name, str | int))
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    within = inside | {id(value)}
    for name, item in items:
        yield from _walk(item, (*key, name), within)


class _Dict(dict[Any, Any]):
    """A mapping of any kind. Attributes of the saved one become its own."""


class _Opaque:
    """An `_Opaque` stands for an object of any class, and drops everything that a pickle gives it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Opaque":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the attributes."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of a mapping."""

    def append(self, item: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, items: Any) -> None:
        """Ignore several items of a list."""


class _Storage(NamedTuple):
    dtype: str
    number: str


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, offsets: Mapping[str, int]) -> None:
        super().__init__(file)
        self._offsets = offsets
        mapping = type("_Dict", (_Dict,), {})  # created per load: a pickle can set attributes of a class
        self._opaque = type("_Opaque", (_Opaque,), {})
        self._known = {
            ("collections", "OrderedDict"): mapping,
            ("collections", "defaultdict"): lambda *_: mapping(),
            ("__builtin__", "set"): set,
            ("builtins", "set"): set,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): partial(self._tensor),
            ("torch._utils", "_rebuild_tensor_v3"): partial(self._tensor_of_dtype),
            ("torch._utils", "_rebuild_parameter"): lambda value, *_: value,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda value, *_: value,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and re.fullmatch(r"[a-z]+\d+\w*", name):
            return name  # a dtype
        return self._known.get((module, name), self._opaque)

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, number, *_ = pid
        return _Storage(dtype, number)

    def _tensor(self, storage: _Storage, start: int, shape: Sequence[int], stride: Sequence[int], *_: Any) -> Any:
        return self._record(storage, storage.dtype, start, shape, stride)

    def _tensor_of_dtype(
        self, storage: _Storage, start: int, shape: Sequence[int], stride: Sequence[int], *rest: Any
    ) -> TensorRecord:
        _requires_grad, _hooks, dtype, *_ = rest
        return self._record(storage, dtype, start, shape, stride)

    def _record(
        self, storage: _Storage, dtype: str, start: int, shape: Sequence[int], stride: Sequence[int]
    ) -> TensorRecord:
        first = self._offsets[storage.number] + start * itemsize_bytes(dtype)
        is_row_major = all(
            found == expected or size == 1
            for found, expected, size in zip(stride, _row_major(shape), shape, strict=True)
        )
        return TensorRecord(dtype, tuple(shape), first, None if is_row_major else tuple(stride))


def _row_major(shape: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(shape[1:]), lambda one, other: one * other, initial=1))[::-1][: len(shape)]


def itemsize_bytes(dtype: str) -> int:
    """Return the bytes per element: bfloat16 -> 2, float8_e4m3fn -> 1."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
