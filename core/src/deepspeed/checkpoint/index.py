"""`index.json` in a tag's folder: the files of the checkpoint, their sizes and checksums, and facts of the save.

    {
     "format": 1,
     "saved": {"tag": ..., "at": ..., "global_steps": ..., "zero_stage": ..., "dp_world_size": ..., ...},
     "block_bytes": 67108864,
     "files": [{"name": ..., "bytes": ..., "crc32": ["0a1b2c3d", ...],
                "tensors": [[["module", "embed.weight"], "bfloat16", [7, 3], 1088], ...]}, ...],
     "tensors": {"groups": [...], "entries": [{"name": "embed.weight", ...}, ...]},
     "checksum": "crc32:4e5f6a7b"
    }

`crc32` has one checksum per block of `block_bytes`; the last block is shorter. So a reader of part of a file verifies
only the blocks that it reads, and a message says where the damage is. Checksums are computed while a file is written
(`durable.py`), and compared when it is read (`check_content`; `check_size` compares only sizes). The `tensors` of a
file are key, dtype, shape and first byte of each tensor, and its stride if the elements are not in row-major order. The
top-level `tensors` says where the values of each parameter are (`TensorTable`); `tensor_index.py` makes it. Both are
null or absent if the store does not know them. The last line is the checksum of the bytes before it. Other keys may be
added under the same `format`; a reader ignores keys that it does not know.

ZeRO joins parameters and divides the result among ranks (`zero.layout`). `tensors` says where the parts of each
parameter are then, so that a reader needs no knowledge of that:

    {"groups": [{"fp32": key, "exp_avg": key, ...}, ...],
     "entries": [{"name": "embed.weight", "shape": [7, 3], "weight": {"key": key, "parts": parts},
                  "group": 0, "parts": parts},
                 {"name": "head.weight", "same_as": "embed.weight"}, ...]}

`weight` is the module's value; it is omitted if the files have only the master weights (`fp32`).
The values of a group are under its keys, and have the same parts. A key leads to a tensor in a file: the keys and
positions in nested dicts and lists. Parts are `[file, count, start, numel]`, in the order of the parameter's elements:
each of `count` files, from number `file` of the index on, has `numel` elements from element `start` of the tensor, or
as many as the parameter has left. An entry has `mp_rank` if several model-parallel ranks saved. Values that are one
number, such as Adam's `step`, and states of other shapes than the parameter's are omitted.
"""

import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint import durable, layout
from deepspeed.checkpoint.layout import is_remote, reason_of
from deepspeed.errors import CheckpointError, counted, first_line

Key = tuple[str | int, ...]
"""The keys and positions that lead to a value in nested dicts and lists."""


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


