"""Every member and argument of DeepSpeed's public classes and functions: it is here, or in the table with its reason.

Beside the names of `test_names.py`; the table is `deepspeed.compatibility.differences`, which compatibility.md shows.
"""

import ast
import functools
import importlib
import inspect
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from deepspeed._absent import is_absent
from deepspeed.compatibility import ENGINE_METHODS, differences
from deepspeed.errors import AbsentMemberError
from pydantic import BaseModel

DETAILS = json.loads((Path(__file__).parent / "deepspeed_names.json").read_text(encoding="utf-8"))
LOGGED = {"prof", "log_name", "debug"}  # which `comm.record.recorded` takes of every operation


def found_differences():
    """ "module:Class" or "module:Class.method" or "module:function" -> members or arguments that are not here."""
    found = {}
    for version in DETAILS.values():
        for module, names in version["modules"].items():
            for name, detail in names.items():
                thing = getattr(importlib.import_module(module), name)
                if is_absent(thing):
                    continue
                address = f"{module}:{name}".removeprefix("deepspeed.")
                functions = {address: detail}
                if isinstance(detail, dict):
                    found.setdefault(address, set()).update(missing_members(thing, detail))
                    present = {member: arguments for member, arguments in detail.items() if hasattr(thing, member)}
                    functions = {f"{address}.{member}": arguments for member, arguments in present.items() if arguments}
                for where, arguments in functions.items():
                    member = where.partition(":")[2].partition(".")[2]
                    function = thing if member in ("", "__init__") else getattr(thing, member)
                    found.setdefault(where, set()).update(missing_arguments(function, arguments))
    return {where: sorted(names) for where, names in found.items() if names}


# What torch's classes, from which ours are, give to themselves.
BY_TORCH = {
    torch.distributed.P2POp: {"group", "op", "peer", "tag", "tensor"},
    torch.nn.BatchNorm2d: {"bias", "running_mean", "running_var", "weight"},
    torch.nn.Conv2d: {"bias", "weight"},
    torch.nn.Embedding: {"weight"},
    torch.nn.Linear: {"bias", "weight"},
}


def missing_members(cls, members):
    declared = {*getattr(cls, "model_fields", ()), *getattr(cls, "__annotations__", ()), *attributes(cls)}
    for base, given in BY_TORCH.items():
        declared |= given if issubclass(cls, base) else set()
    return {name for name in members if not hasattr(cls, name) and name not in declared} - {*ENGINE_METHODS, "__init__"}


def attributes(cls):
    """Names that the methods of a class of ours, or of its bases here, give to `self`."""
    for base in inspect.getmro(cls) if isinstance(cls, type) else ():
        for part in ast.walk(class_source(base)):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if isinstance(part.value, ast.Name) and part.value.id == "self":
                    yield part.attr
            elif isinstance(part, ast.Call) and ast.unparse(part.func) == "self.__dict__.update":
                yield from (word.arg for word in part.keywords)


@functools.cache
def class_source(cls):
    """The syntax tree of a class that a file of ours defines; an empty one of any other."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    found = []
    if file and cls.__module__.startswith("deepspeed."):
        tree = parsed(file)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return found[0] if found else ast.Module([], [])


@functools.cache
def parsed(file):
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def missing_arguments(function, arguments):
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return set()
    taken = {*parameters, "self", "cls", *(LOGGED if hasattr(function, "__wrapped__") else ())}
    return {name for name, _ in arguments if name not in taken and not name.startswith("*")}


# Defaults that are others here, with the same meaning, or none for what the engine makes.
OTHER_DEFAULTS = {
    "moe.layer:MoE.set_deepspeed_parallelism": {"use_data_before_expert_parallel_"},  # None: as the configuration says
    "runtime.data_pipeline.data_sampling.data_analyzer:DistributedDataAnalyzer.__init__": {"device"},  # not needed
    "runtime.engine:DeepSpeedEngine.__init__": {"config"},
    "runtime.engine:DeepSpeedEngine.deepspeed_io": {"num_local_io_workers"},  # 0: the training process loads
    # True there, and without effect
    **{
        f"runtime.fp16.onebit.{name}.__init__": {"bias_correction"}
        for name in ("adam:OnebitAdam", "lamb:OnebitLamb", "zoadam:ZeroOneAdam")
    },
}


def functions_here():
    """(address, function here, arguments of DeepSpeed 0.19.6 as [name, source of the default])."""
    for module, names in DETAILS["0.19.6"]["modules"].items():
        for name, detail in names.items():
            thing = getattr(importlib.import_module(module), name)
            if is_absent(thing):
                continue
            address = f"{module}:{name}".removeprefix("deepspeed.")
            if not isinstance(detail, dict):
                yield address, thing, detail or ()
                continue
            for member, arguments in detail.items():
                function = thing if member == "__init__" else getattr(thing, member, None)
                if arguments and callable(function):
                    yield f"{address}.{member}", function, arguments


def other_defaults(function, arguments):
    """Arguments whose default in DeepSpeed is a plain value, and is another or not there here."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    found = set()
    for name, source in arguments:
        if name not in parameters or not source:
            continue
        try:
            theirs = ast.literal_eval(source)
        except ValueError:
            continue
        ours = parameters[name].default
        is_empty = ours is None and theirs in ({}, [])
        if not (is_empty or ours == theirs or (isinstance(ours, tuple) and list(ours) == theirs)):
            found.add(name)
    return found


