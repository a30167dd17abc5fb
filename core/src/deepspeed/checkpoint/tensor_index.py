"""List the tensors in the files of a save, and make the table in its index of where the values of each parameter are.

`index.py` has the form of both, and reads them. `TorchFile` reads the structure of a file that `torch.save` wrote,
without torch and without reading its tensors. Such a file is a zip of uncompressed records: `data.pkl`, a pickle in
which each tensor refers to a storage, and `data/<number>`, the bytes of a storage. The pickle is loaded with
placeholders for all classes: no code is run.
"""

import io
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.index import FileEntry, Index, Key, Parts, TensorRecord, itemsize_bytes
from deepspeed.errors import first_line
from deepspeed.log import warn_once
from deepspeed.zero.layout import contiguous

_SHARDED, _CONTIGUOUS = "fp32_flat_groups", "single_partition_of_fp32_groups"
_STATES = ("base_optimizer_state", "optimizer_state_dict")  # the second in files for DeepSpeed's stage 3
_STORAGES = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool"},
    **{"ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64"},
}
_NAME_LENGTHS = struct.Struct("<26xHH")  # of a record's name and its extra field, in the header before its bytes
_HEADER_BYTES = 30


def tensor_table(entries: Sequence[FileEntry]) -> dict[str, Any] | None:
    """Return the table of a save, as JSON; None if a file's content is unknown, or experts are divided over ranks.

    Args:
        entries: files in the order of the index, see `sorted_entries`.
    """
    if any(entry.tensors is None or (entry.parameters or {}).get("has_experts") for entry in entries):
        return None  # with experts, ranks have other parameters in a group, and stacked weights are in many files
    beside = {entry.name: (number, entry) for number, entry in enumerate(entries) if _is_beside(entry.name)}
    groups: list[dict[str, Key]] = []
    rows: list[dict[str, Any]] = []
    by_rank: dict[int, list[tuple[int, FileEntry]]] = {}
    for number, entry in enumerate(entries):
        if entry.name not in beside and not layout.is_rounding_file(entry.name):
            by_rank.setdefault(layout.ranks_of(entry.name)[1], []).append((number, entry))
    for mp_rank, its in by_rank.items():
        for row in _ModelRank(its, groups, beside).rows():
            rows.append(row if len(by_rank) == 1 else {"mp_rank": mp_rank, **row})
    return {"groups": groups, "entries": rows}


def file_entry(name: str, num_bytes: int | None, checksums: Sequence[str] | None, file: BinaryIO | None) -> FileEntry:
    """Return the index entry of a file that was written. A file whose tensors cannot be listed does not fail its save.

    Args:
        file: open for reading; None if its content is not known.
    """
    try:
        content = TorchFile.read(file) if file is not None else None
        if content is None:
            return FileEntry(name, num_bytes, checksums)
        is_other = layout.is_module_file(name) or layout.is_rounding_file(name)
        has_names = layout.ranks_of(name)[0] == 0 and not is_other
        names = parameters_in(content.value) if has_names else None
        return FileEntry(name, num_bytes, checksums, content.tensors(), names)
    except Exception as error:  # noqa: BLE001 - the states are in the file, whatever this is
        return FileEntry(name, num_bytes, checksums, unlisted=f"{name}: {type(error).__name__}: {first_line(error)}")


