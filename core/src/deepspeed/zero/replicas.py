"""Whether ranks that hold the same parameter whole hold the same values: `zero_optimization.enable_sanity_checks`.

Called before each update, as `Training.check`: a rank that changed such a parameter on its own, for example inside
`GatheredParameters` without `modifier_rank`, would train on from other weights without a sign.
"""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import StateError
from deepspeed.parallel.expert_params import expert_group_of
from deepspeed.zero.agreement import named_ranks

_PERIOD = 8191  # a prime: elements that changed places change the sum
_CHUNK_NUMEL = 2**20


def check_replicas(
    module: torch.nn.Module, group: ProcessGroup, experts: Mapping[str, ProcessGroup], waiting: Set[Tensor]
) -> None:
    """Compare checksums of the parameters that this rank holds whole. A collective of `group` and of those of experts.

    Args:
        group: ranks that hold the same parameters.
        experts: by `param.group_name`, the ranks that hold the same experts.
        waiting: parameters of which this rank has set its own elements, which the others get with the update. They are
            not compared.

    Raises:
        StateError: on every rank, for the first parameter whose values differ; it names the ranks.
    """
    found: dict[ProcessGroup, dict[str, int | None]] = {members: {} for members in (group, *experts.values())}
    for name, param in module.named_parameters():
        if param.numel() > 0:  # those of stage 3 that are sharded now are empty
            expert = expert_group_of(param)
            found[group if expert is None else experts[expert]][name] = (
                None if param in waiting else _checksum(param.detach())
            )
    for members, sums in found.items():
        if torch.distributed.get_world_size(members) > 1:
            _compare(all_gather_values(sums, backend=group_backend(members)), members)


def _compare(by_rank: list[dict[str, int | None]], members: ProcessGroup) -> None:
    for name, expected in by_rank[0].items():
        found = [sums.get(name, expected) for sums in by_rank]  # another rank may have released it already
        if None in found:
            continue
        others = [torch.distributed.get_global_rank(members, at) for at, one in enumerate(found) if one != expected]
        if others:
            first = torch.distributed.get_global_rank(members, 0)
            raise StateError(
                f"zero_optimization.enable_sanity_checks: the parameter {name} must have the same values on all ranks "
                f"that hold it, and {named_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from rank "
                f"{first}. Change parameters on all ranks alike, or on one inside "
                "deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
            )


def _checksum(param: Tensor) -> int:
    """The sum of the bytes, each times one more than its place modulo a prime. It is equal for equal bits."""
    return sum(_weighted_sums(param.contiguous().view(-1).view(torch.uint8)))


def _weighted_sums(flat: Tensor) -> Iterator[int]:
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        chunk = flat[start : start + _CHUNK_NUMEL].long()
        places = torch.arange(start, start + chunk.numel(), device=flat.device)
        yield int((chunk * (places % _PERIOD + 1)).sum())