def itemsize_bytes(dtype: str) -> int:
    """Return the bytes per element: bfloat16 -> 2, float8_e4m3fn -> 1."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


_NUM_READERS = 2  # one waits for the disk or copies, while the other sums
_FORMAT = 1
_SEAL = b',\n "checksum": "crc32:'
_SEAL_BYTES = 12  # of the text after `_SEAL`
_TENSORS_OF_FILE = re.compile(rb',"tensors":\[.*\]\}(,?)$', re.MULTILINE)  # each file has a line
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
    """CRC-32 per block of `durable.BLOCK_BYTES`; None where the store computes none."""
    tensors: Mapping[Key, TensorRecord] | None = None
    """The tensors in it; None where the store does not know them."""
    parameters: Mapping[str, Any] | None = None
    """The result of `tensor_index.parameters_in` for a model file at a save; else None."""
    unlisted: str | None = None
    """The reason, at a save, why `tensors` of a file of torch.save are unexpectedly not known; else None."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the file in the index."""
        about: dict[str, Any] = {"name": self.name, "bytes": self.num_bytes, "crc32": self.checksums}
        if self.tensors is not None:
            about["tensors"] = [
                (key, *(record if record.stride is not None else record[:-1])) for key, record in self.tensors.items()
            ]
        return about

    def as_message(self) -> dict[str, Any]:
        """Return `as_json` with `parameters` and `unlisted`, for the rank that writes the index."""
        return {**self.as_json(), "parameters": self.parameters, "unlisted": self.unlisted}

    @classmethod
    def parse(cls, known: Mapping[str, Any]) -> "FileEntry":
        """Parse the result of `as_json` or `as_message`. Raises ValueError, TypeError or KeyError for anything else."""
        name, num_bytes, sums, listed = known["name"], known["bytes"], known["crc32"], known.get("tensors")
        _require(isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0"), "name", name)
        _require(num_bytes is None or _is_count(num_bytes), f"bytes of {name}", num_bytes)
        if sums is not None:
            _require(isinstance(sums, list) and all(isinstance(each, str) for each in sums), f"crc32 of {name}", sums)
            num_blocks = len(sums) if num_bytes is None else -(-num_bytes // durable.BLOCK_BYTES)
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
    """The table of where each parameter's values lie, which `TensorTable` reads; None without one."""

    def entry(self, name: str) -> FileEntry | None:
        """Return the file of this name, or None."""
        return next((entry for entry in self.files if entry.name == name), None)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        content = {"format": _FORMAT, "saved": dict(self.saved), "block_bytes": durable.BLOCK_BYTES}
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
            with_tensors: False: `tensors` of the index and of each file are None; they are most of a large index.

        Raises:
            DamagedCheckpoint: the content is not what was saved.
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
            if (version, block_bytes) == (_FORMAT, durable.BLOCK_BYTES):
                return cls(tuple(map(FileEntry.parse, known["files"])), _checked(saved), _table(known.get("tensors")))
            saver = saved.get("ds_core")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{path} is damaged: its checksum fits, and its content is no index ({type(error).__name__}: {error}). "
                "Load another tag."
            ) from error
        raise CheckpointError(
            f"{path} has format {version} with blocks of {block_bytes} bytes, and this version reads format {_FORMAT} "
            f"with {durable.BLOCK_BYTES}. Load the checkpoint with the version of ds-core that saved it ({saver}) or a "
            "later one."
        )


def read_index(folder: Path, *, with_tensors: bool = True) -> Index | None:
    """Return the index of the tag in `folder`; None if there is none, as in DeepSpeed's and older ones of ours.

    Args:
        with_tensors: as for `Index.from_bytes`.

    Raises `CheckpointError` as `Index.from_bytes` does, or if the file cannot be read.
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
    """Return the checksum in the last line of the index in `folder`, which differs between saves; or None."""
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
    """Raise `DamagedCheckpoint` if `path` is neither a file nor a link to one. A FIFO would wait for its writer.

    Called before a file of a checkpoint is opened; opening the file reports all other faults.
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
    """Return `Index.saved`, checked."""
    _require(isinstance(saved, dict), "saved", saved)
    if saved.get("at") is not None:
        datetime.fromisoformat(saved["at"]).astimezone()  # tags are sorted by it
    for key in ("global_steps", "zero_stage", "dp_world_size", "mp_world_size"):
        _require(saved.get(key) is None or _is_count(saved[key]), key, saved.get(key))
    return dict(saved)


def _table(tensors: Any) -> dict[str, Any] | None:
    """Return `Index.tensors`, checked."""
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
    """Return an index before its seal, as `to_bytes` wrote it, without the lists of tensors. A JSON string holds no
    newline and no bare quotation mark, so nothing inside a string is cut out."""
    return _TENSORS_OF_FILE.sub(rb"}\1", text.partition(_TENSORS)[0]) + b"\n}"


def _lines(items: Iterable[Any]) -> str:
    """Return a JSON list with one line per item."""
    lines = ",\n  ".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items)
    return f"[\n  {lines}\n ]" if lines else "[]"


def _sealed(text: bytes) -> bytes:
    return text + _SEAL + b'%08x"\n}\n' % zlib.crc32(text)


_ADVICE = "Copy the file again from where it came, or load another tag."


