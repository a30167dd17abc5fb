"""Batches and other nested containers: their tensors on another device, changed, measured, compared.

The names are those of DeepSpeed's `runtime.utils` and `runtime.zero.utils`. Containers are dicts, lists, tuples and
named tuples, nested as they come; each function leaves what it is given as it is.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with every tensor in it on `device`; containers are copied, everything else is passed through.

    Called by training scripts on the batches of a loader.

    Args:
        item: a tensor, or dicts, lists and tuples of them, nested as they come.
        criterion_func: asked for each leaf; where it says False the leaf stays as it is.
    """

    def move(leaf: Any) -> Any:
        if criterion_func is not None and not criterion_func(leaf):
            return leaf
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return _mapped(move, item)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """`move_to_device`; tensors that are on `device` already are not copied."""
    return move_to_device(item, device, criterion_func)


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """`value` with `function(tensor)` in the place of every tensor in it.

    Args:
        warning_msg_fn: taken as DeepSpeed's; there is nothing to warn of, for no container is left out.
    """
    return _mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the elements of all tensors in `item`."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(item) if isinstance(leaf, Tensor))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether both have the same containers, and in each place equal tensors or equal values.

    Tensors are equal only in dtype, device and shape too.
    """
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Mapping):
        same = compare_tensors_in_structures
        return inputs1.keys() == inputs2.keys() and all(same(value, inputs2[key]) for key, value in inputs1.items())
    if isinstance(inputs1, list | tuple):
        pairs = zip(inputs1, inputs2, strict=False)
        return len(inputs1) == len(inputs2) and all(compare_tensors_in_structures(*pair) for pair in pairs)
    if isinstance(inputs1, Tensor):
        is_alike = inputs1.dtype == inputs2.dtype and inputs1.device == inputs2.device
        return is_alike and torch.equal(inputs1, inputs2)
    return bool(inputs1 == inputs2)


def isinstance_namedtuple(obj: object) -> bool:
    """Whether `obj` is a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """`item` with `function(leaf)` in the place of each leaf; containers keep their class."""
    if isinstance(item, Mapping):
        values = {key: _mapped(function, value) for key, value in item.items()}
        if type(item) is dict:
            return values
        made: Any = copy.copy(item)  # such as a BatchEncoding of transformers, whose constructor takes more
        for key, value in values.items():
            made[key] = value
        return made
    if isinstance_namedtuple(item):
        return type(item)(*(_mapped(function, value) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_mapped(function, value) for value in item)
    return function(item)


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)
    else:
        yield item
