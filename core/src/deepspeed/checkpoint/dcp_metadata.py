"""`.metadata` of torch.distributed.checkpoint (DCP): a pickle that says where each piece of each tensor is.

It may come from anywhere. So the classes that it may name are stood in for by classes made for one load: a pickle can
set attributes of any class or function that it gets, and here nothing of that outlives the load. What comes out is
checked, and given as the classes below.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from deepspeed.errors import CheckpointError, first_line

METADATA_FILE = ".metadata"
_CLASSES = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )),
        *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
        *(("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")),
        *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
        ("builtins", "getattr"),  # of enums, by Python 3.11.0 to 3.11.3; the class that stands in for it gets nothing
    }
)  # fmt: skip


class Box(NamedTuple):
    """A piece of a tensor."""

    offsets: torch.Size
    sizes: torch.Size

    def rows(self, first: int, stop: int) -> tuple[int, int]:
        """Its rows of first .. stop - 1 of the tensor, counted in the piece."""
        return max(first - self.offsets[0], 0), min(stop - self.offsets[0], self.sizes[0])

    def overlaps(self, other: "Box") -> bool:
        """Whether some element is in both."""
        return all(
            at < its + its_size and its < at + size
            for at, size, its, its_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*self, strict=True))}]"


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two pieces of one tensor that have an element in common, if there are such."""
    ordered = sorted((box for box in boxes if box.sizes.numel()), key=lambda box: box.offsets)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # so do those after it
            if box.overlaps(other):
                return box, other
    return None


class TensorMeta(NamedTuple):
    """A tensor, and the pieces of which it consists."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: list[Box]


class Place(NamedTuple):
    """Where the bytes are that torch.save wrote of a piece of a tensor, or of another value."""

    file: str
    offset: int
    num_bytes: int
    transforms: Any
    """What the bytes went through on their way to the file; None or empty for nothing."""


@dataclass(frozen=True)
class Metadata:
    """What a `.metadata` says."""

    paths: Mapping[str, tuple[str | int, ...]]
    """The keys of the nested state dict that was saved, by the name of each entry."""
    tensors: Mapping[str, TensorMeta]
    places: Mapping[tuple[str, torch.Size | None], Place]
    """By name of the entry and offsets of the piece; None of a value that is no tensor."""

    @classmethod
    def read(cls, path: Path) -> "Metadata":
        """Read the file `path`.

        Raises:
            CheckpointError: it cannot be read, is damaged, or asks for more than data.
        """
        try:
            with open(path, "rb") as file:
                return _parsed(_DataOnly(file).load())
        except _AsksForCodeError as error:
            raise CheckpointError(
                f"{path} was refused, because loading it could run code: {error}. Nothing of it was run."
            ) from error
        except (*_UNREADABLE, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {first_line(error)}; it is damaged, or not of torch.distributed.checkpoint"
            ) from error


_UNREADABLE = (
    *(pickle.PickleError, EOFError, MemoryError, RuntimeError),  # RuntimeError: too deep
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
)


class _AsksForCodeError(Exception):
    """A pickle names something that is not data."""


class _Record:
    """An object in the pickle, with its attributes."""

    def __init__(self, *args: Any) -> None:
        """Paths and enums are made of arguments, at which nobody looks."""


class _Properties(_Record):
    """`TensorProperties`, whose state is a tuple."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _DataOnly(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = vars(torch).get(name) if module == "torch" else None  # getattr would import submodules
        if isinstance(known, torch.dtype) or known is torch.Size:
            return known  # which have no attributes that could be set
        if (module, name) not in _CLASSES:
            raise _AsksForCodeError(f"it asks for {module}.{name}")
        base = {"OrderedDict": dict, "TensorProperties": _Properties}.get(name, _Record)
        return self._classes.setdefault(name, type(name, (base,), {}))


def _parsed(found: Any) -> Metadata:
    entries = _checked(found.state_dict_metadata, dict)
    paths = found.planner_data if isinstance(found.planner_data, dict) else {}
    return Metadata(
        {_checked(name, str): _path(paths.get(name, (name,))) for name in entries},
        {name: _tensor(entry) for name, entry in entries.items() if type(entry).__name__ == "TensorStorageMetadata"},
        {
            (index.fqn, getattr(index, "offset", None)): _place(info)
            for index, info in _checked(found.storage_data, dict).items()
        },
    )


def _path(keys: Any) -> tuple[str | int, ...]:
    if not isinstance(keys, tuple) or not keys or not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"{keys!r} in place of the keys of an entry")
    return keys


def _tensor(entry: Any) -> TensorMeta:
    shape = torch.Size(entry.size)
    boxes = [Box(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    for box in boxes:
        if not all(0 <= at <= at + size <= end for at, size, end in zip(*box, shape, strict=True)):
            raise ValueError(f"a piece {box} of a tensor of shape {tuple(shape)}")
    return TensorMeta(shape, _checked(entry.properties.dtype, torch.dtype), boxes)


def _place(info: Any) -> Place:
    place = Place(info.relative_path, info.offset, info.length, getattr(info, "transform_descriptors", None))
    if _checked(place.offset, int) < 0 or _checked(place.num_bytes, int) < 0:
        raise ValueError(f"{place.num_bytes} bytes from byte {place.offset} on")
    _checked(place.file, str)
    return place


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"found a {type(value).__name__} in place of a {kind.__name__}")
    return value
