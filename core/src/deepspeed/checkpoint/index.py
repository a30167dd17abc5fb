"""`index.json` in a tag's folder: which files the checkpoint has, their sizes and checksums, and what was saved.

    {
     "format": 1,
     "saved": {"tag": ..., "at": ..., "global_steps": ..., "zero_stage": ..., "dp_world_size": ..., ...},
     "block_bytes": 67108864,
     "files": [{"name": ..., "bytes": ..., "crc32": ["0a1b2c3d", ...],
                "tensors": [[["module", "embed.weight"], "bfloat16", [7, 3], 1088], ...]}, ...],
     "tensors": {"groups": [...], "entries": [{"name": "embed.weight", ...}, ...]},
     "checksum": "crc32:4e5f6a7b"
    }

`crc32` has one checksum per block of `block_bytes`. The `tensors` of a file are key, dtype, shape and first byte of
each, and the stride where elements do not lie in row-major order. `tensors` says where the values of each parameter are
(`tensor_index.py`). Both are null or absent where the store does not know them. The last line is the checksum of the
bytes before it. Other keys may be added under the same `format`; a reader ignores keys that it does not know.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import BLOCK_BYTES
from deepspeed.checkpoint.torch_file import Key, TensorRecord
from deepspeed.errors import CheckpointError

_FORMAT = 1
_SEAL = b',\n "checksum": "crc32:'


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or is not what was saved."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint as it was written."""

    name: str
    num_bytes: int | None
    """None where the store does not know."""
    checksums: Sequence[str] | None
    """CRC-32 per block of `checksum.BLOCK_BYTES`; None where the store computes none."""
    tensors: Mapping[Key, TensorRecord] | None = None
    """The tensors in it; None where the store does not know them."""
    parameters: Mapping[str, Any] | None = None
    """Of a model file at a save: `tensor_index.parameters_in`."""

    def as_json(self) -> dict[str, Any]:
        """What the index says of it."""
        about: dict[str, Any] = {"name": self.name, "bytes": self.num_bytes, "crc32": self.checksums}
        if self.tensors is not None:
            about["tensors"] = [
                (key, *(record if record.stride is not None else record[:-1])) for key, record in self.tensors.items()
            ]
        return about

    def as_message(self) -> dict[str, Any]:
        """The same with `parameters`, for the rank that writes the index."""
        return {**self.as_json(), "parameters": self.parameters}

    @classmethod
    def parse(cls, known: Mapping[str, Any]) -> "FileEntry":
        """From `as_json` or `as_message`."""
        listed = known.get("tensors")
        tensors = None if listed is None else {tuple(key): _record(*about) for key, *about in listed}
        return cls(known["name"], known["bytes"], known["crc32"], tensors, known.get("parameters"))


@dataclass(frozen=True)
class Index:
    """The content of an `index.json`."""

    files: tuple[FileEntry, ...]
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the save, for people and for the order of tags: `tag`, `at` (ISO 8601, UTC), `ds_core`, `global_steps`,
    `zero_stage`, `dp_world_size`, `mp_world_size`; None where unknown."""
    tensors: Mapping[str, Any] | None = None
    """Where the values of each parameter are; `tensor_index.TensorTable` reads it."""

    def entry(self, name: str) -> FileEntry | None:
        """The file of this name, or None."""
        return next((entry for entry in self.files if entry.name == name), None)

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {"format": _FORMAT, "saved": dict(self.saved), "block_bytes": BLOCK_BYTES}
        parts = [json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")]
        parts.append(f'"files": {_lines(entry.as_json() for entry in self.files)}')
        if self.tensors is not None:
            groups, entries = _lines(self.tensors["groups"]), _lines(self.tensors["entries"])
            parts.append(f'"tensors": {{\n "groups": {groups},\n "entries": {entries}\n }}')
        return _sealed(",\n ".join(parts).encode())

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> "Index":
        """Parse the content of the file `path`.

        Raises:
            DamagedCheckpoint: it is not what was saved.
            CheckpointError: a later version wrote it.
        """
        text = content.rpartition(_SEAL)[0]
        if not text or _sealed(text) != content:
            raise DamagedCheckpoint(
                f"{path} is damaged: its checksum does not fit its content ({len(content)} bytes). Copy it again from "
                "where it came, or load another tag; without this file the checkpoint loads unverified."
            )
        known = json.loads(content)
        if known["format"] != _FORMAT or known["block_bytes"] != BLOCK_BYTES:
            raise CheckpointError(
                f"{path} has format {known['format']} with blocks of {known['block_bytes']} bytes, and this version "
                f"reads format {_FORMAT} with {BLOCK_BYTES}. Load the checkpoint with the version of ds-core that "
                f"saved it ({known['saved'].get('ds_core')}) or a later one."
            )
        return cls(tuple(map(FileEntry.parse, known["files"])), known["saved"], known.get("tensors"))


def read_index(folder: Path) -> Index | None:
    """The index of the tag in `folder`; None for a checkpoint that has none, as DeepSpeed's and older ones of ours.

    Raises `CheckpointError` as `Index.from_bytes` does, or where the file cannot be read.
    """
    path = folder / layout.INDEX_FILE
    try:
        return Index.from_bytes(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Correct its permissions.") from error


def _record(dtype: str, shape: Sequence[int], offset: int, stride: Sequence[int] | None = None) -> TensorRecord:
    return TensorRecord(dtype, tuple(shape), offset, None if stride is None else tuple(stride))


def _lines(items: Iterable[Any]) -> str:
    """A JSON list with one line per item."""
    lines = ",\n  ".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items)
    return f"[\n  {lines}\n ]" if lines else "[]"


def _sealed(text: bytes) -> bytes:
    return text + _SEAL + b'%08x"\n}\n' % zlib.crc32(text)
