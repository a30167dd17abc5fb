"""Move sharded values from one division among ranks to another: integers say where, one all-to-all per buffer moves.

Stage 3 keeps a shard of every unit; a checkpoint file holds another division of the same parameters (`in_parameters`).
Both are lists of `Run`s, which every rank computes alike.

Legend: M numel of this rank's buffer before, T numel of it after.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Run(NamedTuple):
    """Elements `[start, start + numel)` of a parameter, at `offset` of the buffer of the rank `owner`."""

    param: int
    start: int
    numel: int
    owner: int
    offset: int


class _Move(NamedTuple):
    numel: int
    source: int
    source_offset: int
    target: int
    target_offset: int


def in_parameters(numels: Sequence[int], world_size: int) -> list[Run]:
    """Each parameter of n elements in parts of ceil(n / W), padded, laid end to end: DeepSpeed's stage 3 files."""
    runs = []
    offset = 0
    for param, numel in enumerate(numels):
        size = math.ceil(numel / world_size)
        for rank in range(world_size):
            start = min(rank * size, numel)
            runs.append(Run(param, start, min(size, numel - start), rank, offset))
        offset += size
    return runs


def padded_numel(numels: Sequence[int], world_size: int) -> int:
    """Elements of each rank's buffer of `in_parameters`."""
    return sum(math.ceil(numel / world_size) for numel in numels)


def redistribute(
    values_M: Tensor, before: Sequence[Run], after: Sequence[Run], numel: int, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's values in the division `after`. A collective over `group`.

    Args:
        values_M: 1-D, this rank's values in the division `before`.
        numel: of the result; what no run covers is zero.

    Returns:
        [numel], of the dtype and on the device of `values_M`.
    """
    rank, world_size = torch_dist.get_rank(group), torch_dist.get_world_size(group)
    moves = sorted(_moves(before, after))
    outgoing = [[move for move in moves if move.source == rank and move.target == peer] for peer in range(world_size)]
    incoming = [[move for move in moves if move.target == rank and move.source == peer] for peer in range(world_size)]
    sent = [values_M[move.source_offset : move.source_offset + move.numel] for each in outgoing for move in each]
    received = _all_to_all(
        torch.cat(sent) if sent else values_M.new_empty(0), _sizes(outgoing), _sizes(incoming), group
    )
    result = values_M.new_zeros(numel)
    start = 0
    for move in (move for each in incoming for move in each):
        result[move.target_offset : move.target_offset + move.numel] = received[start : start + move.numel]
        start += move.numel
    return result


def _all_to_all(sent: Tensor, sizes_out: list[int], sizes_in: list[int], group: ProcessGroup | None) -> Tensor:
    """Through host memory where the group has a library for it, which every such library can do."""
    if len(sizes_out) == 1:
        return sent
    world = torch_dist.group.WORLD if group is None else group
    assert world is not None
    device = torch.device("cpu") if torch.device("cpu") in world._device_types else sent.device
    received = sent.new_empty(sum(sizes_in), device=device)
    torch_dist.all_to_all_single(received, sent.to(device), sizes_in, sizes_out, group=group)
    return received.to(sent.device)


def _sizes(moves: Sequence[Sequence[_Move]]) -> list[int]:
    return [sum(move.numel for move in each) for each in moves]


def _moves(before: Sequence[Run], after: Sequence[Run]) -> Iterator[_Move]:
    """Every stretch of elements that lies in one run before and one run after."""
    by_param: dict[int, list[Run]] = {}
    for run in before:
        by_param.setdefault(run.param, []).append(run)
    for new in after:
        for old in by_param.get(new.param, ()):
            start, stop = max(old.start, new.start), min(old.start + old.numel, new.start + new.numel)
            if start < stop:
                yield _Move(
                    stop - start, old.owner, old.offset + start - old.start, new.owner, new.offset + start - new.start
                )
