"""Megatron's indexed data sets: a file with many sequences of numbers, and a small index with their positions.

`<prefix>.bin` holds the numbers of all sequences, one after another. `<prefix>.idx`, little-endian, holds

    9 bytes   magic, MMIDIDX and two zeros
    u64       version, 1
    u8        code of the dtype, see `dtypes`
    u64       N, number of sequences
    u64       D, number of document boundaries
    i32[N]    length of each sequence
    i64[N]    offset in bytes of each sequence in the `.bin` file
    i64[D]    number of the first sequence of each document, then N
    i8[N]     mode of each sequence, only in multimodal files

Source: the documentation of Megatron Core, "datasets package", which describes `IndexedDataset`. The whole index is
checked when it is opened, so no read goes past the end of the `.bin` file.
"""

import io
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError, counted

_MAGIC = b"MMIDIDX\x00\x00"
_FORMER_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEAD = struct.Struct("<9sQBQQ")
_MAX_SIZE = np.iinfo(np.int32).max

#: code in the index -> dtype in numpy and in torch. Megatron's codes from 6 on differ, see `_dtype_of`.
dtypes: dict[int, tuple[type[np.generic], torch.dtype | None]] = {
    1: (np.uint8, torch.uint8),
    2: (np.int8, torch.int8),
    3: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    5: (np.int64, torch.int64),
    6: (np.uint16, None),
    7: (np.uint32, None),
    8: (np.uint64, None),
}
valid_dtypes = {kind for kind, _ in dtypes.values()}
#: dtypes of the same codes in Megatron's files
_MEGATRON: dict[int, type[np.generic]] = {6: np.float64, 7: np.float64, 8: np.uint16}

_Path = str | os.PathLike[str]
_Numbers = torch.Tensor | np.ndarray | Sequence[int]


def code(dtype: Any) -> int:
    """Return the code of a dtype.

    Raises:
        ValueError: the format has no code for the dtype.
    """
    for number, (kind, _) in dtypes.items():
        if np.dtype(kind) == np.dtype(dtype):
            return number
    raise ValueError(f"indexed dataset: found dtype {np.dtype(dtype)}; choose one of {_names_of_dtypes()}")


def index_file_path(prefix_path: _Path) -> str:
    """Return the path of the index of the data set `prefix_path`."""
    return f"{os.fspath(prefix_path)}.idx"


def data_file_path(prefix_path: _Path) -> str:
    """Return the path of the `.bin` file of the data set `prefix_path`."""
    return f"{os.fspath(prefix_path)}.bin"


def dataset_exists(path: _Path, impl: str = "mmap") -> bool:
    """Return whether both files of a data set exist."""
    _check_form("dataset_exists", impl)
    return MMapIndexedDataset.exists(path)


def get_available_dataset_impl() -> list[str]:
    """Return the formats that `make_dataset` can open."""
    return ["mmap"]


def infer_dataset_impl(path: _Path) -> str | None:
    """Detect the format of a data set from its index. Return None if a file is missing or the format is unknown."""
    if not MMapIndexedDataset.exists(path):
        return None
    with open(index_file_path(path), "rb") as file:
        begin = file.read(len(_MAGIC))
    if begin.startswith(_FORMER_MAGIC):
        return "cached"
    return "mmap" if begin == _MAGIC else None


def make_dataset(path: _Path, impl: str = "mmap", skip_warmup: bool = False) -> "MMapIndexedDataset":
    """Open the data set `<path>.bin` and `<path>.idx`.

    Args:
        path: the common path of both files, without `.bin`.
        impl: "mmap", or "infer" to detect the format from the index.
        skip_warmup: ignored; nothing is read in advance.

    Raises:
        ConfigError: a file is missing or damaged, or has an older format.
    """
    _check_form("make_dataset", impl)
    return MMapIndexedDataset(path, skip_warmup)


def make_builder(out_file: _Path, impl: str = "mmap", vocab_size: int | None = None) -> "MMapIndexedDatasetBuilder":
    """Return a builder that writes `out_file` in the smallest dtype for tokens below `vocab_size`."""
    _check_form("make_builder", impl)
    return MMapIndexedDatasetBuilder(out_file, dtype=best_fitting_dtype(vocab_size))


def best_fitting_dtype(vocab_size: int | None = None) -> type[np.generic]:
    """Return the dtype for tokens of a vocabulary: uint16 for fewer than 65,500 tokens, else int32."""
    return np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32


