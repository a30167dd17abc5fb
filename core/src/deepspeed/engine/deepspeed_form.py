"""This file puts what a save writes into the keys and the division that DeepSpeed 0.19 loads (`checkpoint.format`
"deepspeed").

The names of files and most keys are the same in any case. DeepSpeed wants

    param_groups                 with `params`, which count the groups' buffers
    loss_scaler                  an object; in stages 1 and 2 without one it keeps its configured scale
    stages 1, 2: master weights  without the padding, which the optimizer's states have
    stage 3: the base optimizer  under `optimizer_state_dict`
    stage 3: fp32_flat_groups    one buffer, and one state, per sub-group of `sub_group_size` elements of a rank
    stage 3: param_shapes        by sub-group
    stage 3: module              empty tensors for all parameters; of frozen ones this rank's part
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.deepspeed_files import constant_scaler
from deepspeed.errors import CheckpointError
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.redistribute import part_of
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.state_dict import PER_PARAMETER, masters_key


def as_deepspeeds_shard(state: Mapping[str, Any], sharding: Sharding, sub_group_size: int) -> dict[str, Any]:
    """The content of a `*_optim_states.pt`.

    Args:
        sub_group_size: `zero_optimization.sub_group_size` of the run, and of the one that loads in DeepSpeed.

    Raises:
        CheckpointError: a state of the optimizer is kept by parameter, which DeepSpeed has no place for.
    """
    shard = dict(state["optimizer_state_dict"])
    shard["loss_scale_state"] = shard.pop("loss_scaler")
    if sharding.stage == 3:
        shard["loss_scaler"] = constant_scaler()
    base = shard.pop("base_optimizer_state")
    states = {index: _without_parameters(each) for index, each in base["state"].items()}
    key = masters_key(sharding.stage)
    cuts = [[0, masters.numel()] for masters in shard[key]]
    if sharding.stage < 3:
        shard[key] = [
            masters[: masters.numel() - padding]
            for masters, padding in zip(shard[key], shard["group_paddings"], strict=True)
        ]
    else:
        groups = sharding.units.saved_parameters()
        cuts = [_cuts(_sizes(map(shape_of, group), sharding), sub_group_size) for group in groups]
    numbers = [0, *accumulate(len(its) - 1 for its in cuts)]
    shard[key] = [part for masters, its in zip(shard[key], cuts, strict=True) for part in _cut(masters, its)]
    own = {
        "state": {
            numbers[index] + place: {key: _range(value, first, stop) for key, value in each.items()}
            for (index, each), its in zip(states.items(), cuts, strict=True)
            for place, (first, stop) in enumerate(pairwise(its))
            if each
        },
        "param_groups": [
            {**group, "params": list(range(numbers[index], numbers[index + 1]))}
            for index, group in enumerate(base["param_groups"])
        ],
    }
    shard["optimizer_state_dict" if sharding.stage == 3 else "base_optimizer_state"] = own
    return {**state, "optimizer_state_dict": shard}


def as_deepspeeds_model(state: Mapping[str, Any], sharding: Sharding, sub_group_size: int) -> dict[str, Any]:
    """The content of a `*_model_states.pt`; the arguments are those of `as_deepspeeds_shard`."""
    if sharding.stage < 3:
        return dict(state)
    frozen, fragments = state["frozen_param_shapes"], state["frozen_param_fragments"]
    trained = {name for group in state["param_shapes"] for name in group}
    names = {alias for alias, name in state["shared_params"].items() if name in trained} | trained | set(frozen)
    module = {name: value.new_empty(0) if name in names else value for name, value in state["module"].items()}
    parts = {
        name: part_of(part, sharding.backend) if part.shape == frozen[name] else part
        for name, part in fragments.items()
    }
    shapes = [
        dict(list(group.items())[first:stop])
        for group in state["param_shapes"]
        for first, stop in pairwise(_places(_sizes(group.values(), sharding), sub_group_size))
    ]
    return {**state, "module": module, "param_shapes": shapes, "frozen_param_fragments": parts}


def _without_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    if state.get("parameter_states"):
        raise CheckpointError(
            f"checkpoint.format: found the optimizer's states {sorted(state['parameter_states'])}, which are kept by "
            "parameter and which DeepSpeed's files have no place for; omit the key"
        )
    return {key: value for key, value in state.items() if key not in PER_PARAMETER}


def _sizes(shapes: Iterable[torch.Size], sharding: Sharding) -> list[int]:
    """Elements that a rank has of each parameter of a group."""
    return [-(-shape.numel() // sharding.world_size) for shape in shapes]


def _places(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where a group's sub-groups begin and end, in parameters: each takes some until it has `limit` elements."""
    places, numel = [0], 0
    for place, size in enumerate(sizes, 1):
        numel += size
        if numel >= limit or place == len(sizes):
            places.append(place)
            numel = 0
    return places


def _cuts(sizes: Sequence[int], limit: int) -> list[int]:
    """The same in elements."""
    ends = [0, *accumulate(sizes)]
    return [ends[place] for place in _places(sizes, limit)]


def _cut(flat: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return [_range(flat, first, stop) for first, stop in pairwise(cuts)]


def _range(value: Any, first: int, stop: int) -> Any:
    """A copy of what a sub-group has of a value: an optimizer that loads it counts its step up in place."""
    if not isinstance(value, Tensor) or value.shape == (stop - first,):
        return value
    return value[first:stop].clone() if value.dim() > 0 else value.clone()
