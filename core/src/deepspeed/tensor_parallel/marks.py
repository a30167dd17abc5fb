"""The parameters of a divided model carry marks of what they hold, and hooks that sum gradients.

Both belong to a parameter, and a copy of the model, or its move to some devices, makes new parameters. So the modules
remember them, and `mark_params` puts them on the current ones: after the division, and when an engine is built.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from deepspeed.parallel.model_part import mark_counted, mark_part, part_held
from deepspeed.parallel.sharded_params import whole_shape
from deepspeed.tensor_parallel.cuts import Cut
from deepspeed.tensor_parallel.ranks import TensorRanks

_PARTS = "ds_parts"
_SUMS = "ds_gradient_sums"
_HANDLE = "ds_gradient_sum_handle"


def remember_sums(
    module: Module, cut: Cut | None, names: Sequence[str] | None = None, *, only_where_divided: bool = False
) -> None:
    """Have the gradients of the module's own parameters summed over the ranks, each of which sees a part.

    Args:
        cut: only those of its last `cut.shared` rows, which are one key head, and its value head where both are fused;
            None: all.
        names: of the parameters; None: all.
        only_where_divided: only in forwards that divide the sequence.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)] if names is None else names
    setattr(module, _SUMS, dict.fromkeys(names, (cut, only_where_divided)))


def remember_parts(model: Module) -> None:
    """Keep the marks of all parameters."""
    for module in model.modules():
        marked = ((name, part_held(param)) for name, param in module.named_parameters(recurse=False))
        if parts := {name: part for name, part in marked if part is not None}:
            setattr(module, _PARTS, parts)


def mark_params(model: Module, ranks: TensorRanks) -> None:
    """Mark the parameters, and hook those whose gradients are summed."""
    for module in model.modules():
        for name, part in getattr(module, _PARTS, {}).items():
            mark_part(module.get_parameter(name), part)
        for name, (cut, only_where_divided) in getattr(module, _SUMS, {}).items():
            param = module.get_parameter(name)
            known = getattr(param, _HANDLE, None)
            if known is not None:
                known.remove()
            setattr(param, _HANDLE, param.register_hook(_sum_of(cut, ranks, only_where_divided)))
            if cut is not None and cut.share is not None and not cut.share.counts_keys:
                num_rows, *rest = whole_shape(param)
                mark_counted(param, (num_rows - cut.shared) * math.prod(rest))


def _sum_of(cut: Cut | None, ranks: TensorRanks, only_where_divided: bool) -> Callable[[Tensor], Tensor]:
    def sum_all(grad: Tensor) -> Tensor:
        if only_where_divided and not ranks.sequence_is_divided:
            return grad
        return ranks.sum_in_place(grad.clone(memory_format=torch.contiguous_format))

    def sum_shared(grad: Tensor) -> Tensor:
        """Sum the last rows over the ranks, for all key heads at once: the ranks that share a head are no group."""
        assert cut is not None
        assert cut.share is not None
        rows = grad[grad.shape[0] - cut.shared :]
        of_all = rows.new_zeros((cut.share.num_kv_heads, *rows.shape))
        of_all[cut.share.keys[0]] = rows
        grad = grad.clone()
        grad[grad.shape[0] - cut.shared :] = ranks.sum_in_place(of_all)[cut.share.keys[0]]
        return grad

    return sum_all if cut is None else sum_shared
