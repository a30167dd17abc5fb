"""Read the files of `torch.distributed.checkpoint` (DCP), by range and without running code.

A folder has `.metadata`, a pickle of `torch.distributed.checkpoint.metadata.Metadata`, and `*.distcp` files. In these,
each piece of a tensor, and each other value, is stored end to end as `torch.save` wrote it. A piece is a box of the
tensor: its offsets and sizes by dimension. Both kinds of pickles are read without running code (values with
`weights_only=True`).

`.metadata` may come from anywhere, and a pickle can set attributes of any class or function that it gets. So the
classes that it may name are replaced by classes that are created for one load, and nothing that the pickle sets
outlives the load. The result is checked, and returned as `Metadata`.
"""

import io
import math
import mmap
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.checkpoint.index import check_regular
from deepspeed.checkpoint.layout import METADATA_FILE
from deepspeed.checkpoint.tensor_index import MemoryFile
from deepspeed.checkpoint.tensors import StoredTensor
from deepspeed.errors import CheckpointError, counted, first_line

_CLASSES = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )),
        *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
        *(("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")),
        *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
        ("builtins", "getattr"),  # for enums, by Python 3.11.0 to 3.11.3; the class that replaces it gets nothing
    }
)  # fmt: skip


class Box(NamedTuple):
    """A piece of a tensor."""

    offsets: torch.Size
    sizes: torch.Size

    def rows(self, first: int, stop: int) -> tuple[int, int]:
        """Return the rows of this piece that are rows first .. stop - 1 of the tensor, counted in the piece."""
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
    """Return two pieces of one tensor that share an element; None if there are none."""
    ordered = sorted((box for box in boxes if box.sizes.numel()), key=lambda box: box.offsets)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # later boxes begin after this one too
            if box.overlaps(other):
                return box, other
    return None


class TensorMeta(NamedTuple):
    """A tensor and its pieces."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: list[Box]


class SavedBytes(NamedTuple):
    """`SavedBytes` is the place of the bytes of a piece of a tensor or of another value: file, offset and length.

    `torch.save` wrote the bytes.
    """

    file: str
    offset: int
    num_bytes: int
    transforms: Any
    """The transforms that the bytes went through on their way to the file; None or empty for none."""


@dataclass(frozen=True)
class Metadata:
    """`Metadata` lists the entries of a checkpoint and the places of their bytes, as its `.metadata` file does."""

    paths: Mapping[str, tuple[str | int, ...]]
    """The keys of the nested state dict that was saved, by the name of each entry."""
    tensors: Mapping[str, TensorMeta]
    places: Mapping[tuple[str, torch.Size | None], SavedBytes]
    """The places by the name of the entry and the offsets of the piece, None for a value that is no tensor."""

    @classmethod
    def read(cls, path: Path) -> "Metadata":
        """Read the file `path`.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or asks for more than data.
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
    """An object in the pickle, reduced to its attributes."""

    def __init__(self, *args: Any) -> None:
        """Ignore the arguments of paths and enums."""


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
            return known  # these have no attributes that a pickle could set
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


def _place(info: Any) -> SavedBytes:
    place = SavedBytes(info.relative_path, info.offset, info.length, getattr(info, "transform_descriptors", None))
    if _checked(place.offset, int) < 0 or _checked(place.num_bytes, int) < 0:
        raise ValueError(f"{place.num_bytes} bytes from byte {place.offset} on")
    _checked(place.file, str)
    return place


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"found a {type(value).__name__} in place of a {kind.__name__}")
    return value


class NotPlainData(CheckpointError):
    """A value is more than tensors and plain data."""


