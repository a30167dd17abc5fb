"""The squares of gradients where the model itself is divided: over tensor-parallel and pipeline ranks.

Called by `strategy.py`, which sums over the data-parallel ranks. A parameter that all tensor-parallel ranks have counts
on one of them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.parallel.model_part import counted_numel
from deepspeed.zero.flat_group import ParamShard
from deepspeed.zero.placement import GRADIENT, exact_norms

#: a number of the host, or a 0-D tensor on the device, fp32
Scalar = float | Tensor


def is_tensor_parallel(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of the parameter, by the mark that Megatron's layers set."""
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def norms_of_own_parts(shards: Iterable[ParamShard], params: Sequence[Tensor]) -> list[Tensor]:
    """0-D norms of the reduced gradients that no tensor-parallel peer has.

    Args:
        params: all attached ones; a shard knows the index of its own.
    """
    own = [shard for shard in shards if is_tensor_parallel(params[shard.index])]
    parts = ((shard, shard.placement.read(shard, GRADIENT, shard.grad)) for shard in own)
    return exact_norms([_counted(grad, shard, params[shard.index]) for shard, grad in parts if grad is not None])


def _counted(grad: Tensor, shard: ParamShard, param: Tensor) -> Tensor:
    """What of a shard's gradient no earlier tensor-parallel rank has."""
    numel = counted_numel(param)
    return grad if numel is None else grad.reshape(-1)[: max(0, numel - shard.fragment.param_start)]


def sum_over_model(square_sum: Scalar, model_ranks: Sequence[GroupBackend], device: torch.device) -> Scalar:
    """The sum over the ranks that hold other parts of the same model. A collective of each of `model_ranks`."""
    if not model_ranks:
        return square_sum
    total_1 = torch.empty(1, dtype=torch.float32, device=device)
    if isinstance(square_sum, Tensor):
        total_1.copy_(square_sum)
    else:
        total_1.fill_(square_sum)
    for ranks in model_ranks:
        ranks.all_reduce(total_1).wait()
    return total_1[0] if isinstance(square_sum, Tensor) else total_1.item()
