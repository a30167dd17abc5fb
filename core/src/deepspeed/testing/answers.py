"""Call every documented method of an accelerator with suitable values, and check that the answer is plausible.

This module is for an extension's own tests, which use a stand-in instead of a device. It knows what the interface
requires of every device; a test adds the answers of its own device:

    @pytest.mark.parametrize("name", documented_names())
    def test_every_documented_method_answers(accelerator, name):
        check_answers(accelerator, name, {"device_count": 2, "amp": lambda found: found is torch.xyz.amp})
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepspeed.accelerator.abstract_accelerator import MIXINS, DeepSpeedAccelerator

#: name of an argument in the interface -> a value that fits, made for each call. A new argument needs one here
VALUES: dict[str, Callable[[DeepSpeedAccelerator], Any]] = {
    "address": lambda accelerator: 4096,
    "align_bytes": lambda accelerator: 1,
    "backend": lambda accelerator: "eager",
    "callback": lambda accelerator: lambda: None,
    "category": lambda accelerator: None,
    "class_name": lambda accelerator: "FusedAdamBuilder",
    "current_env": lambda accelerator: {},
    "device": lambda accelerator: "cpu",
    "device_index": lambda accelerator: accelerator.current_device(),
    "domain": lambda accelerator: "train",
    "dtype": lambda accelerator: torch.float32,
    "graph": lambda accelerator: accelerator.create_graph(),
    "local_accelerator_ids": lambda accelerator: [0],
    "make_copy": lambda accelerator: True,
    "match_shape": lambda accelerator: True,
    "min_bytes": lambda accelerator: 4096,
    "msg": lambda accelerator: "a range",
    "new_state": lambda accelerator: accelerator.get_rng_state(),
    "num_bytes": lambda accelerator: 4096,
    "pool": lambda accelerator: None,
    "seed": lambda accelerator: 7,
    "size": lambda accelerator: (2, 3),
    "stream": lambda accelerator: accelerator.current_stream(),
    "tensor": lambda accelerator: torch.ones(3),
}


def _makes(dtype: torch.dtype) -> Callable[[DeepSpeedAccelerator, Any], bool]:
    def check(accelerator: DeepSpeedAccelerator, found: Any) -> bool:
        if isinstance(found, functools.partial):  # the interface's own, which a stand-in cannot call
            kind = torch.device(accelerator.current_device_name()).type
            return found.func is torch.tensor and found.keywords == {"dtype": dtype, "device": kind}
        return found([1, 0]).dtype is dtype

    return check


def _is_figure(accelerator: DeepSpeedAccelerator, found: Any) -> bool:
    return bool(found >= 0)


def _is_as_listed(dtype: torch.dtype) -> Callable[[DeepSpeedAccelerator, Any], bool]:
    return lambda accelerator, found: found == (dtype in accelerator.supported_dtypes())


#: documented name -> what its answer is on every device, where the annotation does not say it all
ANY_DEVICE: dict[str, Callable[[DeepSpeedAccelerator, Any], bool]] = {
    **{
        f"{prefix}Tensor": _makes(dtype)
        for prefix, dtype in {
            "BFloat16": torch.bfloat16,
            "Byte": torch.uint8,
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "Int": torch.int32,
            "Long": torch.int64,
        }.items()
    },
    **dict.fromkeys(
        [
            *("available_memory", "memory_allocated", "memory_cached", "memory_reserved", "total_memory"),
            *("max_memory_allocated", "max_memory_cached", "max_memory_reserved", "device_count"),
        ],
        _is_figure,
    ),
    "build_extension": lambda accelerator, found: isinstance(found, type),
    "get_rng_state": lambda accelerator, found: found.dtype is torch.uint8,
    "is_bf16_supported": _is_as_listed(torch.bfloat16),
    "is_fp16_supported": _is_as_listed(torch.float16),
    "pin_empty": lambda accelerator, found: found.shape == (2, 3),
    "pin_empty_like": lambda accelerator, found: found.shape == (3,),
    "pin_memory_alignment": lambda accelerator, found: found >= 1,
    "random": lambda accelerator, found: found is torch.random,
    "supported_dtypes": lambda accelerator, found: torch.float32 in found,
}


def check_answers(accelerator: DeepSpeedAccelerator, name: str, expected: Mapping[str, Any] | None = None) -> None:
    """Call `name` with all arguments, and with only the required ones, and check the answers.

    Args:
        expected: documented name -> the answer, or a function that checks it.

    Raises:
        AssertionError: an answer is wrong; the message shows it.
        LookupError: an argument of the interface has no value in `VALUES`.
    """
    check_arguments(getattr(type(accelerator), name, None), _stated(name))
    for answer in _answers(accelerator, name):
        hint = _hint(name)
        assert _fits(answer, hint), f"{name}: found {answer!r}, which is no {hint}"
        assert ANY_DEVICE.get(name, lambda accelerator, found: True)(accelerator, answer), f"{name}: found {answer!r}"
        if expected is not None and name in expected:
            wanted = expected[name]
            is_right = wanted(answer) if inspect.isfunction(wanted) else answer == wanted
            assert is_right, f"{name}: found {answer!r}"


def check_arguments(own: Any, stated: Any) -> None:
    """Compare a method's arguments, with order and defaults, to those of the interface.

    Args:
        own: the method of a class; it may have more arguments at the end, or take all with `*args`.
        stated: the method of the interface.

    Raises:
        AssertionError: names the argument.
    """
    if not inspect.isfunction(own) or not inspect.isfunction(stated) or own is stated:
        return
    found = list(inspect.signature(own).parameters.values())
    for place, wanted in enumerate(inspect.signature(stated).parameters.values()):
        if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found):
            return
        same = [each for each in found if each.name == wanted.name]
        is_found = bool(same) and (wanted.kind is wanted.KEYWORD_ONLY or found[place : place + 1] == same)
        assert is_found, f"{own.__qualname__}: found no argument {wanted.name!r} at place {place}"
        assert same[0].default == wanted.default, f"{own.__qualname__}: {wanted.name} has the default {same[0].default}"


def arguments_of(
    accelerator: DeepSpeedAccelerator, name: str, *, only_required: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments for a documented method.

    Raises:
        LookupError: an argument has no value; the message says where to add one.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in list(inspect.signature(_stated(name)).parameters.values())[1:]:
        is_variadic = parameter.kind is parameter.VAR_POSITIONAL
        if only_required and not is_variadic and parameter.default is not parameter.empty:
            continue
        if parameter.name not in VALUES:
            raise LookupError(
                f"{name}: found no value for its argument {parameter.name!r}; add one to VALUES in "
                "deepspeed/testing/answers.py, from which the tests of all extensions take it"
            )
        value = VALUES[parameter.name](accelerator)
        if is_variadic:
            positional.extend(value)
        else:
            named[parameter.name] = value
    return positional, named


def _answers(accelerator: DeepSpeedAccelerator, name: str) -> Iterator[Any]:
    if isinstance(_stated(name), property):
        yield getattr(accelerator, name)
        return
    for only_required in (False, True):
        positional, named = arguments_of(accelerator, name, only_required=only_required)
        yield getattr(accelerator, name)(*positional, **named)


def _stated(name: str) -> Any:
    """Return the method or property of the interface."""
    return next(vars(mixin)[name] for mixin in MIXINS.values() if name in vars(mixin))


def _hint(name: str) -> Any:
    stated = _stated(name)
    return typing.get_type_hints(stated.fget if isinstance(stated, property) else stated)["return"]


def _fits(answer: Any, hint: Any) -> bool:
    """Return whether an answer has the type in the interface's annotation."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is types.NoneType:
        return answer is None
    if hint in (bool, int, str):
        return type(answer) is hint
    if origin is list:
        return isinstance(answer, list) and all(_fits(each, parts[0]) for each in answer)
    return isinstance(answer, origin or hint)
