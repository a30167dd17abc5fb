"""The whole value of a parameter that is divided over ranks, from the part that each of them has.

Called by `fragments.py`. Parts may overlap, where ranks share a key and value head: these have equal values.
"""

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.values import all_gather_values
from deepspeed.config.precision import dtype_name
from deepspeed.parallel.model_part import ModelPart, part_held


def join_parts(own: Tensor | None, param: Tensor, ranks: GroupBackend) -> Tensor | None:
    """The whole value; None if no rank has a part. A collective of `ranks`.

    Args:
        own: this rank's part, of the shape of its part of `param`; None: it has none, as of a gradient, which then
            counts as zeros.
        ranks: the holders of the parts.
    """
    part = part_held(param)
    assert part is not None
    dtype = None if own is None else dtype_name(own.dtype)
    held = all_gather_values((part.to_plain(), dtype), backend=ranks)
    known = [dtype for _, dtype in held if dtype is not None]
    if not known:
        return None
    whole = torch.zeros(part.shape, dtype=getattr(torch, known[0]), device=param.device)
    for source, (plain, has) in enumerate(held):
        theirs = ModelPart.of_plain(plain)
        numel = theirs.own_shape.numel()
        if has is None or numel == 0:
            continue
        flat_N = torch.empty(numel, dtype=whole.dtype, device=whole.device)
        if source == ranks.rank:
            assert own is not None
            flat_N.copy_(own.reshape(-1))
        ranks.broadcast(flat_N, source).wait()
        theirs.put(flat_N.view(theirs.own_shape), whole)
    return whole


def own_part(param: Tensor, whole: Tensor, asked: str) -> Tensor:
    """What of the whole value this rank has.

    Args:
        asked: what the user called.

    Raises:
        ValueError: for a value of another shape.
    """
    part = part_held(param)
    if part is None or part.is_whole:
        return whole
    if whole.shape != part.shape:
        raise ValueError(
            f"{asked}: found a value of shape {tuple(whole.shape)}; the parameter, of which this rank has a part, has "
            f"{tuple(part.shape)} as a whole"
        )
    return part.take(whole)
