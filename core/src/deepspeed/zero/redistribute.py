"""Move sharded values from one division among ranks to another: `Run`s say where, one all-to-all per buffer moves.

`join_parts` makes a whole value of parts that may overlap. A file of stage 3 has, of a parameter that no optimizer
trains, one of W parts of ceil(n / W) elements, the last ones padded with zeros; rank r saves part r.

Legend: M numel of this rank's buffer before, T numel of it after.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.comm.backend import GroupBackend, host_or_device
from deepspeed.comm.values import all_gather_values
from deepspeed.config.precision import dtype_name
from deepspeed.parallel.model_part import ModelPart, part_held
from deepspeed.zero.layout import Run, in_parameters
from deepspeed.zero.param_unit import ParamUnit, unit_of, whole


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
    """Exchange elements with all ranks: through host memory where the group has a library for it, since every such
    library can do so, else through this rank's device. Bytes are sent, since not every library moves every dtype."""
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
    """Return the part of the value `whole` that this rank has: all of it where the model does not divide `param`.

    Args:
        asked: what the user called.

    Raises:
        ValueError: if `whole` has not the shape of the whole parameter.
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


def saved_part(param: Parameter) -> Tensor:
    """Return what this rank saves of a parameter: of a sharded one the part of ceil(n / W) elements, else all of it. A
    collective for a sharded parameter that is not whole."""
    unit = unit_of(param)
    if unit is None:
        return param.detach()
    with whole(param) as value:
        return part_of(value, unit.unit_ranks.reduce_group)


def part_of(value: Tensor, ranks: GroupBackend) -> Tensor:
    """This rank's part of ceil(n / W) elements of a whole parameter, 1-D, padded with zeros."""
    return part_of_parts([value], value.shape, ranks.rank, ranks.world_size)


def part_of_parts(parts: Sequence[Tensor], shape: torch.Size, rank: int, world_size: int) -> Tensor:
    """The part of `rank` of `world_size` of a parameter, 1-D, padded with zeros, from the parts of the ranks that saved
    it; no more is read than it needs."""
    numel = shape.numel()
    size, saved_size = math.ceil(numel / world_size), math.ceil(numel / len(parts))
    part = parts[0].new_zeros(size)
    for index, saved in enumerate(parts):
        first = max(index * saved_size, rank * size)
        stop = min((index + 1) * saved_size, (rank + 1) * size, numel)
        if first < stop:
            values = saved.reshape(-1)[first - index * saved_size : stop - index * saved_size]
            part[first - rank * size : stop - rank * size] = values
    return part


def load_parts(unit: ParamUnit, parts: list[Tensor]) -> None:
    """Fill a unit from this rank's part of each of its parameters, as `saved_part` gave it. A collective."""
    layout = unit.layout
    runs = [
        Run(each.param, each.param_start, each.numel, holder, each.start - layout.shard(each.owner)[0])
        for each in layout.fragments
        for holder in unit.unit_ranks.holders(each.owner)
    ]
    flat = torch.cat([part.reshape(-1).to(unit.device, unit.dtype) for part in parts])
    everyone = unit.unit_ranks.reduce_group
    unit.shards_changed()
    before = in_parameters(layout.numels, everyone.world_size)
    unit.set_shard(redistribute(flat, before, runs, flat.new_zeros(unit.shard_S.numel()), everyone))


def whole_of_parts(part: Tensor, shape: torch.Size, ranks: GroupBackend) -> Tensor:
    """A whole parameter, on every rank, from this rank's part of it as `saved_part` gave it. A collective."""
    numel = shape.numel()
    everywhere = [Run(0, 0, numel, rank, 0) for rank in range(ranks.world_size)]
    before = in_parameters([numel], ranks.world_size)
    return redistribute(part.reshape(-1), before, everywhere, part.new_zeros(numel), ranks).view(shape)
