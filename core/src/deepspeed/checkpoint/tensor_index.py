"""The table of where in a checkpoint's files the values of each parameter are. A save makes it, and an index has it.

ZeRO joins parameters and divides the result among ranks (`zero.layout`). The table says where the parts of each
parameter are then, so that a reader needs no knowledge of that. As JSON:

    {"groups": [{"fp32": key, "exp_avg": key, ...}, ...],
     "entries": [{"name": "embed.weight", "shape": [7, 3], "weight": {"key": key, "parts": parts},
                  "group": 0, "parts": parts},
                 {"name": "head.weight", "same_as": "embed.weight"}, ...]}

`weight` is the module's value; it is omitted if the files have only the master weights (`fp32`).
The values of a group are under its keys, and have the same parts. A key leads to a tensor in a file: the keys and
positions in nested dicts and lists. Parts are `[file, count, start, numel]`, in the order of the parameter's elements:
each of `count` files, from number `file` of the index on, has `numel` elements from element `start` of the tensor, or
as many as the parameter has left. An entry has `mp_rank` if several model-parallel ranks saved.

The table omits values that are one number, such as Adam's `step`, and states of other shapes than the parameter's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.index import FileEntry, Index
from deepspeed.checkpoint.torch_file import Key, TensorRecord, TorchFile, itemsize_bytes
from deepspeed.errors import CheckpointError, counted, first_line
from deepspeed.log import warn_once
from deepspeed.zero.layout import contiguous

Parts = list[tuple[int, int, int, int]]

_SHARDED, _CONTIGUOUS = "fp32_flat_groups", "single_partition_of_fp32_groups"
_STATES = ("base_optimizer_state", "optimizer_state_dict")  # the second in files for DeepSpeed's stage 3


# --- at a save


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


# --- in an index


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
                record = _tensors(entry)[key]
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
