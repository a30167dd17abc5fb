"""Megatron's indexed data sets: what is written is read, and a hostile index ends in an error and no read outside."""

import itertools
import pickle
import struct

import numpy as np
import pytest
import torch
from deepspeed.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    as_dtype,
    best_fitting_dtype,
    code,
    dataset_exists,
    find_fit_int_dtype,
    infer_dataset_impl,
    make_builder,
    make_dataset,
)
from deepspeed.errors import ConfigError

HEAD = struct.Struct("<9sQBQQ")
DOCUMENTS = [[[1, 2, 3], [4]], [[], [5, 6]]]  # sequences by document


@pytest.fixture
def write(tmp_path):
    def write(documents=DOCUMENTS, name="tokens", dtype=np.int32):
        builder = MMapIndexedDatasetBuilder(tmp_path / f"{name}.bin", dtype)
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64))
            builder.end_document()
        builder.finalize(tmp_path / f"{name}.idx")
        return str(tmp_path / name)

    return write


def sequences(dataset):
    return [each.tolist() for each in dataset]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64, np.uint32, np.uint64])
def test_what_is_written_is_read(write, dtype):
    dataset = MMapIndexedDataset(write(dtype=dtype))
    assert sequences(dataset) == list(itertools.chain(*DOCUMENTS))
    assert dataset.dtype == dtype
    assert dataset.sizes.tolist() == [3, 1, 0, 2]
    assert dataset.doc_idx.tolist() == [0, 2, 4]
    assert (len(dataset), dataset.size(0), dataset.supports_prefetch) == (4, 3, False)


def test_the_bytes_are_megatrons(write):
    """By the layout that the documentation of Megatron Core gives."""
    path = write()
    with open(f"{path}.idx", "rb") as file:
        index = file.read()
    head = HEAD.pack(b"MMIDIDX\x00\x00", 1, 4, 4, 3)
    assert index == head + struct.pack("<4i", 3, 1, 0, 2) + struct.pack("<4q3q", 0, 12, 16, 16, 0, 2, 4)
    with open(f"{path}.bin", "rb") as file:
        assert file.read() == struct.pack("<6i", 1, 2, 3, 4, 5, 6)


def test_parts(write):
    dataset = MMapIndexedDataset(write())
    assert dataset[-1].tolist() == [5, 6]
    assert dataset[np.int64(1)].tolist() == [4]
    assert [each.tolist() for each in dataset[1:4]] == [[4], [], [5, 6]]
    assert dataset.get(0, offset=1).tolist() == [2, 3]
    assert dataset.get(0, offset=1, length=1).tolist() == [2]
    assert dataset.get(0, offset=3).tolist() == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda dataset: dataset[4], "asked for sequence 4 of 4"),
        (lambda dataset: dataset[-5], "asked for sequence -5 of 4"),
        (lambda dataset: dataset.get(0, length=4), "asked for 4 numbers after 0 of sequence 0, which has 3"),
        (lambda dataset: dataset.get(1, offset=2), "asked for -1 numbers after 2 of sequence 1, which has 1"),
        (lambda dataset: dataset.get(1, offset=-1), "asked for 2 numbers after -1"),
    ],
)
def test_no_number_of_another_sequence_is_given(write, ask, message):
    with pytest.raises(IndexError, match=message):
        ask(MMapIndexedDataset(write()))


def test_a_worker_of_a_loader_maps_the_file_itself(write):
    dataset = pickle.loads(pickle.dumps(MMapIndexedDataset(write())))
    assert sequences(dataset) == [[1, 2, 3], [4], [], [5, 6]]


def test_merge_appends_sequences_and_documents(write, tmp_path):
    other = write([[[7, 8]], [[9]]], name="other")
    builder = make_builder(tmp_path / "both.bin")
    builder.add_item([1, 2])
    builder.end_document()
    builder.merge_file_(other)
    builder.finalize(tmp_path / "both.idx")
    both = make_dataset(tmp_path / "both")
    assert sequences(both) == [[1, 2], [7, 8], [9]]
    assert both.doc_idx.tolist() == [0, 1, 2, 3]
    builder = make_builder(tmp_path / "third.bin", vocab_size=100)
    with pytest.raises(ValueError, match="found dtype int32 in .*other, but this one writes uint16"):
        builder.merge_file_(other)
    builder.finalize(tmp_path / "third.idx")