class DcpFolder:
    """A `DcpFolder` reads the tensors and the other values of a DCP checkpoint from its mapped files.

    Args:
        folder: holds `.metadata`.

    Raises:
        CheckpointError: `.metadata` cannot be read, or asks for more than data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = Metadata.read(folder / METADATA_FILE)
        self.paths = self._metadata.paths
        """The keys of the nested state dict that was saved, by the entry's name."""
        self._maps: dict[str, mmap.mmap] = {}

    @cached_property
    def tensors(self) -> dict[str, "DcpTensor"]:
        """The tensors that the folder holds, by name."""
        return {name: DcpTensor(self, name, tensor) for name, tensor in self._metadata.tensors.items()}

    def value(self, name: str) -> Any:
        """Return a value that is no tensor.

        Raises:
            NotPlainData: the value is of classes that are not loaded.
            CheckpointError: the value is missing or damaged.
        """
        view = self.piece(name, None)
        try:
            return torch.load(io.BytesIO(view), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
            if isinstance(error, pickle.UnpicklingError) and (classes := _classes_in(view)):
                raise NotPlainData(f"{name} in {self.folder} is no plain data: it asks for {classes}") from error
            raise CheckpointError(
                f"{name} in {self.folder} cannot be read: {first_line(error)}; it is damaged, or another version of "
                "torch wrote it"
            ) from error

    def piece(self, name: str, offset: torch.Size | None) -> memoryview:
        """Return the bytes that torch.save wrote for a piece of a tensor, or for a value."""
        place = self._metadata.places.get((name, offset))
        if place is None:
            raise CheckpointError(f"{self.folder / METADATA_FILE} does not say where {name} is: it is damaged")
        if place.transforms:
            raise CheckpointError(
                f"{self.folder / place.file}: {name} was written through {place.transforms}, which this version does "
                "not read; save it with a FileSystemWriter without extensions"
            )
        mapped = self._mapped(place.file)
        end = place.offset + place.num_bytes
        if end > len(mapped):
            raise CheckpointError(
                f"{self.folder / place.file} is cut short: it has {counted(len(mapped), 'byte')}, and {name} ends at "
                f"byte {end}"
            )
        return memoryview(mapped)[place.offset : end]

    def _mapped(self, relative_path: str) -> mmap.mmap:
        if relative_path not in self._maps:
            path = self.folder / relative_path
            if Path(relative_path).name != relative_path:
                raise CheckpointError(f"{self.folder / METADATA_FILE} names {relative_path!r}, which is not beside it")
            check_regular(path)
            try:
                with open(path, "rb") as file:
                    self._maps[relative_path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is missing; copy it from where the checkpoint was saved") from error
            except (OSError, ValueError) as error:  # ValueError: an empty file
                raise CheckpointError(f"cannot read {path}: {error}") from error
        return self._maps[relative_path]


def _classes_in(view: memoryview) -> str:
    """Name what the pickle in a file of torch.save asks for and may not load; return "" for a damaged file."""
    try:
        return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(view)))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError):
        return ""


class DcpTensor(StoredTensor):
    """A tensor of a DCP folder."""

    def __init__(self, folder: DcpFolder, name: str, tensor: TensorMeta) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._folder = folder
        self._name = name
        self._boxes = tensor.boxes
        held = sum(box.sizes.numel() for box in self._boxes)
        if held != self.numel():
            raise CheckpointError(
                f"{name} in {folder.folder}: found {held} of its {counted(self.numel(), 'element')}; files of ranks "
                "are missing"
            )
        if shared := overlapping(self._boxes):
            raise CheckpointError(
                f"{folder.folder / METADATA_FILE} is damaged: of {name} the pieces {shared[0]} and {shared[1]} share "
                "elements, so others are in no piece"
            )

    def read(self, start: int, numel: int) -> Tensor:
        if not self.shape:
            return self._piece(self._boxes[0]).reshape(1)[start : start + numel].clone()
        if not numel:
            return torch.empty(0, dtype=self.dtype)
        row_numel = math.prod(self.shape[1:])
        first, stop = start // row_numel, -(-(start + numel) // row_numel)
        rows = torch.empty(stop - first, *self.shape[1:], dtype=self.dtype)
        for box in self._boxes:
            low, high = box.rows(first, stop)
            if low < high and box.sizes.numel():
                target = rows.narrow(0, box.offsets[0] + low - first, high - low)
                for dim in range(1, len(self.shape)):
                    target = target.narrow(dim, box.offsets[dim], box.sizes[dim])
                target.copy_(self._piece(box)[low:high])
        return rows.view(-1)[start - first * row_numel :][:numel]

    def _piece(self, box: Box) -> Tensor:
        """Return the piece as a mapped tensor: its pages are read when they are touched."""
        data = self._folder.piece(self._name, box.offsets)
        try:
            with FakeTensorMode():
                like = torch.load(MemoryFile(data), weights_only=True)  # type: ignore[arg-type]
            offset = like.untyped_storage()._checkpoint_offset
            first = offset + like.storage_offset() * like.itemsize
            reach = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
            count = 1 + reach if like.numel() else 0  # the fake storage's size is not that of the file in every torch
            flat = torch.frombuffer(data, dtype=like.dtype, count=count, offset=first) if count else torch.empty(0)
            piece = flat.as_strided(like.shape, like.stride())
        except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{self._name} in {self._folder.folder} cannot be read: {first_line(error)}; it is damaged, or another "
                "version of torch wrote it"
            ) from error
        if like.shape != box.sizes or like.dtype != self.dtype:
            raise CheckpointError(
                f"{self._name} in {self._folder.folder}: found a piece of {tuple(like.shape)} {like.dtype}, and "
                f"{METADATA_FILE} says {tuple(box.sizes)} {self.dtype}; the files are of several checkpoints"
            )
        return piece
