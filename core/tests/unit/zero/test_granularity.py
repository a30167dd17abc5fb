"""Which modules become units: every parameter in one of them, small modules whole, large ones divided."""

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.zero.module_units import divide
from torch import nn


class Block(nn.Module):
    """Of 12 elements: a scale of 2 and two layers of 4, and a norm of 2."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.up = nn.Linear(2, 2, bias=False)
        self.down = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)

    def forward(self, x):
        return self.norm(self.down(self.up(x * self.scale)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 2)  # 16
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 8, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def everything(param):
    return True


def names_of(units):
    return [unit.name for unit in units]


@pytest.mark.parametrize("max_numel", [0, 2, 4, 11, 12, 24, 10**9])
@pytest.mark.parametrize("min_granularity", [0, 3, 10**9])
def test_every_wanted_parameter_is_in_one_unit(max_numel, min_granularity):
    net = Net()
    wanted = {param for param in net.parameters() if param.numel() > 2}
    units = divide(net, wanted.__contains__, max_numel=max_numel, min_granularity=min_granularity)
    found = [named for unit in units for named in unit.params]
    assert sorted(found, key=str) == sorted(
        ((name, param) for name, param in net.named_parameters() if param in wanted), key=str
    )
    assert all(unit.params for unit in units)
    assert all(net.get_submodule(unit.name) is unit.module for unit in units)


@pytest.mark.parametrize(
    ("max_numel", "names"),
    [
        (16, ["embedding", "blocks.0", "blocks.1"]),
        (12, ["embedding", "blocks.0", "blocks.1"]),  # a single module of more elements is a unit all the same
        (11, ["embedding", *(f"blocks.{i}{each}" for i in (0, 1) for each in ("", ".up", ".down", ".norm"))]),
    ],
)
def test_a_module_that_is_small_enough_is_one_unit(max_numel, names):
    units = divide(Net(), everything, max_numel=max_numel)
    assert names_of(units) == names
    assert [name for name, _ in units[1].params] == (
        ["blocks.0.scale"] + ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.0.norm.weight"] * (max_numel > 11)
    ), "of a divided module what it owns itself"


def test_neither_the_root_nor_a_list_is_one_unit_however_small():
    names = names_of(divide(Net(), everything, max_numel=10**9))
    assert names == ["embedding", "blocks.0", "blocks.1"], "no hook on a list would run, and the root is always used"


def test_a_tied_parameter_is_in_the_first_module_that_has_it():
    net = Net()
    units = divide(net, everything, max_numel=12)
    assert [unit.name for unit in units for _, param in unit.params if param is net.head.weight] == ["embedding"]


def test_a_leaf_module_is_never_divided():
    net = Net()
    set_z3_leaf_modules(net, [Block])
    assert names_of(divide(net, everything, max_numel=0)) == ["embedding", "blocks.0", "blocks.1"]
    set_z3_leaf_modules(net, [Net])
    assert names_of(divide(net, everything, max_numel=0)) == [""]


@pytest.mark.parametrize(("min_granularity", "is_divided"), [(3, True), (4, False)])
def test_a_module_of_many_small_ones_is_not_divided(min_granularity, is_divided):
    net = nn.Sequential(Block())  # 12 elements in 4 modules
    names = names_of(divide(net, everything, max_numel=0, min_granularity=min_granularity))
    assert ("0.up" in names) is is_divided


def test_modules_without_wanted_parameters_are_no_units():
    assert divide(Net(), lambda param: False, max_numel=0) == []