def test_a_file_with_gaps_is_merged_by_its_sequences(write, tmp_path):
    path = write([[[1, 2, 3], [4]]])
    patch(path, HEAD.size + 8, struct.pack("<2q", 8, 0))  # pointers: [3, 4?], so give the second room
    patch(path, HEAD.size, struct.pack("<2i", 2, 1))
    builder = MMapIndexedDatasetBuilder(tmp_path / "both.bin", np.int32)
    builder.merge_file_(path)
    builder.finalize(tmp_path / "both.idx")
    assert sequences(MMapIndexedDataset(tmp_path / "both")) == [[3, 4], [1]]


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "tokens.bin", np.uint16)
    with pytest.raises(ValueError, match="found numbers from -1 to 70000, which dtype uint16 does not hold"):
        builder.add_item([-1, 70000])
    builder.add_item([65535])
    builder.finalize(tmp_path / "tokens.idx")
    assert sequences(MMapIndexedDataset(tmp_path / "tokens")) == [[65535]]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([-100], np.int16), np.uint16),
        (np.array([40000], np.uint16), np.int16),
        (np.array([-1], np.int64), np.uint64),
        (np.array([2**63], np.uint64), np.int64),
        (np.array([2.0**64]), np.uint64),
        (np.array([np.nan]), np.int32),
        (np.array([0.5]), np.int32),
    ],
)
def test_numbers_that_wrap_into_a_type_are_refused(given, dtype):
    with pytest.raises(ValueError, match=f"which dtype {np.dtype(dtype)} does not hold"):
        as_dtype(given, dtype)
    assert as_dtype(np.array([], given.dtype), dtype).tolist() == []


def test_nothing_at_all_is_a_data_set(write):
    dataset = MMapIndexedDataset(write([]))
    assert (len(dataset), dataset.doc_idx.tolist()) == (0, [0])


def test_types():
    assert [best_fitting_dtype(size) for size in (None, 65499, 65500)] == [np.int32, np.uint16, np.int32]
    assert [code(dtype) for dtype in (np.uint8, np.int64, np.uint16)] == [1, 5, 6]
    with pytest.raises(ValueError, match="found dtype complex64; choose one of int16, int32"):
        code(np.complex64)
    ranges = [(0, 255), (0, 256), (0, 2**32), (-1, 127), (-129, 0), (-1, 2**31)]
    names = [find_fit_int_dtype(*each).__name__ for each in ranges]
    assert names == ["uint8", "uint16", "uint64", "int8", "int16", "int64"]
    with pytest.raises(ValueError, match="found -1 to 9223372036854775808"):
        find_fit_int_dtype(-1, 2**63)


@pytest.mark.parametrize(("kind", "dtype"), [(6, np.float64), (7, np.float64), (8, np.uint16)])
@pytest.mark.parametrize("num", [1, 3])
def test_types_of_megatron_that_deepspeed_numbers_otherwise(tmp_path, kind, dtype, num):
    numbers = np.arange(num, dtype=dtype)
    (tmp_path / "f.bin").write_bytes(numbers.tobytes())
    index = HEAD.pack(b"MMIDIDX\x00\x00", 1, kind, 1, 2) + struct.pack("<iq2q", num, 0, 0, 1)
    (tmp_path / "f.idx").write_bytes(index)
    assert sequences(MMapIndexedDataset(tmp_path / "f")) == [numbers.tolist()]


def test_a_type_of_two_meanings_is_decided_by_the_places(tmp_path):
    """DeepSpeed's uint64 and Megatron's uint16 have one code. Sizes alone would say uint16 of a damaged file."""
    write_index(tmp_path, 8, [3, 1], [0, 24], bytes(32))
    assert MMapIndexedDataset(tmp_path / "f").dtype == np.uint64
    write_index(tmp_path, 8, [3, 1], [0, 6], bytes(8))
    assert MMapIndexedDataset(tmp_path / "f").dtype == np.uint16
    for pointers, num_bytes in (([0, 24], 8), ([0, 6], 32), ([0, 24], 31), ([0, 5], 8)):
        write_index(tmp_path, 8, [3, 1], pointers, bytes(num_bytes))
        with pytest.raises(ConfigError, match="code 8 .* which is uint64 in DeepSpeed and uint16 in Megatron"):
            MMapIndexedDataset(tmp_path / "f")


