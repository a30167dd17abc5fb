"""A stage's state as plain values, with the keys of DeepSpeed's `*_optim_states.pt`, and back.

Per flat group, this rank's partition of S elements (padding included):

    single_partition_of_fp32_groups   [S] the weights that the optimizer updates
    base_optimizer_state              {"state": {group: {name: [S] tensor or scalar}}, "param_groups": [...]}

The optimizer keeps one state per fragment. Tensor states of a fragment's shape are laid end to end to [S]. Scalars,
such as Adam's `step`, are stored once when all fragments agree, and else also one by one under
`parameter_scalars`. A state of another shape (factored moments) is stored per fragment under `parameter_states`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.errors import CheckpointError
from deepspeed.optim.saved_state import check_saved_state
from deepspeed.zero.param_unit import shape_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from deepspeed.zero.flat_group import FlatGroup, ParamShard
    from deepspeed.zero.strategy import Sharding


def collect(sharding: Sharding) -> dict[str, Any]:
    """The state dict of a stage; tensors are this rank's own memory or copies, on the device they live on."""
    optimizer = sharding.optimizer
    groups = sharding.groups
    state = {index: _flatten_group(sharding, group) for index, group in enumerate(groups)}
    param_groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in (optimizer.param_groups if optimizer is not None else [])
    ]
    return {
        "zero_stage": sharding.stage,
        "partition_count": [sharding.world_size if group.flat_N is not None else 1 for group in groups],
        "group_paddings": [group.layout.padding(group.rank) for group in groups],
        "single_partition_of_fp32_groups": [_master_partition(group) for group in groups],
        "base_optimizer_state": {"state": state, "param_groups": param_groups},
    }


def check(sharding: Sharding, saved: dict[str, Any]) -> None:
    """Refuse a state of another model, another kind of optimizer, other groups or another division.

    Raises:
        CheckpointError: says what was found; nothing was changed.
    """
    masters = saved["single_partition_of_fp32_groups"]
    optimizer = sharding.optimizer
    base = saved["base_optimizer_state"]
    param_groups = base["param_groups"]
    if optimizer is not None and len(param_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer state: found {len(param_groups)} parameter groups, this run has {len(optimizer.param_groups)}; "
            "build the optimizer with the same groups"
        )
    if optimizer is not None:
        check_saved_state(optimizer, base["state"].values(), param_groups)
    if len(masters) != len(sharding.groups):
        raise CheckpointError(
            f"optimizer state: found {len(masters)} parameter groups, this run has {len(sharding.groups)}; "
            "build the optimizer with the same groups"
        )
    for index, (group, master) in enumerate(zip(sharding.groups, masters, strict=True)):
        start, stop = group.layout.partition(group.rank)
        if master.numel() not in (stop - start, stop - start - group.layout.padding(group.rank)):
            raise CheckpointError(
                f"optimizer state of group {index}: found a partition of {master.numel()} elements, this run has "
                f"{stop - start}; load it with the same model and the same number of ranks"
            )


def restore(sharding: Sharding, saved: dict[str, Any], *, load_optimizer_states: bool) -> None:
    """Put a collected state back: masters, and with `load_optimizer_states` also moments and param_groups."""
    check(sharding, saved)
    for group, master in zip(sharding.groups, saved["single_partition_of_fp32_groups"], strict=True):
        for shard in group.shards:
            shard.master.data.view(-1).copy_(_cut(master, group, shard.fragment.start, shard.fragment.numel))
    optimizer = sharding.optimizer
    if optimizer is None or not load_optimizer_states:
        return
    base = saved["base_optimizer_state"]
    for param_group, values in zip(optimizer.param_groups, base["param_groups"], strict=True):
        param_group.update({name: value for name, value in values.items() if name != "params"})
    for index, group in enumerate(sharding.groups):
        _unflatten_group(sharding, group, base["state"].get(index, {}))


def adopt(optimizer: Optimizer, group: FlatGroup) -> None:
    """Give each shard its share of the state that the user's optimizer has for the whole parameter, if any.

    Adagrad makes state when it is built; others have it when they stepped before `initialize`.
    """
    whole = {id(param): optimizer.state.pop(param) for param in group.params if param in optimizer.state}
    for shard in group.shards:
        state = whole.get(id(group.params[shard.fragment.param]))
        if state:
            shape = shape_of(group.params[shard.fragment.param])
            optimizer.state[shard.master] = {name: _share(value, shard, shape) for name, value in state.items()}