def checksums_of(path: Path, advance: Callable[[int], object] | None = None) -> list[str]:
    """Return the checksums of the blocks of a file, as `ChecksumWriter.checksums` does. Raises OSError.

    Args:
        advance: called with the number of bytes of each part that was read, to show progress.
    """
    if is_remote(path):
        return _sums_in_order(path, advance)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_NUM_READERS, "ds-verify") as threads:
        size = os.fstat(file.fileno()).st_size
        firsts = range(0, size, durable.BLOCK_BYTES)
        sums = []
        for first, value in zip(firsts, threads.map(partial(_sum_of_block, file.fileno()), firsts), strict=True):
            sums.append(f"{value:08x}")
            if advance is not None:
                advance(min(durable.BLOCK_BYTES, size - first))
    return sums


def _sum_of_block(descriptor: int, first: int) -> int:
    """Return the CRC-32 of the block at `first`. Runs in a thread: the disk reads ahead for it while another sums."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, first, durable.BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
    buffer, value, position = memoryview(bytearray(durable.PART_BYTES)), 0, first
    while num_bytes := os.preadv(descriptor, [buffer[: first + durable.BLOCK_BYTES - position]], position):
        value = zlib.crc32(buffer[:num_bytes], value)
        position += num_bytes
    return value


def _sums_in_order(path: Path, advance: Callable[[int], object] | None) -> list[str]:
    """Return the checksums of the blocks of an object in an object store, which is read as one stream."""
    sums = durable.BlockSums()
    with path.open("rb") as file:
        while part := file.read(durable.PART_BYTES):
            sums.add(part)
            if advance is not None:
                advance(len(part))
    return sums.as_text()


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise `DamagedCheckpoint` if the file is missing or does not have the number of bytes that was saved."""
    check_regular(path)
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path} is missing: {path.parent} is incomplete, its {layout.INDEX_FILE} lists the file with "
            f"{entry.num_bytes} bytes. {_ADVICE}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Correct its permissions.") from error
    if entry.num_bytes not in (None, num_bytes):
        how = "cut short" if num_bytes < (entry.num_bytes or 0) else "too long"
        raise DamagedCheckpoint(
            f"{path} is damaged: it has {counted(num_bytes, 'byte')}, and was saved with {entry.num_bytes} ({how}). "
            f"{_ADVICE}"
        )


def check_content(path: Path, entry: FileEntry, index: Index, advance: Callable[[int], object] | None = None) -> None:
    """Read the file, and raise `DamagedCheckpoint` if a block does not have the checksum that was saved.

    Args:
        index: the index of `entry`: if the file has the content of another one, the message says so.
        advance: as for `checksums_of`.
    """
    check_size(path, entry)
    if entry.checksums is None:
        return
    try:
        found = checksums_of(path, advance)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. {_ADVICE}") from error
    check_checksums(path, entry, index, found)


def check_checksums(path: Path, entry: FileEntry, index: Index, found: list[str]) -> None:
    """Raise `DamagedCheckpoint` if `found`, the checksums of the file `path`, are not those that were saved."""
    assert entry.checksums is not None
    if found == list(entry.checksums):
        return
    others = [other.name for other in index.files if list(other.checksums or ()) == found]
    if others:
        raise DamagedCheckpoint(
            f"{path} has the content that was saved as {others[0]}: the files were renamed or swapped. Give each its "
            "name back, or load another tag."
        )
    if len(found) != len(entry.checksums):  # if the store did not know the number of bytes
        raise DamagedCheckpoint(
            f"{path} is damaged: it has {counted(len(found), 'block')} of {durable.BLOCK_BYTES} bytes, and was saved "
            f"with {len(entry.checksums)}. {_ADVICE}"
        )
    block = next(i for i, (one, other) in enumerate(zip(found, entry.checksums, strict=True)) if one != other)
    first, last = block * durable.BLOCK_BYTES, min((block + 1) * durable.BLOCK_BYTES, path.stat().st_size) - 1
    raise DamagedCheckpoint(
        f"{path} is damaged: its bytes {first} to {last} have the CRC-32 {found[block]}, and were saved with "
        f"{entry.checksums[block]}. {_ADVICE}"
    )