def index_of(entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> bytes:
    """Return the content of `index.json`: with the table if it can be made, else with one warning.

    Args:
        entries: the files of all ranks.
        facts: `Index.saved`.
    """
    files = sorted_entries(entries)
    trouble = next((entry.unlisted for entry in files if entry.unlisted), None)
    try:
        if trouble is None:
            return Index(tuple(files), facts, tensor_table(files)).to_bytes()
    except Exception as error:  # noqa: BLE001 - all files are written, and none needs the table to be loaded
        trouble = f"{type(error).__name__}: {first_line(error)}"
    warn_once(
        f"{layout.INDEX_FILE} of this checkpoint lists no tensors, because they could not be found ({trouble}). The "
        "checkpoint is whole and loads; please report this.",
        (-1,),
    )
    return Index(tuple(replace(entry, tensors=None) for entry in files), facts).to_bytes()


def sorted_entries(entries: Iterable[FileEntry]) -> list[FileEntry]:
    """Sort the entries so that files of one kind and model-parallel rank follow one another in the order of ranks."""

    def order(entry: FileEntry) -> tuple[bool, bool, int, int, str]:
        dp_rank, mp_rank = layout.ranks_of(entry.name)
        return _is_beside(entry.name), not layout.is_model_file(entry.name), mp_rank, dp_rank, entry.name

    return sorted(entries, key=order)


class _ModelRank:
    """The files of one model-parallel rank, with their numbers in the index; `beside`: files that model files name."""

    def __init__(
        self,
        files: Sequence[tuple[int, FileEntry]],
        groups: list[dict[str, Key]],
        beside: Mapping[str, tuple[int, FileEntry]],
    ) -> None:
        self._models = [each for each in files if layout.is_model_file(each[1].name)]
        self._shards = [each for each in files if not layout.is_model_file(each[1].name)]
        self._groups = groups  # of all model-parallel ranks
        found = self._models[0][1].parameters if self._models else None
        self._parameters = found or {}
        self._beside = beside
        self._optimizer = beside.get(self._parameters.get("optimizer_file", ""), (self._models or files)[0])

    def _weights(self) -> Iterator[tuple[Any, int, Key, TensorRecord]]:
        """Yield the name, the file's number, the key there and the record of each weight of the model, in any file."""
        number, model = self._models[0]
        for key, record in _tensors(model).items():
            if len(key) == 2 and key[0] in ("module", "ds_module_rest"):
                yield key[1], number, key, record
        for file, names in self._parameters.get("files", {}).items():
            number, entry = self._beside[file]
            for own, name in names.items():
                if (own,) in _tensors(entry):
                    yield name, number, (own,), _tensors(entry)[own,]

    def rows(self) -> Iterator[dict[str, Any]]:
        if not self._models:
            return
        rows: dict[Any, dict[str, Any]] = {}
        for name, number, key, record in self._weights():
            whole = {"key": key, "parts": [(number, 1, 0, record.numel)]}
            rows[name] = {"name": name, "shape": record.shape, "weight": whole}
        for name, shape in self._parameters.get("frozen", {}).items():
            key = ("frozen_param_fragments", name)
            parts = [
                (number, 1, 0, _tensors(model)[key].numel) for number, model in self._models if key in _tensors(model)
            ]
            if name not in rows and parts:
                rows[name] = {"name": name, "shape": shape, "weight": {"key": key, "parts": _joined(parts)}}
        for name, row in self._trained():
            rows[name] = {**rows.get(name, {}), **row}
        for alias, name in self._parameters.get("shared", {}).items():
            rows[alias] = {"name": alias, "same_as": name}
        yield from rows.values()

    def _trained(self) -> Iterator[tuple[str, dict[str, Any]]]:
        shapes: list[dict[str, Any]] = self._parameters.get("groups", [])
        if self._shards:
            yield from self._divided(self._shards, ("optimizer_state_dict",), shapes)
        elif ("optimizer", _CONTIGUOUS, 0) in _tensors(self._optimizer[1]):
            yield from self._divided([self._optimizer], ("optimizer",), shapes)
        else:
            yield from self._undivided()

    def _divided(
        self, files: Sequence[tuple[int, FileEntry]], base: Key, shapes: Sequence[Mapping[str, Sequence[int]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the parameters whose groups are joined, and divided among `files`."""
        tensors = _tensors(files[0][1])
        is_sharded = any(key[: len(base) + 1] == (*base, _SHARDED) for key in tensors)
        for index, group in enumerate(shapes):
            master: Key = (*base, _SHARDED if is_sharded else _CONTIGUOUS, index)
            sizes = [
                found.numel if (found := _tensors(entry).get(master)) else 0  # empty tensors are not listed
                for _, entry in files
            ]
            values = {"fp32": master, **_states(files, base, index)}
            self._groups.append(values)
            numels = [math.prod(shape) for shape in group.values()]
            divide = _in_parameters if is_sharded else _contiguous
            for (name, shape), parts in zip(group.items(), divide(numels, sizes), strict=True):
                own = _joined((files[owner][0], count, start, numel) for owner, count, start, numel in parts)
                yield name, {"name": name, "shape": shape, "group": len(self._groups) - 1, "parts": own}

    def _undivided(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the parameters whose states are in torch's state dict of the optimizer, each by itself."""
        number, content = self._optimizer
        tensors = _tensors(content)
        shapes = {name: record.shape for name, _, _, record in self._weights()}
        numbers = (content.parameters or {}).get("numbers", {})
        names = {place: name for name, place in numbers.items() if name in shapes}
        keys: dict[Any, dict[str, Key]] = {}
        odd: set[str] = set()  # states with another shape than a parameter's
        for key, record in tensors.items():
            if len(key) == 4 and key[:2] == ("optimizer", "state") and key[2] in names:
                keys.setdefault(key[2], {})[str(key[3])] = key
                if record.shape != shapes[names[key[2]]]:
                    odd.add(str(key[3]))
        for place, its in keys.items():
            shape = shapes[names[place]]
            self._groups.append({state: key for state, key in its.items() if state not in odd})
            parts = [(number, 1, 0, math.prod(shape))]
            row = {"name": names[place], "shape": shape, "group": len(self._groups) - 1, "parts": parts}
            yield names[place], row


def _states(files: Sequence[tuple[int, FileEntry]], base: Key, index: int) -> dict[str, Key]:
    """Return the keys of the states that are divided like the master weights."""
    found = {}
    for _, entry in files:
        for key, record in _tensors(entry).items():
            inner = key[len(base) :]
            if len(inner) == 4 and inner[0] in _STATES and inner[1:3] == ("state", index) and len(record.shape) == 1:
                found[str(inner[3])] = key
    return found


def _contiguous(numels: Sequence[int], sizes: Sequence[int]) -> Iterator[Parts]:
    parts: list[Parts] = [[] for _ in numels]
    for run in contiguous(numels, [0, *accumulate(sizes)]):
        parts[run.param].append((run.owner, 1, run.offset, run.numel))
    return iter(parts)


def _in_parameters(numels: Sequence[int], sizes: Sequence[int]) -> Iterator[Parts]:
    start = 0
    for numel in numels:
        size = math.ceil(numel / len(sizes))
        yield [(0, math.ceil(numel / size), start, size)] if size else []
        start += size


def _joined(parts: Iterable[tuple[int, int, int, int]]) -> Parts:
    """Merge parts that differ only in the number of the file."""
    joined: Parts = []
    for file, count, start, numel in parts:
        if joined and joined[-1][2:] == (start, numel) and sum(joined[-1][:2]) == file:
            first, before, *_ = joined.pop()
            file, count = first, before + count
        joined.append((file, count, start, numel))
    return joined


def _is_beside(name: str) -> bool:
    """Whether `name` is that of a file that a model file names."""
    return layout.is_module_file(name) or layout.is_expp_file(name)


def _tensors(entry: FileEntry) -> Mapping[Key, TensorRecord]:
    assert entry.tensors is not None
    return entry.tensors


def parameters_in(model_state: Any) -> dict[str, Any] | None:
    """Return the names and shapes that the table needs of a model file's content, as JSON; None for other content."""
    if not isinstance(model_state, dict) or not model_state.keys() & {"module", "optimizer"}:
        return None
    optimizer = model_state.get("optimizer") or {}
    files = {file: dict(names) for file, names in model_state.get("ds_module_files", {}).items()}
    numbers: dict[str, int] = {}
    if "param_names" in optimizer:
        for group, names in zip(optimizer["param_groups"], optimizer["param_names"], strict=True):
            numbers.update(zip(map(_text, names), map(int, group["params"]), strict=True))
    return {
        "groups": [_shapes(group) for group in model_state.get("param_shapes") or []],
        "frozen": _shapes(model_state.get("frozen_param_shapes") or {}),
        "shared": {_text(alias): _text(name) for alias, name in (model_state.get("shared_params") or {}).items()},
        "numbers": numbers,
        "has_experts": bool((model_state.get("ds_model_parallel") or {}).get("experts"))
        or any(not isinstance(name, str) for names in files.values() for name in names.values()),
        "files": files,
        "optimizer_file": model_state.get("ds_optimizer_file", ""),
    }


def _shapes(named: Mapping[Any, Any]) -> dict[str, list[int]]:
    return {_text(name): [int(size) for size in shape] for name, shape in named.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"found {value!r} in place of a name")
    return value


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
