"""Parts of single parameters: what the checkpoint files of stage 3 have of a parameter that no optimizer trains.

A parameter of n elements is cut in W parts of ceil(n / W), the last ones padded with zeros; rank r saves part r. Called
by `engine/training_state.py` for a save, and by `param_gathering.py` and `engine/sharded_weights.py` for a load.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.comm.backend import GroupBackend
from deepspeed.zero.division import Run, in_parameters
from deepspeed.zero.param_unit import ParamUnit, unit_of, whole
from deepspeed.zero.redistribute import redistribute


def saved_part(param: Parameter) -> Tensor:
    """What this rank saves of a parameter: of a sharded one the part of ceil(n / W) elements, else all of it. A
    collective for a sharded parameter that is not whole."""
    unit = unit_of(param)
    if unit is None:
        return param.detach()
    with whole(param) as value:
        return part_of(value, unit.unit_ranks.everyone)


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
    everyone = unit.unit_ranks.everyone
    unit.shards_changed()
    before = in_parameters(layout.numels, everyone.world_size)
    unit.set_shard(redistribute(flat, before, runs, flat.new_zeros(unit.shard_S.numel()), everyone))


def whole_of_parts(part: Tensor, shape: torch.Size, ranks: GroupBackend) -> Tensor:
    """A whole parameter, on every rank, from this rank's part of it as `saved_part` gave it. A collective."""
    numel = shape.numel()
    everywhere = [Run(0, 0, numel, rank, 0) for rank in range(ranks.world_size)]
    before = in_parameters([numel], ranks.world_size)
    return redistribute(part.reshape(-1), before, everywhere, part.new_zeros(numel), ranks).view(shape)