def _share(value: Any, shard: ParamShard, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != shape:
        return _owned(value, shard.master.device)
    start = shard.fragment.param_start
    piece = value.detach().reshape(-1)[start : start + shard.fragment.numel]
    return piece.to(shard.master.dtype, copy=True).view(shard.master.shape)


def _master_partition(group: FlatGroup) -> Tensor:
    if group.master_S is not None:
        return group.master_S.float()
    if group.flat_N is not None:
        return group.partition_of(group.flat_N).detach().float()
    return torch.cat([param.detach().reshape(-1).float() for param in group.params])


def _flatten_group(sharding: Sharding, group: FlatGroup) -> dict[str, Any]:
    optimizer = sharding.optimizer
    flat: dict[str, Any] = {}
    if optimizer is None:
        return flat
    held = [optimizer.state.get(shard.master, {}) for shard in group.shards]
    for name in {name: None for state in held for name in state}:  # each once, in order
        values = [state.get(name) for state in held]
        if _has_the_masters_shape(values, group.shards):
            flat[name] = _lay_end_to_end(values, group)
        elif all(_is_scalar(value) for value in values):
            flat[name] = next((value for value in values if value is not None), None)
            if any(value is None or value != flat[name] for value in values):
                flat.setdefault("parameter_scalars", {})[name] = _by_parameter(values, group)
        else:
            flat.setdefault("parameter_states", {})[name] = _by_parameter(values, group)
    return flat


def _by_parameter(values: list[Any], group: FlatGroup) -> dict[int, Any]:
    """The values of the shards keyed by parameter; the shards of one parameter are always updated together."""
    return {shard.fragment.param: value for shard, value in zip(group.shards, values, strict=True)}


def _has_the_masters_shape(values: list[Any], shards: list[ParamShard]) -> bool:
    """Whether a state has one number per element, for every shard that has it.

    One shard does not tell: a moment per row of a matrix has the size of the matrix's bias. Nor does a parameter of no
    dimensions, whose `step` looks like its moments.
    """
    present = [(value, shard) for value, shard in zip(values, shards, strict=True) if value is not None]
    fits = all(isinstance(value, Tensor) and value.shape == shard.master.shape for value, shard in present)
    return fits and any(value.dim() > 0 for value, _ in present)


def _lay_end_to_end(values: list[Any], group: FlatGroup) -> Tensor:
    start, stop = group.layout.partition(group.rank)
    like = next(value for value in values if value is not None)
    flat_S = torch.zeros(stop - start, dtype=like.dtype, device=like.device)
    for value, shard in zip(values, group.shards, strict=True):
        if value is not None:
            _cut(flat_S, group, shard.fragment.start, shard.fragment.numel).copy_(value.reshape(-1))
    return flat_S


def _unflatten_group(sharding: Sharding, group: FlatGroup, flat: dict[str, Any]) -> None:
    optimizer = sharding.optimizer
    assert optimizer is not None
    scalars = flat.get("parameter_scalars", {})
    odd = flat.get("parameter_states", {})
    for shard in group.shards:
        param = shard.fragment.param
        state: dict[str, Any] = {}
        for name, value in flat.items():
            if name in ("parameter_scalars", "parameter_states"):
                continue
            if name in scalars:
                value = scalars[name].get(param)
            elif isinstance(value, Tensor) and value.dim() > 0:
                value = _cut(value, group, shard.fragment.start, shard.fragment.numel).view(shard.master.shape)
            if value is not None:
                state[name] = _owned(value, shard.master.device)
        for name, values in odd.items():
            if values.get(param) is not None:
                state[name] = _owned(values[param], shard.master.device)
        if any(values.get(param) is None for values in scalars.values()):
            state = {}  # this parameter had never been updated
        optimizer.state.pop(shard.master, None)  # of steps that this run made before the load
        if state:
            optimizer.state[shard.master] = state


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _owned(value: Any, device: torch.device) -> Any:
    """A copy that the optimizer may change. Scalars, as Adam's `step`, stay where they were saved."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)


def _cut(partition_S: Tensor, group: FlatGroup, start: int, numel: int) -> Tensor:
    return partition_S.narrow(0, start - group.partition_start, numel)