def find_fit_int_dtype(min_value: int, max_value: int) -> type[np.generic]:
    """Return the smallest integer dtype that holds both values; it is unsigned if `min_value` is not negative.

    >>> find_fit_int_dtype(0, 256).__name__, find_fit_int_dtype(-1, 127).__name__
    ('uint16', 'int8')

    Raises:
        ValueError: no 64-bit dtype holds both.
    """
    unsigned, signed = (np.uint8, np.uint16, np.uint32, np.uint64), (np.int8, np.int16, np.int32, np.int64)
    kinds: tuple[type[np.integer[Any]], ...] = unsigned if min_value >= 0 else signed
    for kind in kinds:
        if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max:
            return kind
    raise ValueError(f"find_fit_int_dtype: found {min_value} to {max_value}, which no type of 64 bits holds")


def create_mmap_dataset_builder(fname: _Path, dtype: Any) -> "MMapIndexedDatasetBuilder":
    """Return a builder that writes `<fname>.bin`. Creates the folder if necessary."""
    Path(fname).parent.mkdir(parents=True, exist_ok=True)
    return MMapIndexedDatasetBuilder(data_file_path(fname), dtype=dtype)


def close_mmap_dataset_builder(builder: "MMapIndexedDatasetBuilder", fname: _Path) -> None:
    """Complete a data set of `create_mmap_dataset_builder`. Sequences after the last document become a document."""
    builder.end_document()
    builder.finalize(index_file_path(fname))


@absent_members("runtime.data_pipeline.data_sampling.indexed_dataset:MMapIndexedDataset")
class MMapIndexedDataset(Dataset[np.ndarray]):
    """A data set on disk. Sequences are numpy arrays over the memory-mapped file; data is read only when used.

    The index is read once, when the data set is opened, and takes 12 bytes of memory per sequence.

    Args:
        path: the common path of both files, without `.bin`.
        skip_warmup: ignored; nothing is read in advance.

    Raises:
        ConfigError: a file is missing or damaged, or has an older format.
    """

    def __init__(self, path: _Path, skip_warmup: bool = False) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._open()

    def _open(self) -> None:
        for path in (index_file_path(self._path), data_file_path(self._path)):
            if not Path(path).is_file():
                raise ConfigError(
                    f"indexed dataset {self._path}: found no file {path}; give the path of both without .bin or .idx"
                )
        self._bytes = _mapped(data_file_path(self._path))
        index = index_file_path(self._path)
        self._dtype, self._sizes, self._pointers, self._doc_idx = _read_index(index, len(self._bytes))

    def __getstate__(self) -> str:
        return self._path  # each worker of a loader maps the file itself

    def __setstate__(self, state: str) -> None:
        self._path = state
        self._open()

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, idx: slice) -> list[np.ndarray]: ...
    @overload
    def __getitem__(self, idx: int) -> np.ndarray: ...
    def __getitem__(self, idx: Any) -> Any:
        """Return one sequence, or a list of sequences for a slice."""
        if isinstance(idx, slice):
            return [self.get(each) for each in range(*idx.indices(len(self)))]
        return self.get(idx)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.get, range(len(self)))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a part of one sequence.

        Args:
            offset: number of elements to skip.
            length: number of elements to return; None: all remaining elements.

        Raises:
            IndexError: there is no such sequence, or the sequence is too short.
        """
        number = int(idx) + len(self) if idx < 0 else int(idx)
        if not 0 <= number < len(self):
            raise IndexError(f"indexed dataset {self._path}: asked for sequence {idx} of {len(self)}")
        size = int(self._sizes[number])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"indexed dataset {self._path}: asked for {length} numbers after {offset} of sequence {idx}, which has "
                f"{size}"
            )
        first = int(self._pointers[number]) + offset * self._dtype.itemsize
        if length == 0:  # `frombuffer` takes no empty buffer
            return np.empty(0, self._dtype)
        return np.frombuffer(self._bytes, self._dtype, count=length, offset=first)

    def size(self, index: int) -> int:
        """Return the length of a sequence."""
        return int(self._sizes[index])

    @property
    def sizes(self) -> np.ndarray:
        """The length of each sequence."""
        return self._sizes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the data set."""
        return self._dtype

    @property
    def doc_idx(self) -> np.ndarray:
        """The number of the first sequence of each document, then the number of sequences."""
        return self._doc_idx

    def get_doc_idx(self) -> np.ndarray:
        """Return `doc_idx`."""
        return self._doc_idx

    def set_doc_idx(self, doc_idx_: np.ndarray) -> None:
        """Replace the document boundaries in memory; the file does not change."""
        self._doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        """False: there is no `prefetch`, because the file is memory-mapped."""
        return False

    @staticmethod
    def exists(path: _Path) -> bool:
        """Return whether both files of a data set exist."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


@absent_members("runtime.data_pipeline.data_sampling.indexed_dataset:MMapIndexedDatasetBuilder")
class MMapIndexedDatasetBuilder:
    """Writes a data set: call `add_item` per sequence, `end_document` at the end of each document, then `finalize`.

    Args:
        out_file: path of the `.bin` file.
        dtype: the dtype to store.
    """

    def __init__(self, out_file: _Path, dtype: Any = np.int64) -> None:
        code(dtype)
        self._dtype = np.dtype(dtype)
        self._data_file: io.BufferedWriter = open(out_file, "wb")  # noqa: SIM115 (closed by finalize)
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: _Numbers) -> None:
        """Write one sequence.

        Raises:
            ValueError: the builder's dtype does not hold all numbers.
        """
        numbers = as_dtype(tensor, self._dtype)
        self._data_file.write(np.ascontiguousarray(numbers).data.cast("B") if numbers.size else b"")
        self._sizes.append(numbers.size)

    def add_item_numpy(self, np_array: np.ndarray) -> None:
        """Write one sequence."""
        self.add_item(np_array)

    def add_rows(self, rows: np.ndarray) -> None:
        """Write each row of an array as a sequence."""
        self.add_item(rows)
        self._sizes[-1:] = [rows.shape[1]] * len(rows)

    def add_items(self, arr_list: Sequence[_Numbers]) -> None:
        """Write several sequences."""
        for each in arr_list:
            self.add_item(each)

    def end_document(self) -> None:
        """End the current document; the next sequence begins another."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: _Path) -> None:
        """Append the sequences and documents of the data set at the path `another_file`, without `.bin`.

        Raises:
            ConfigError: a file is missing or damaged.
            ValueError: the data set has another dtype.
        """
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ValueError(
                f"MMapIndexedDatasetBuilder.merge_file_: found dtype {other.dtype} in {other._path}, but this one "
                f"writes {self._dtype}; merge files of one type"
            )
        first = len(self._sizes)
        self._doc_idx += [first + int(bound) for bound in other.doc_idx[1:]]
        self._sizes += other.sizes.tolist()
        if other.sizes.size and not _is_gapless(other):  # by another writer, or in another order
            for sequence in other:
                self._data_file.write(sequence.data.cast("B") if sequence.size else b"")
            return
        with open(data_file_path(another_file), "rb") as file:
            shutil.copyfileobj(file, self._data_file)

    def finalize(self, index_file: _Path) -> None:
        """Close the `.bin` file and write the index to `index_file`, a path that ends in `.idx`.

        The index is written to a temporary file and renamed, so an existing index is complete.
        """
        self._data_file.close()
        sizes = np.array(self._sizes, np.int64)
        if sizes.size and int(sizes.max()) > _MAX_SIZE:
            raise ValueError(
                f"MMapIndexedDatasetBuilder.finalize: found a sequence of {sizes.max()} numbers; the format has at "
                f"most {_MAX_SIZE}, so divide it"
            )
        ends = np.cumsum(sizes * self._dtype.itemsize)
        unfinished = f"{os.fspath(index_file)}.unfinished"
        with open(unfinished, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, _VERSION, code(self._dtype), len(sizes), len(self._doc_idx)))
            for numbers, dtype in (
                (sizes, "<i4"),
                (ends - sizes * self._dtype.itemsize, "<i8"),
                (self._doc_idx, "<i8"),
            ):
                file.write(np.asarray(numbers, dtype).tobytes())
        os.replace(unfinished, index_file)


