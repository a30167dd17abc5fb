"""`move_to_device`: a batch, however nested, on another device."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


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
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, item)