def write_index(folder, kind, sizes, pointers, numbers):
    (folder / "f.bin").write_bytes(numbers)
    count = len(sizes)
    index = HEAD.pack(b"MMIDIDX\x00\x00", 1, kind, count, 2)
    (folder / "f.idx").write_bytes(index + struct.pack(f"<{count}i{count}q2q", *sizes, *pointers, 0, count))


def test_an_index_with_modes_is_read(write):
    path = write()
    with open(f"{path}.idx", "ab") as file:
        file.write(bytes(4))
    assert sequences(MMapIndexedDataset(path))[0] == [1, 2, 3]


# ---- hostile files ------------------------------------------------------------------------------------------------


def patch(path, place, new):
    with open(f"{path}.idx", "r+b") as file:
        file.seek(place)
        file.write(new)


HUGE = struct.pack("<Q", 2**62)
HOSTILE = {
    "another magic": (0, b"NOTANIDX", r"found it to begin with b'NOTANIDX"),
    "another version": (9, struct.pack("<Q", 2), "found version 2, known is 1"),
    "an unknown type": (17, b"\xff", "found code 255 for the type"),
    "many sequences": (18, HUGE, "4611686018427387904 sequences and 3 bounds of documents take 55340232221128654"),
    "many documents": (26, HUGE, "4611686018427387904 bounds"),
    "a sequence too few": (18, struct.pack("<Q", 3), "3 sequences and 3 bounds of documents take 94"),
    "a negative size": (34, struct.pack("<i", -1), "found sequence 0 to have -1 numbers from byte 0 on"),
    "a size beyond the end": (34, struct.pack("<i", 2**31 - 1), "found sequence 0 to have 2147483647 numbers"),
    "a negative pointer": (50, struct.pack("<q", -8), "from byte -8 on, but .*tokens.bin has 24 bytes"),
    "a pointer into a number": (50, struct.pack("<q", 1), "from byte 1 on, but .* in numbers of 4 each"),
    "a pointer beyond the end": (74, struct.pack("<q", 20), "found sequence 3 to have 2 numbers from byte 20 on"),
    "a pointer that wraps": (74, struct.pack("<q", 2**63 - 1), "found sequence 3 to have 2 numbers from byte 92233720"),
    "documents that fall": (90, struct.pack("<q", 5), "bounds of documents that do not rise from 0 to 4"),
    "documents whose differences wrap": (
        82,
        struct.pack("<3q", 6, 5 - 2**63, 4),
        "bounds of documents that do not rise from 0 to 4",
    ),
    "a document beyond the end": (98, struct.pack("<q", 9), "bounds of documents that do not rise from 0 to 4"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_index(write, kind):
    place, new, message = HOSTILE[kind]
    path = write()
    patch(path, place, new)
    with pytest.raises(ConfigError, match=rf"tokens\.idx is damaged, or is no index of Megatron's: .*{message}"):
        MMapIndexedDataset(path)


def test_an_index_cut_off_anywhere(write):
    path = write()
    with open(f"{path}.idx", "rb") as file:
        whole = file.read()
    for length in range(len(whole)):
        with open(f"{path}.idx", "wb") as file:
            file.write(whole[:length])
        with pytest.raises(ConfigError, match="tokens.idx is damaged"):
            MMapIndexedDataset(path)


def test_numbers_that_are_cut_off(write):
    path = write()
    with open(f"{path}.bin", "r+b") as file:
        file.truncate(23)
    with pytest.raises(ConfigError, match="found sequence 3 to have 2 numbers from byte 16 on, but .* has 23 bytes"):
        MMapIndexedDataset(path)


def test_what_is_missing_or_older(write, tmp_path):
    path = write()
    assert dataset_exists(path)
    assert infer_dataset_impl(path) == "mmap"
    with pytest.raises(ConfigError, match="found no file .*nothing.idx; give the path of both without"):
        make_dataset(tmp_path / "nothing")
    patch(path, 0, b"TNTIDX\x00\x00")
    assert infer_dataset_impl(path) == "cached"
    with pytest.raises(ConfigError, match="found an index of the older form"):
        make_dataset(path, "infer")
    with pytest.raises(ConfigError, match="make_dataset: asked for the form 'lazy'; only 'mmap'"):
        make_dataset(path, "lazy")