def as_dtype(numbers: _Numbers, dtype: Any) -> np.ndarray:
    """Convert numbers to another dtype.

    Raises:
        ValueError: the dtype does not hold all numbers.
    """
    given = np.asarray(numbers)
    with np.errstate(invalid="ignore"):
        found = given.astype(dtype)
        if given.size and given.dtype.kind in "iuf" and not _holds(found, given):
            raise ValueError(
                f"indexed dataset: found numbers from {given.min()} to {given.max()}, which dtype {np.dtype(dtype)} "
                "does not hold; write them in a wider one"
            )
    return found


def _holds(found: np.ndarray, given: np.ndarray) -> bool:
    """Return whether `found`, a conversion of `given` to another dtype, has the same values."""
    if not np.array_equal(found.astype(given.dtype), given):
        return False
    if found.dtype.kind not in "iu":
        return True
    limits = np.iinfo(found.dtype)  # a value that wraps in a dtype of the same width wraps back above
    return limits.min <= int(given.min()) and int(given.max()) <= limits.max


def _mapped(path: str) -> Any:
    """Memory-map a file. An empty file cannot be mapped: return empty bytes."""
    if os.path.getsize(path) == 0:
        return b""
    return np.memmap(path, mode="r")


def _read_index(path: str, num_bytes: int) -> tuple[np.dtype[Any], np.ndarray, np.ndarray, np.ndarray]:
    """Read and check an index over a `.bin` file of `num_bytes`: dtype, sizes, byte offsets and document boundaries."""

    def damaged(what: str) -> ConfigError:
        return ConfigError(f"{path} is damaged, or is no index of Megatron's: {what}; write the data set again")

    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        length = os.fstat(file.fileno()).st_size
        if head.startswith(_FORMER_MAGIC):
            raise ConfigError(
                f"{path}: found an index of the older form (TNTIDX), which is not read here; write the data set again "
                "with Megatron's preprocess_data.py --dataset-impl mmap"
            )
        if not head.startswith(_MAGIC):
            raise damaged(f"found it to begin with {head[:9]!r} and not with {_MAGIC!r}")
        if len(head) < _HEAD.size:
            raise damaged(f"found {len(head)} bytes, which is less than its head")
        _, version, kind, num_sequences, num_bounds = _HEAD.unpack(head)
        if version != _VERSION:
            raise damaged(f"found version {version}, known is {_VERSION}")
        if kind not in dtypes:
            raise damaged(f"found code {kind} for the type of its numbers, known are {', '.join(map(str, dtypes))}")
        expected = _HEAD.size + 12 * num_sequences + 8 * num_bounds
        if length not in (expected, expected + num_sequences):  # with the modes of a multimodal file
            raise damaged(
                f"found {length} bytes, but {counted(num_sequences, 'sequence')} and "
                f"{counted(num_bounds, 'bound')} of documents take {expected}"
            )
        sizes, pointers, bounds = (
            np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)
            for count, dtype in ((num_sequences, "<i4"), (num_sequences, "<i8"), (num_bounds, "<i8"))
        )
    dtype = _dtype_of(kind, sizes, pointers, num_bytes)
    if dtype is None:
        raise damaged(
            f"found code {kind} for the type of its numbers, which is {np.dtype(dtypes[kind][0])} in DeepSpeed and "
            f"{np.dtype(_MEGATRON[kind])} in Megatron, and sequences that fill {path[:-4]}.bin, of {num_bytes} bytes, "
            "in neither"
        )
    bad = (sizes < 0) | (pointers < 0) | (pointers > num_bytes) | (pointers % dtype.itemsize != 0)
    bad |= pointers + sizes.astype(np.int64) * dtype.itemsize > num_bytes  # overflows only for bad pointers
    if bad.any():
        first = int(bad.argmax())
        raise damaged(
            f"found sequence {first} to have {sizes[first]} numbers from byte {pointers[first]} on, but "
            f"{path[:-4]}.bin has {num_bytes} bytes, in numbers of {dtype.itemsize} each"
        )
    if num_bounds and (bounds[0] < 0 or bounds[-1] > num_sequences or (bounds[1:] < bounds[:-1]).any()):
        raise damaged(f"found bounds of documents that do not rise from 0 to {num_sequences}")
    return dtype, sizes, pointers, bounds


