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

import io
import json
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import BLOCK_BYTES
from deepspeed.checkpoint.location import is_remote, reason_of
from deepspeed.checkpoint.torch_file import Key, TensorRecord
from deepspeed.errors import CheckpointError, counted

_FORMAT = 1
_SEAL = b',\n "checksum": "crc32:'
_SEAL_BYTES = 12  # of what follows `_SEAL`
_TENSORS_OF_FILE = re.compile(rb',"tensors":\[.*\]\}(,?)$', re.MULTILINE)  # a file has a line
_TENSORS = b',\n "tensors": {'
_KINDS = {
    **{stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


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
    unlisted: str | None = None
    """At a save: why `tensors` of a file of torch.save are not known, where that should not be."""

    def as_json(self) -> dict[str, Any]:
        """What the index says of it."""
        about: dict[str, Any] = {"name": self.name, "bytes": self.num_bytes, "crc32": self.checksums}
        if self.tensors is not None:
            about["tensors"] = [
                (key, *(record if record.stride is not None else record[:-1])) for key, record in self.tensors.items()
            ]
        return about

    def as_message(self) -> dict[str, Any]:
        """The same with `parameters` and `unlisted`, for the rank that writes the index."""
        return {**self.as_json(), "parameters": self.parameters, "unlisted": self.unlisted}

    @classmethod
    def parse(cls, known: Mapping[str, Any]) -> "FileEntry":
        """From `as_json` or `as_message`. ValueError, TypeError or KeyError where it is neither."""
        name, num_bytes, sums, listed = known["name"], known["bytes"], known["crc32"], known.get("tensors")
        _require(isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0"), "name", name)
        _require(num_bytes is None or _is_count(num_bytes), f"bytes of {name}", num_bytes)
        if sums is not None:
            _require(isinstance(sums, list) and all(isinstance(each, str) for each in sums), f"crc32 of {name}", sums)
            num_blocks = len(sums) if num_bytes is None else -(-num_bytes // BLOCK_BYTES)
            _require(
                len(sums) == num_blocks,
                f"number of checksums of {name}, a file of {counted(num_bytes, 'byte')}",
                len(sums),
            )
        tensors = None if listed is None else {tuple(key): _record(*about) for key, *about in listed}
        return cls(name, num_bytes, sums, tensors, known.get("parameters"), known.get("unlisted"))


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
    def from_bytes(cls, content: bytes, path: Path, *, with_tensors: bool = True) -> "Index":
        """Parse the content of the file `path`.

        Args:
            with_tensors: else `tensors`, of the index and of each file, are None: they are most of a large index.

        Raises:
            DamagedCheckpoint: it is not what was saved.
            CheckpointError: a later version wrote it.
        """
        text = content.rpartition(_SEAL)[0]
        if not text or _sealed(text) != content:
            raise DamagedCheckpoint(
                f"{path} is damaged: its checksum does not fit its content ({counted(len(content), 'byte')}). Copy it "
                "again from where it came, or load another tag; without this file the checkpoint loads unverified."
            )
        try:
            known = json.loads(content if with_tensors else _without_tensors(text))
            version, block_bytes, saved = known["format"], known["block_bytes"], known["saved"]
            if (version, block_bytes) == (_FORMAT, BLOCK_BYTES):
                return cls(tuple(map(FileEntry.parse, known["files"])), _checked(saved), _table(known.get("tensors")))
            saver = saved.get("ds_core")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{path} is damaged: its checksum fits, and its content is no index ({type(error).__name__}: {error}). "
                "Load another tag."
            ) from error
        raise CheckpointError(
            f"{path} has format {version} with blocks of {block_bytes} bytes, and this version reads format {_FORMAT} "
            f"with {BLOCK_BYTES}. Load the checkpoint with the version of ds-core that saved it ({saver}) or a later "
            "one."
        )


def read_index(folder: Path, *, with_tensors: bool = True) -> Index | None:
    """The index of the tag in `folder`; None for a checkpoint that has none, as DeepSpeed's and older ones of ours.

    Args:
        with_tensors: as for `Index.from_bytes`.

    Raises `CheckpointError` as `Index.from_bytes` does, or where the file cannot be read.
    """
    path = folder / layout.INDEX_FILE
    check_regular(path)
    try:
        return Index.from_bytes(path.read_bytes(), path, with_tensors=with_tensors)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def seal_of(folder: Path) -> str | None:
    """The checksum in the last line of the index in `folder`, by which two saves differ; None where there is none."""
    path = folder / layout.INDEX_FILE
    check_regular(path)
    try:
        with path.open("rb") as file:
            file.seek(0, io.SEEK_END)
            file.seek(max(0, file.tell() - _SEAL_BYTES))
            return file.read().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {reason_of(error)}. Correct its permissions.")


def check_regular(path: Path) -> None:
    """Raise `DamagedCheckpoint` where `path` is neither a file nor a link to one. A FIFO would wait for its writer.

    Called before a file of a checkpoint is opened, which says what else is wrong with it.
    """
    if is_remote(path):
        return
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return
    if kind != stat.S_IFREG:
        raise DamagedCheckpoint(
            f"{path} is {_KINDS.get(kind, 'no file')}, where a regular file is expected. Remove it, and copy the file "
            "again from where it came, or use another tag."
        )


def _require(condition: bool, what: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"{what}: found {found!r:.200}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _checked(saved: Any) -> dict[str, Any]:
    """`Index.saved`."""
    _require(isinstance(saved, dict), "saved", saved)
    if saved.get("at") is not None:
        datetime.fromisoformat(saved["at"]).astimezone()  # tags are sorted by it
    for key in ("global_steps", "zero_stage", "dp_world_size", "mp_world_size"):
        _require(saved.get(key) is None or _is_count(saved[key]), key, saved.get(key))
    return dict(saved)


def _table(tensors: Any) -> dict[str, Any] | None:
    """`Index.tensors`."""
    if tensors is None:
        return None
    lists = [tensors["groups"], tensors["entries"]]
    _require(all(isinstance(each, list) for each in lists), "tensors", lists)
    return dict(tensors)


def _record(dtype: str, shape: Sequence[int], offset: int, stride: Sequence[int] | None = None) -> TensorRecord:
    numbers = (offset, *shape, *(stride or ()))
    _require(isinstance(dtype, str) and all(map(_is_count, numbers)), "a tensor", (dtype, *numbers))
    return TensorRecord(dtype, tuple(shape), offset, None if stride is None else tuple(stride))


def _without_tensors(text: bytes) -> bytes:
    """An index before its seal, as `to_bytes` wrote it, without the lists of tensors. A string holds no newline and no
    bare quotation mark, so what is cut out is none of a string."""
    return _TENSORS_OF_FILE.sub(rb"}\1", text.partition(_TENSORS)[0]) + b"\n}"


def _lines(items: Iterable[Any]) -> str:
    """A JSON list with one line per item."""
    lines = ",\n  ".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items)
    return f"[\n  {lines}\n ]" if lines else "[]"


def _sealed(text: bytes) -> bytes:
    return text + _SEAL + b'%08x"\n}\n' % zlib.crc32(text)