Parts = list[tuple[int, int, int, int]]


class Piece(NamedTuple):
    """Consecutive elements of a parameter in one file."""

    file: str
    key: Key
    """The key of the tensor in the file."""
    dtype: str
    start: int
    """The first of them, in the tensor's row-major order."""
    numel: int
    offset: int | None
    """Byte of the file at which they begin; None where the tensor's elements do not lie in that order."""


@dataclass(frozen=True)
class TensorEntry:
    """One parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    mp_rank: int
    values: Mapping[str, tuple[Piece, ...]]
    """`weight`: the module's; `fp32`: the master weights; else states of the optimizer. In the order of elements."""


class TensorTable:
    """The parameters and buffers of an index that has tensors.

    Args:
        index: the index that `read_index` returned.

    Raises:
        CheckpointError: the index has no tensors.
    """

    def __init__(self, index: Index) -> None:
        if index.tensors is None:
            raise CheckpointError(
                "the index lists no tensors: an earlier version, or a store that does not keep files of torch.save, "
                "wrote it"
            )
        self._files = index.files
        self._groups = index.tensors["groups"]
        self._rows = {(row.get("mp_rank", 0), row["name"]): row for row in index.tensors["entries"]}

    def __iter__(self) -> Iterator[TensorEntry]:
        return (self.entry(name, mp_rank) for mp_rank, name in self._rows)

    def entry(self, name: str, mp_rank: int = 0) -> TensorEntry:
        """Return the parameter or buffer of this name. Raises KeyError if there is none."""
        row = self._rows[mp_rank, name]
        names = {name}
        while "same_as" in row:
            if row["same_as"] in names:
                raise ValueError(f"{name} is the same as itself")
            names.add(row["same_as"])
            row = self._rows[mp_rank, row["same_as"]]
        shape = tuple(row["shape"])
        keys = self._groups[row["group"]] if "group" in row else {}
        places = {value: (key, row["parts"]) for value, key in keys.items()}
        if "weight" in row:
            places = {"weight": (row["weight"]["key"], row["weight"]["parts"]), **places}
        values = {value: tuple(self._pieces(tuple(key), parts, shape)) for value, (key, parts) in places.items()}
        return TensorEntry(name, shape, mp_rank, values)

    def _pieces(self, key: Key, parts: Parts, shape: tuple[int, ...]) -> Iterator[Piece]:
        left = math.prod(shape)
        for file, count, start, size in parts:
            for entry in self._files[file : file + count]:
                numel = min(size, left)
                assert entry.tensors is not None
                record = entry.tensors[key]
                offset = record.offset + start * itemsize_bytes(record.dtype) if record.stride is None else None
                yield Piece(entry.name, key, record.dtype, start, numel, offset)
                left -= numel


def fault_in_table(index: Index) -> str:
    """Return the fault in the table of an index whose checksum fits; empty if there is none."""
    if index.tensors is None:
        return ""
    try:
        table = TensorTable(index)
        records = {entry.name: entry.tensors or {} for entry in index.files}
        for entry in table:
            for value, pieces in entry.values.items():
                _check_pieces(entry, value, pieces, records)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        return f"its table of tensors is damaged ({type(error).__name__}: {first_line(error)})"
    return ""


def _check_pieces(
    entry: TensorEntry, value: str, pieces: Sequence[Piece], records: Mapping[str, Mapping[Key, TensorRecord]]
) -> None:
    """Raise ValueError if pieces are not inside their tensors, or are not the whole parameter."""
    for piece in pieces:
        if min(piece.start, piece.numel) < 0 or piece.start + piece.numel > records[piece.file][piece.key].numel:
            raise ValueError(f"{value} of {entry.name} lies outside of the tensor {piece.key} of {piece.file}")
    numel = sum(piece.numel for piece in pieces)
    if numel != math.prod(entry.shape):
        raise ValueError(
            f"{value} of {entry.name} has {counted(numel, 'element')} in the files, and the shape {entry.shape}"
        )
