"""`all_gather_values`: small plain values from every rank, as JSON text in tensors. Nothing is pickled.

Called where ranks must agree on something that is no tensor: what failed in a save, tags, measured times.
"""

import json
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.ended import ended_clause
from deepspeed.comm.libraries import host_or_device, no_group_error
from deepspeed.errors import CommError, first_line


def all_gather_values(
    value: Any, group: ProcessGroup | None = None, *, backend: GroupBackend | None = None
) -> list[Any]:
    """Every rank's `value`, in rank order. A collective: every rank of `group` calls it.

    Args:
        value: what JSON can hold: None, booleans, numbers (infinity and NaN too), strings, lists, dicts with string
            keys. Tuples arrive as lists.
        group: default: all ranks.
        backend: of the group, for values that are gathered in a step: a peer that has failed in it is named
            (`give_up`).

    Raises:
        TypeError: `value` holds something else; raised before the collective begins.
        CommError: there is no process group, or a rank of it did not come until the group's timeout, or ended.
    """
    text = json.dumps(value).encode()
    group = group if backend is None else backend.group
    group = torch_dist.group.WORLD if group is None else group
    if group is None:
        raise no_group_error("all_gather_values")
    sizes = [int(size) for size in _all_gather(torch.tensor([len(text)]), group, backend)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = _all_gather(padded, group, backend)
    return [json.loads(bytes(theirs[:size].tolist())) for theirs, size in zip(texts, sizes, strict=True)]


def _all_gather(tensor: torch.Tensor, group: ProcessGroup, backend: GroupBackend | None) -> list[torch.Tensor]:
    """Every rank's 1-D tensor of one size, on the host."""
    tensor = tensor.to(host_or_device(group))
    if backend is not None:
        gathered_N = tensor.new_empty(tensor.numel() * backend.world_size)
        backend.all_gather(gathered_N, tensor, tag="values").wait()
        return list(gathered_N.cpu().split(tensor.numel()))
    gathered = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size(group))]
    try:
        torch_dist.all_gather(gathered, tensor, group=group)
    except RuntimeError as error:
        advice = "see whether one of them did not, or failed before"
        if ended := ended_clause(group):
            advice = f"{ended}: its own output says why, or it left this call out"
        raise CommError(
            f"rank {torch_dist.get_rank()} waited for a value from every rank of its group, and not all came: "
            f"{first_line(error)}. All ranks call initialize(), save_checkpoint() and load_checkpoint(); {advice}"
        ) from error
    return [theirs.cpu() for theirs in gathered]
