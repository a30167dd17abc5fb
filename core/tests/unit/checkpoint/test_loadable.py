"""Only what loads again with weights_only may be saved."""

import argparse
import collections
import enum
import io
import pathlib

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.save import make_loadable
from deepspeed.errors import ConfigError


def reload(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Colour(enum.IntEnum):
    RED = 1


def test_plain_values_pass_untouched_and_load_again():
    state = {
        "a": [1, 2.5, None, True, "x", b"y", (1j,)],
        3: collections.OrderedDict(t=torch.ones(2, dtype=torch.bfloat16)),
        "kinds": {torch.float16, torch.int8},
        "shape": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "count": collections.Counter("aab"),
    }
    assert make_loadable(state, "state") is state
    loaded = reload(state)
    assert loaded["shape"] == torch.Size([2, 3])
    assert isinstance(loaded["shape"], torch.Size)
    assert loaded["count"] == collections.Counter("aab")


def test_equal_plain_values_take_the_place_of_what_would_not_load():
    state = {
        "loss": np.float64(0.5),
        np.int64(4): [np.float32(1.5), {np.int32(2)}],
        "nested": collections.defaultdict(list, {"a": [np.bool_(True)]}),
    }
    loaded = reload(make_loadable(state, "client_state"))
    assert loaded == {"loss": 0.5, 4: [1.5, {2}], "nested": {"a": [True]}}
    assert type(loaded["loss"]) is float
    assert type(next(iter(loaded["nested"]["a"]))) is bool
    assert isinstance(state["loss"], np.float64), "the user's own dict is left as it was"


def test_a_module_state_dict_keeps_its_metadata_when_rebuilt():
    state = torch.nn.Linear(2, 2).state_dict()
    state["extra"] = np.float32(2.0)
    changed = make_loadable(state, "module")
    assert changed._metadata == state._metadata
    assert reload(changed)._metadata == state._metadata


def test_attributes_of_tensors_are_left_behind():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.hook = lambda: None
    loaded = reload(make_loadable({"p": parameter}, "state"))
    assert torch.equal(loaded["p"], torch.ones(2))
    assert make_loadable([parameter], "x")[0].data_ptr() == parameter.data_ptr(), "no copy is made"


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (argparse.Namespace(a=1), "argparse.Namespace"),
        (np.zeros(2), "numpy.ndarray"),
        (Colour.RED, "Colour"),
        (pathlib.PurePosixPath("x"), "pathlib.PurePosixPath"),
        (lambda: None, "function"),
        (range(3), "range"),
    ],
)
def test_other_objects_are_refused_by_place_and_type(value, type_name):
    with pytest.raises(ConfigError) as caught:
        make_loadable({"args": [0, {"deep": value}]}, "client_state")
    assert "client_state['args'][1]['deep'] is a " in str(caught.value)
    assert type_name in str(caught.value)
    assert "add_safe_globals" in str(caught.value)


def test_many_offenders_make_one_short_message():
    with pytest.raises(ConfigError, match="and 3 more"):
        make_loadable([range(i) for i in range(8)], "client_state")


def test_an_object_as_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"the key .* of client_state"):
        make_loadable({pathlib.PurePosixPath("x"): 1}, "client_state")


def test_what_the_user_admitted_passes():
    with torch.serialization.safe_globals([argparse.Namespace]):
        make_loadable({"args": argparse.Namespace(a=1)}, "client_state")


def test_shared_and_cyclic_containers_end():
    shared = [1]
    loop = {"a": shared, "b": shared}
    loop["self"] = loop
    assert make_loadable(loop, "state") is loop
