"""A `.metadata` that is hostile or damaged: nothing of it reaches the process, and each is refused by name."""

import collections
import pickle
import sys
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint.dcp_file import Box, Metadata, overlapping
from deepspeed.errors import CheckpointError
from torch.distributed.checkpoint import metadata as dcp_classes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROTOCOL, EMPTY_DICT, SET_ITEM, TUPLE_1, TUPLE_2, NONE = b"\x80\x02", b"}", b"s", b"\x85", b"\x86", b"N"
REDUCE, BUILD, STOP = b"R", b"b", b"."


def global_of(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def with_attribute(target, name, value):
    """What `setattr(target, name, value)` is in a pickle."""
    return target + NONE + EMPTY_DICT + text(name) + value + SET_ITEM + TUPLE_2 + BUILD


def attribute_of_path(name):
    """What `getattr(PosixPath, name)` is in a pickle."""
    return global_of("builtins", "getattr") + global_of("pathlib", "PosixPath") + text(name) + TUPLE_2 + REDUCE


CLASS = global_of("collections", "OrderedDict")
ENCODING = "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"


@pytest.mark.parametrize(
    ("content", "look"),
    [
        (with_attribute(global_of("pathlib", "PosixPath"), "is_file", CLASS), lambda: PosixPath.is_file),
        (with_attribute(global_of("pathlib", "PosixPath"), "resolve", CLASS), lambda: PosixPath.resolve),
        (
            with_attribute(global_of("torch.distributed.checkpoint.metadata", "Metadata"), "__init__", CLASS),
            lambda: dcp_classes.Metadata.__init__,
        ),
        (
            with_attribute(global_of("torch.serialization", "_get_layout"), "__defaults__", NONE + TUPLE_1),
            lambda: torch.serialization._get_layout.__defaults__,
        ),
        (
            with_attribute(global_of(*ENCODING) + b"K\x00" + TUPLE_1 + REDUCE, "_name_", text("poison")),
            lambda: dcp_classes._MEM_FORMAT_ENCODING(0).name,
        ),
        (with_attribute(attribute_of_path("resolve"), "a", CLASS), lambda: vars(PosixPath.resolve).copy()),
        (with_attribute(global_of("torch", "float32"), "itemsize", CLASS), lambda: torch.float32.itemsize),
        (with_attribute(global_of("torch", "Size"), "numel", CLASS), lambda: torch.Size.numel),
        (with_attribute(CLASS, "get", CLASS), lambda: collections.OrderedDict.get),
    ],
    ids=["class", "class that checks paths", "class of DCP", "function", "enum", "method", "dtype", "size", "dict"],
)
def test_no_attribute_of_the_process_is_set(tmp_path, content, look):
    (tmp_path / ".metadata").write_bytes(PROTOCOL + content + STOP)
    before = look()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        Metadata.read(tmp_path / ".metadata")
    assert look() == before


def test_enums_as_python_3_11_0_writes_them(tmp_path, monkeypatch):
    """Up to 3.11.3, a member is written as a call of getattr; here the call gives a stand-in."""

    def reduced(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(dcp_classes._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert Metadata.read(tmp_path / ".metadata").tensors["w"].dtype == torch.float32


def test_getattr_gets_nothing(tmp_path):
    """What stands in for it looks at no argument, so that no attribute leads to code."""
    victim = tmp_path / "victim"
    victim.write_text("")
    argument = global_of("pathlib", "PosixPath") + text(str(victim)) + TUPLE_1 + REDUCE
    (tmp_path / ".metadata").write_bytes(PROTOCOL + attribute_of_path("unlink") + argument + TUPLE_1 + REDUCE + STOP)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read.*not callable"):
        Metadata.read(tmp_path / ".metadata")
    assert victim.exists()


def test_no_attribute_of_this_package_is_kept(tmp_path):
    """The classes that stand in for those of a pickle are of one load."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "run", no_dist=True)
    for name in ("Metadata", "TensorProperties", "MetadataIndex"):
        target = global_of("torch.distributed.checkpoint.metadata", name)
        (tmp_path / ".metadata").write_bytes(PROTOCOL + with_attribute(target, "__init__", CLASS) + STOP)
        with pytest.raises(CheckpointError):
            Metadata.read(tmp_path / ".metadata")
        assert set(Metadata.read(tmp_path / "run" / ".metadata").tensors) == {"w"}


@pytest.mark.parametrize("name", ["_inductor", "float32.__class__", "load", "Tensor"])
def test_no_module_is_imported_and_no_other_name_is_given(tmp_path, name):
    modules = set(sys.modules)
    (tmp_path / ".metadata").write_bytes(PROTOCOL + global_of("torch", name) + STOP)
    with pytest.raises(CheckpointError, match="was refused"):
        Metadata.read(tmp_path / ".metadata")
    assert set(sys.modules) == modules


def without_offset(found):
    next(iter(found.storage_data.values())).offset = -1


def outside(found):
    found.state_dict_metadata["w"].chunks[0].offsets = torch.Size([1])


def of_text(found):
    found.state_dict_metadata["w"].size = "two"


def of_no_dtype(found):
    found.state_dict_metadata["w"].properties.dtype = "float32"


def without_path(found):
    found.planner_data["w"] = ()


def without_places(found):
    found.storage_data = None


@pytest.mark.parametrize("change", [without_offset, outside, of_text, of_no_dtype, without_path, without_places])
def test_what_makes_no_sense_is_damage(tmp_path, change):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(found)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read.*it is damaged"):
        Metadata.read(tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("boxes", "shares"),
    [
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (1, 4))], False),
        ([((0, 0), (3, 2)), ((1, 2), (1, 2)), ((2, 1), (1, 3))], True),
        ([((0, 0), (3, 2)), ((1, 1), (0, 3))], False),
        ([((), ()), ((), ())], True),
    ],
    ids=["side by side", "behind one beside it", "empty", "twice one number"],
)
def test_pieces_that_have_elements_in_common(boxes, shares):
    assert bool(overlapping([Box(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes])) is shares
