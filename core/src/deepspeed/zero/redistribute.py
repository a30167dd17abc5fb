"""Move sharded values from one division among ranks to another: `Run`s say where, one all-to-all per buffer moves.

Legend: M numel of this rank's buffer before, T numel of it after.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.libraries import host_or_device
from deepspeed.zero.division import Run


class _Move(NamedTuple):
    param: int
    start: int
    numel: int
    source: int
    source_offset: int
    target: int
    target_offset: int


def redistribute(
    values_M: Tensor, before: Sequence[Run], after: Sequence[Run], result_T: Tensor, ranks: GroupBackend | None
) -> Tensor:
    """This rank's values in the division `after`. A collective over `ranks`.

    Args:
        values_M: 1-D, this rank's values in the division `before`.
        result_T: 1-D, of the same dtype and device; what no run covers is left as it is.
        ranks: None: this rank is the owner 0 of everything.

    Returns:
        `result_T`.
    """
    values_M = values_M.detach()  # files of other programs hold parameters
    for start, values in pieces_of([(0, values_M)], before, after, ranks):
        result_T[start : start + values.numel()] = values
    return result_T


def pieces_of(
    sources: Sequence[tuple[int, Tensor]], before: Sequence[Run], after: Sequence[Run], ranks: GroupBackend | None
) -> list[tuple[int, Tensor]]:
    """This rank's values in the division `after`, as `redistribute` joins them. A collective over `ranks`.

    Args:
        sources: this rank's values in the division `before`: offset and 1-D values, in this order, at least one, of one
            dtype and on one device. A run lies in one of them.

    Returns:
        The offset of each piece and its values. Those that this rank had before are views of `sources`.
    """
    starts = [start for start, _ in sources]

    def cut(move: _Move) -> Tensor:
        start, values = sources[bisect_right(starts, move.source_offset) - 1]
        return values[move.source_offset - start :][: move.numel]

    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    moves = sorted(_moves(before, after))
    pieces = [(move.target_offset, cut(move)) for move in moves if move.source == move.target == rank]
    if ranks is None or world_size == 1:
        return pieces
    moves = [move for move in moves if move.source != move.target]
    outgoing = [[move for move in moves if move.source == rank and move.target == peer] for peer in range(world_size)]
    incoming = [[move for move in moves if move.target == rank and move.source == peer] for peer in range(world_size)]
    sent = [cut(move) for each in outgoing for move in each] or [sources[0][1].new_empty(0)]
    received = _all_to_all(torch.cat(sent), _sizes(outgoing), _sizes(incoming), ranks)
    start = 0
    for move in (move for each in incoming for move in each):
        pieces.append((move.target_offset, received[start : start + move.numel]))
        start += move.numel
    return pieces


def _all_to_all(sent: Tensor, sizes_out: list[int], sizes_in: list[int], ranks: GroupBackend) -> Tensor:
    """Through host memory where the group has a library for it, which every such library can do, else through this
    rank's device. As bytes, since not every library moves every dtype."""
    device = host_or_device(ranks.group)
    width = sent.element_size()
    received = torch.empty(sum(sizes_in), dtype=sent.dtype, device=device)
    ranks.all_to_all(
        received.view(torch.uint8),
        sent.to(device).view(torch.uint8),
        [size * width for size in sizes_in],
        [size * width for size in sizes_out],
    ).wait()
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
                source, target = old.offset + start - old.start, new.offset + start - new.start
                yield _Move(new.param, start, stop - start, old.owner, source, new.owner, target)
