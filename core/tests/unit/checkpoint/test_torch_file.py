"""What is in a file of `torch.save`: every tensor that torch loads from it, at the byte where it is."""

import collections
import io
import os

import pytest
import torch
from deepspeed.checkpoint.tensor_index import MemoryFile, TorchFile
from torch import Tensor


class Runs:
    """Would run code where a pickle is loaded as torch once did."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/was-run",)


def tensors_of(value, key=()):
    if isinstance(value, Tensor):
        return {key: value} if value.numel() else {}
    found = {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in items:
        found.update(tensors_of(item, (*key, name)))
    return found


def bytes_of(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


base = torch.arange(24.0).view(4, 6)
module_state = torch.nn.Linear(3, 2).state_dict()  # an OrderedDict with an attribute
STATE = {
    "module": module_state,
    "dtypes": [
        torch.arange(5).to(getattr(torch, name))
        for name in (
            *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
            *("complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
        )
    ],
    "views": {"rows": base[1:3], "column": base[:, 1], "turned": base.T, "one": base[2:3, 4:5], "scalar": base[3, 3]},
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "rest": (1, "text", None, {1, 2}, torch.Size([2, 3]), {3: torch.zeros(1)}, collections.defaultdict(list, a=[1])),
}
STATE["again"] = STATE["dtypes"]
STATE["itself"] = [STATE["rest"]]


@pytest.fixture(params=["file", "memory"])
def saved(request, tmp_path):
    """The content of the file, and what was read of it from the disk or from memory."""
    torch.save(STATE, tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    if request.param == "memory":
        return content, TorchFile.read(MemoryFile(memoryview(content)))
    with open(tmp_path / "f", "rb") as file:
        return content, TorchFile.read(file)


def test_each_tensor_is_where_it_is_said_to_be(saved):
    content, found = saved
    records, expected = found.tensors(), tensors_of(STATE)
    assert list(records) == list(expected)
    for key, tensor in expected.items():
        record = records[key]
        assert (record.dtype, record.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), key
        assert record.stride == (None if tensor.is_contiguous() else tensor.stride()), key
        if record.stride is None:
            assert content[record.offset :][: tensor.nbytes] == bytes_of(tensor), key
        else:
            first = tensor[(0,) * tensor.dim()].reshape(1)
            assert content[record.offset :][: tensor.itemsize] == bytes_of(first), key


def test_plain_values_are_as_they_were(saved):
    rest = saved[1].value["rest"]
    assert rest[:5] == (1, "text", None, {1, 2}, (2, 3))
    assert rest[6] == {"a": [1]}
    assert saved[1].value["empty"].shape == (0, 3)


def test_no_code_is_run_and_its_object_is_opaque():
    buffer = io.BytesIO()
    torch.save({"code": Runs(), "w": torch.ones(2), "sparse": torch.eye(2).to_sparse()}, buffer)
    found = TorchFile.read(buffer)
    assert not os.path.exists("/tmp/was-run")
    assert list(found.tensors()) == [("w",)]


def test_a_container_that_holds_itself_is_walked_once():
    itself = {"w": torch.ones(2)}
    itself["loop"] = itself
    buffer = io.BytesIO()
    torch.save(itself, buffer)
    assert list(TorchFile.read(buffer).tensors()) == [("w",)]


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_another_kind_of_file_is_not_read(content):
    assert TorchFile.read(io.BytesIO(content)) is None
