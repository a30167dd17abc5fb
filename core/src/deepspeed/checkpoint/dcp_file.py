"""The files of `torch.distributed.checkpoint` (DCP): what is in a folder, read by range and without running code.

A folder has `.metadata`, a pickle of `torch.distributed.checkpoint.metadata.Metadata`, and `*.distcp` files, in which
each piece of a tensor, and each other value, is what `torch.save` wrote, end to end. A piece is a box of the tensor:
its offsets and sizes by dimension. Both kinds of pickles are read without running code (`dcp_metadata.py`; values with
`weights_only=True`).
"""

import io
import math
import mmap
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.checkpoint.dcp_metadata import METADATA_FILE, Box, Metadata, TensorMeta, overlapping
from deepspeed.checkpoint.index import check_regular
from deepspeed.checkpoint.stored_tensor import StoredTensor
from deepspeed.checkpoint.torch_file import MemoryFile
from deepspeed.errors import CheckpointError, counted, first_line


class NotPlainData(CheckpointError):
    """A value is more than tensors and plain data."""


def is_dcp_folder(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint of torch.distributed.checkpoint."""
    return (folder / METADATA_FILE).is_file()


class DcpFolder:
    """Args:
    folder: holds `.metadata`.

    Raises:
        CheckpointError: it cannot be read, or asks for more than data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = Metadata.read(folder / METADATA_FILE)
        self.paths = self._metadata.paths
        """The keys of the nested state dict that was saved, by the entry's name."""
        self._maps: dict[str, mmap.mmap] = {}

    @cached_property
    def tensors(self) -> dict[str, "DcpTensor"]:
        """By name."""
        return {name: DcpTensor(self, name, tensor) for name, tensor in self._metadata.tensors.items()}

    def value(self, name: str) -> Any:
        """A value that is no tensor.

        Raises:
            NotPlainData: it is of classes that are not loaded.
            CheckpointError: it is missing or damaged.
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
        """The bytes that torch.save wrote of a piece of a tensor, or of a value."""
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
    """What the pickle in a file of torch.save asks for that is not loaded; empty for a damaged one."""
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
        """The piece, mapped: its pages are read when they are touched."""
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
