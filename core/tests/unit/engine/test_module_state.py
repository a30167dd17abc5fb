"""What is compared before a module's weights are loaded is what `load_state_dict` would refuse, and no more."""

import copy

import pytest
import torch
from deepspeed.engine.training_state import check_module_state
from deepspeed.errors import CheckpointError
from torch import nn


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


class Translating(nn.Linear):
    """Takes weights under their old name."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "w" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
        super()._load_from_state_dict(state_dict, prefix, *args)


def rename(module, state_dict, prefix, *args):
    if prefix + "w" in state_dict:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")


def create_hooked():
    layer = nn.Linear(2, 2, bias=False)
    layer.register_load_state_dict_pre_hook(rename)
    return layer


def create_forgiving():
    layer = nn.Linear(2, 2, bias=False)
    layer.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.clear())
    return layer


class OwnLoad(nn.Linear):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({"weight": state_dict["w"]}, strict, assign)


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


def lacking(state, name):
    """With the versions of the modules, other than `without`."""
    del state[name]
    return state


def create_tied():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return nn.Sequential(first, second, first)


def create_scalar():
    module = nn.Module()
    module.gain = nn.Parameter(torch.tensor(1.0))
    module.register_buffer("passing", torch.ones(3), persistent=False)
    return module


W = torch.ones(2, 2)
CASES = {
    "same": (create_tied, lambda state: state, True),
    "extra state": (lambda: nn.Sequential(WithExtra(2, 2)), lambda state: state, True),
    "no extra state": (lambda: WithExtra(2, 2), lambda state: without(state, "_extra_state"), True),
    "extra state nobody takes": (lambda: nn.Linear(2, 2), lambda state: {**state, "_extra_state": 1}, True),
    "missing": (lambda: nn.Linear(2, 2), lambda state: without(state, "bias"), True),
    "missing, allowed": (lambda: nn.Linear(2, 2), lambda state: without(state, "bias"), False),
    "foreign": (lambda: nn.Linear(2, 2), lambda state: {**state, "w": W}, True),
    "foreign, allowed": (lambda: nn.Linear(2, 2), lambda state: {**state, "w": W}, False),
    "shape": (lambda: nn.Linear(2, 2), lambda state: {**state, "weight": torch.ones(2, 3)}, False),
    "no tensor": (lambda: nn.Linear(2, 2), lambda state: {**state, "weight": [1.0]}, False),
    "one element for a scalar": (create_scalar, lambda state: {"gain": torch.ones(1)}, True),
    "a matrix for a scalar": (create_scalar, lambda state: {"gain": torch.ones(1, 1)}, True),
    "a buffer that is not saved": (create_scalar, lambda state: {**state, "passing": torch.ones(3)}, True),
    "an old batch norm": (lambda: nn.BatchNorm1d(2), lambda state: without(state, "num_batches_tracked"), True),
    "a batch norm without count": (
        lambda: nn.BatchNorm1d(2),
        lambda state: lacking(state, "num_batches_tracked"),
        True,
    ),
    "a batch norm without mean": (lambda: nn.BatchNorm1d(2), lambda state: without(state, "running_mean"), True),
    "an old norm below": (
        lambda: nn.Sequential(nn.BatchNorm1d(2)),
        lambda state: without(state, "0.num_batches_tracked"),
        True,
    ),
    "a norm without weight": (
        lambda: nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)),
        lambda state: lacking(state, "0.weight"),
        True,
    ),
    "a batch norm of another width": (lambda: nn.BatchNorm1d(2), lambda state: nn.BatchNorm1d(3).state_dict(), True),
    "own translation": (lambda: nn.Sequential(Translating(2, 2, bias=False)), lambda state: {"0.w": W}, True),
    "a hook that translates": (lambda: nn.Sequential(create_hooked()), lambda state: {"0.w": W}, True),
    "a hook that forgives": (create_forgiving, lambda state: {**state, "w": W}, True),
    "own load": (lambda: OwnLoad(2, 2, bias=False), lambda state: {"w": W}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_it_refuses_what_load_state_dict_refuses(case):
    create, change, strict = CASES[case]
    state = change(create().state_dict())
    found = wanted = True
    try:
        check_module_state(create(), copy.copy(state), strict=strict, source="there")
    except CheckpointError:
        found = False
    try:
        create().load_state_dict(copy.copy(state), strict=strict)
    except RuntimeError:
        wanted = False
    assert found is wanted


def test_below_a_module_that_translates_all_is_left_to_it_and_nothing_else():
    model = nn.Sequential(Translating(2, 2, bias=False), nn.Linear(2, 2))
    state = {"0.w": W, "1.weight": torch.ones(2, 3), "1.bias": torch.ones(2)}
    with pytest.raises(
        CheckpointError, match=r"^there: the weights .*model: 1\.weight is \(2, 3\) there and \(2, 2\) in "
    ):
        check_module_state(model, state, strict=True, source="there")


def test_many_faults_are_counted():
    with pytest.raises(CheckpointError, match=r"missing there and 4 more\. Nothing was loaded"):
        check_module_state(nn.Sequential(*[nn.Linear(1, 1) for _ in range(5)]), {}, strict=True, source="there")


def test_weights_without_the_frozen_ones_are_those_of_a_save_that_left_them_out():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    state = lacking(lacking(model.state_dict(), "0.weight"), "0.bias")
    message = (
        r"^there: the frozen parameters 0\.weight, 0\.bias are missing there, as after a save with "
        r"exclude_frozen_parameters=True\. Nothing was loaded; say strict=False \(load_module_strict\) to keep"
    )
    with pytest.raises(CheckpointError, match=message):
        check_module_state(model, state, strict=True, source="there")
    with pytest.raises(CheckpointError, match=r"^there: the weights are of another model: 0\.weight is missing there"):
        check_module_state(model, lacking(state, "1.bias"), strict=True, source="there")
