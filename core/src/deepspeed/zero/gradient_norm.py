"""The squares of gradients where the model itself is divided: over tensor-parallel and pipeline ranks.

Called by `strategy.py`, which sums over the data-parallel ranks. A parameter that all tensor-parallel ranks have counts
on one of them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.zero.flat_group import ParamShard
from deepspeed.zero.placement import exact_norm


def is_tensor_parallel(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of the parameter, by the mark that Megatron's layers set."""
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def norms_of_own_parts(shards: Iterable[ParamShard], params: Sequence[Tensor]) -> list[Tensor]:
    """0-D norms of the reduced gradients that no tensor-parallel peer has.

    Args:
        params: all attached ones; a shard knows the index of its own.
    """
    parts = [shard.grad for shard in shards if is_tensor_parallel(params[shard.index])]
    return [exact_norm(grad) for grad in parts if grad is not None]


def sum_over_model(square_sum: float, model_ranks: Sequence[GroupBackend], device: torch.device) -> float:
    """The sum over the ranks that hold other parts of the same model. A collective of each of `model_ranks`."""
    if not model_ranks:
        return square_sum
    total = torch.tensor([square_sum], dtype=torch.float32, device=device)
    for ranks in model_ranks:
        ranks.all_reduce(total).wait()
    return total.item()
