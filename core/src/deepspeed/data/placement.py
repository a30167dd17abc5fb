"""Batches and other nested containers: their tensors on another device, changed, measured, compared.

The names are those of DeepSpeed's `runtime.utils` and `runtime.zero.utils`. Containers are dicts, lists, tuples and
named tuples, nested as they come; each function leaves what it is given as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


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

    return tree_map(move, item)


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
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the elements of all tensors in `item`."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(item) if isinstance(leaf, Tensor))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether both have the same containers, and in each place equal tensors or equal values.

    Tensors are equal only in dtype, device and shape too.
    """
    (leaves1, containers1), (leaves2, containers2) = tree_flatten(inputs1), tree_flatten(inputs2)
    return containers1 == containers2 and all(map(_is_same, leaves1, leaves2))


def isinstance_namedtuple(obj: object) -> bool:
    """Whether `obj` is a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
