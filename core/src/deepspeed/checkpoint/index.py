"""`index.json` in a tag's folder: which files the checkpoint has, their sizes and checksums, and what was saved.

    {
     "format": 1,
     "saved": {"tag": ..., "at": ..., "global_steps": ..., "zero_stage": ..., "dp_world_size": ..., ...},
     "block_bytes": 67108864,
     "files": [{"name": ..., "bytes": ..., "crc32": ["0a1b2c3d", ...]}, ...],
     "checksum": "crc32:4e5f6a7b"
    }

`crc32` has one checksum per block of `block_bytes`. The last line is the checksum of the bytes before it. Other keys
may be added under the same `format`; a reader ignores keys that it does not know.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import BLOCK_BYTES
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

    def as_json(self) -> dict[str, Any]:
        """What the index says of it."""
        return {"name": self.name, "bytes": self.num_bytes, "crc32": self.checksums}

    @classmethod
    def parse(cls, known: Mapping[str, Any]) -> "FileEntry":
        """From `as_json`."""
        return cls(known["name"], known["bytes"], known["crc32"])


@dataclass(frozen=True)
class Index:
    """The content of an `index.json`."""

    files: tuple[FileEntry, ...]
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the save, for people and for the order of tags: `tag`, `at` (ISO 8601, UTC), `ds_core`, `global_steps`,
    `zero_stage`, `dp_world_size`, `mp_world_size`; None where unknown."""

    def entry(self, name: str) -> FileEntry | None:
        """The file of this name, or None."""
        return next((entry for entry in self.files if entry.name == name), None)

    def to_bytes(self) -> bytes:
        """The file's content."""
        files = [entry.as_json() for entry in self.files]
        content = {"format": _FORMAT, "saved": dict(self.saved), "block_bytes": BLOCK_BYTES, "files": files}
        return _sealed(json.dumps(content, indent=1, ensure_ascii=False).encode().removesuffix(b"\n}"))

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
        return cls(tuple(map(FileEntry.parse, known["files"])), known["saved"])


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


def _sealed(text: bytes) -> bytes:
    return text + _SEAL + b'%08x"\n}\n' % zlib.crc32(text)
