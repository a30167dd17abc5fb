"""Marks of leaf modules: by class, by name, taken back, and what is not found."""

import pytest
import torch
from deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(2, 2)


def make():
    return torch.nn.Sequential(Experts(), torch.nn.ReLU(), Experts())


@pytest.mark.parametrize("wanted", [Experts, "Experts", f"{Experts.__module__}.Experts"])
def test_mark_and_take_back(wanted):
    model = make()
    assert set_z3_leaf_modules(model, [wanted]) == [model[0], model[2]]
    assert get_z3_leaf_modules(model) == [model[0], model[2]]
    assert z3_leaf_module(model[0])
    assert not z3_leaf_module(model[1])
    assert unset_z3_leaf_modules(model, [wanted]) == [model[0], model[2]]
    assert get_z3_leaf_modules(model) == []


def test_one_module():
    model = make()
    set_z3_leaf_module(model[1], True)
    assert get_z3_leaf_modules(model) == [model[1]]
    assert not z3_leaf_parameter(model[0].one.weight)


def test_a_class_without_module():
    model = make()
    with pytest.raises(ValueError, match="found no module of class Conv2d in Sequential"):
        set_z3_leaf_modules(model, [Experts, torch.nn.Conv2d])
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, [torch.nn.Conv2d], raise_if_not_found=False) == []


@pytest.mark.parametrize("wrong", ["Experts", Experts])
def test_the_classes_come_in_a_list(wrong):
    with pytest.raises(TypeError, match="wanted a list of classes"):
        set_z3_leaf_modules(make(), wrong)


def test_what_is_no_class():
    with pytest.raises(TypeError, match="leaf_module_classes: found 3 in it, wanted classes or their names"):
        set_z3_leaf_modules(make(), [3])


def test_marks_by_name_and_by_suffix():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.ModuleDict({"experts": torch.nn.Linear(1, 1)}), "b": torch.nn.Linear(1, 1)}
    )
    assert set_z3_leaf_modules_by_name(model, ["b"]) == [model["b"]]
    assert set_z3_leaf_modules_by_suffix(model, ["experts"]) == [model["a"]["experts"]]
    assert get_z3_leaf_modules(model) == [model["a"]["experts"], model["b"]]
    set_z3_leaf_modules_by_name(model, ["b"], flag=False)
    assert get_z3_leaf_modules(model) == [model["a"]["experts"]]
    assert set_z3_leaf_modules_by_name(model, ["c"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="found no module c in ModuleDict"):
        set_z3_leaf_modules_by_name(model, ["c"])
    with pytest.raises(TypeError, match="found str, wanted a list of names"):
        set_z3_leaf_modules_by_suffix(model, "experts")