def _dtype_of(kind: int, sizes: np.ndarray, pointers: np.ndarray, num_bytes: int) -> np.dtype[Any] | None:
    """Return the dtype of a code. Return None if an ambiguous code fits neither of its two dtypes.

    The codes 6, 7 and 8 are uint16, uint32 and uint64 in DeepSpeed, and double, double and uint16 in Megatron. The two
    dtypes differ in size, and both programs write sequences without gaps, so the byte offsets show which dtype it is.
    """
    dtype: np.dtype[Any] | None = np.dtype(dtypes[kind][0])
    if kind in _MEGATRON:
        lengths = np.diff(pointers, append=num_bytes)  # bytes; hostile offsets wrap and match no dtype
        both = (np.dtype(dtypes[kind][0]), np.dtype(_MEGATRON[kind]))
        dtype = next((each for each in both if (lengths == sizes.astype(np.int64) * each.itemsize).all()), None)
    return dtype.newbyteorder("<") if dtype is not None and sys.byteorder == "big" else dtype


def _is_gapless(dataset: MMapIndexedDataset) -> bool:
    """Return whether the sequences fill the file in order, without gaps."""
    sizes = dataset.sizes.astype(np.int64) * dataset.dtype.itemsize
    ends = np.cumsum(sizes)
    return bool((dataset._pointers == ends - sizes).all()) and int(ends[-1]) == len(dataset._bytes)


def _check_form(asked: str, impl: str) -> None:
    if impl not in ("mmap", "infer"):
        raise ConfigError(f"{asked}: asked for the form {impl!r}; only 'mmap' is here, Megatron's own since 2021")


def _names_of_dtypes() -> str:
    return ", ".join(sorted(np.dtype(kind).name for kind in valid_dtypes))