def test_defaults_of_arguments_are_deepspeeds():
    found = {where: other_defaults(function, arguments) for where, function, arguments in functions_here()}
    assert {where: names for where, names in found.items() if names} == OTHER_DEFAULTS


# Arguments that stand elsewhere here, so that a call by position gives another one.
OTHER_POSITIONS = {
    "moe.sharded_moe:MOELayer.__init__": {"ep_size"},  # made by `MoE`
    "moe.sharded_moe:top1gating": {"use_tutel"},  # by name only: `sparse_routes`, before it, is not here
    "runtime.dataloader:DeepSpeedDataLoader.__init__": {"pin_memory", "collate_fn", "data_sampler"},  # by name only
    "runtime.engine:DeepSpeedEngine.__init__": {"config"},  # made by `initialize`
    "runtime.fp16.onebit.lamb:OnebitLamb.__init__": {  # by name only
        *("coeff_beta", "factor_max", "factor_min", "factor_threshold"),
    },
    "runtime.fp16.loss_scaler:DynamicLossScaler.__init__": {"consecutive_hysteresis", "min_scale"},  # by name only
    "runtime.pipe.engine:PipelineEngine.module_state_dict": {"exclude_frozen_parameters"},  # as `DeepSpeedEngine`'s
}


def other_positions(function, arguments):
    """Arguments that a call by position gives in DeepSpeed, and another one or none here."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return set()
    plain = [
        each.name for each in parameters if each.kind is not each.KEYWORD_ONLY and each.name not in ("self", "cls")
    ]
    theirs = [name for name, _ in itertools.takewhile(lambda each: not each[0].startswith("*"), arguments)]
    theirs = [name for name in theirs if name not in ("self", "cls")]
    taken = {each.name for each in parameters}
    return {name for place, name in enumerate(theirs) if name in taken and plain[place : place + 1] != [name]}


def test_arguments_stand_where_deepspeed_has_them():
    found = {where: other_positions(function, arguments) for where, function, arguments in functions_here()}
    assert {where: names for where, names in found.items() if names} == OTHER_POSITIONS


def test_what_is_not_here_is_in_the_table():
    found = found_differences()
    table = {where: sorted(names) for where, (names, _) in differences().items()}
    assert {where: names for where, names in found.items() if table.get(where) != names} == {}
    assert sorted(set(table) - set(found)) == [], "these are here by now"
    assert all(reason.endswith(".") for _, reason in differences().values())


# The members of what plugins implement: a protocol has no others than those it asks for. And torch's own class.
PROTOCOLS = {"comm.comm:ProcessGroup"}


def classes_in_the_table():
    """Address -> the class here."""
    found = {}
    for address in sorted({*differences()} - PROTOCOLS):
        module, _, name = address.partition(":")
        if "." not in name:
            thing = getattr(importlib.import_module(f"deepspeed.{module}"), name)
            if isinstance(thing, type):
                found[address] = thing
    return found


def object_of(cls):
    """One that was not given anything."""
    if issubclass(cls, BaseModel):
        return cls.model_construct()
    if inspect.isabstract(cls):
        cls = type(cls.__name__, (cls,), dict.fromkeys(cls.__abstractmethods__))
    if issubclass(cls, torch.Tensor):
        return torch.empty(0).as_subclass(cls)
    return cls.__new__(cls)


@pytest.mark.parametrize(("address", "cls"), classes_in_the_table().items(), ids=str)
def test_a_member_that_is_not_here_says_why(address, cls):
    names, reason = differences()[address]
    instance = object_of(cls)
    for name in names:
        assert not hasattr(instance, name)
        with pytest.raises(AbsentMemberError, match=f"^{name}: this member of DeepSpeed's .* is not in this ") as said:
            getattr(instance, name)
        assert str(said.value).endswith(reason)
        if not issubclass(cls, BaseModel):
            with pytest.raises(AbsentMemberError):
                getattr(cls, name)
    with pytest.raises(AttributeError) as other:
        _ = instance.no_such_name
    assert not isinstance(other.value, AbsentMemberError)


def test_a_member_of_a_subclass_or_of_an_object_counts():
    init = importlib.import_module("deepspeed.zero").Init

    class Own(init):
        def num_partitions(self):
            return 3

    own, plain = object_of(Own), object_of(init)
    assert own.num_partitions() == 3
    plain.num_partitions = 4
    assert plain.num_partitions == 4
