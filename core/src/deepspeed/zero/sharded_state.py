"""The state of stage 3 as plain values, with the keys of DeepSpeed's `*_optim_states.pt`, and back.

Per parameter group of the optimizer, this rank's part of it (`redistribute.in_parameters`), T elements:

    fp32_flat_groups        [T] the weights that the optimizer updates
    base_optimizer_state    {"state": {group: {name: [T] tensor or scalar}}, "param_groups": [...]}

Scalars such as Adam's `step` that differ between parameters lie in `parameter_scalars` by parameter. Saving and loading
are collectives: shards of units and parts in files are different divisions of the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.comm.values import all_gather_values
from deepspeed.errors import CheckpointError
from deepspeed.optim.saved_state import check_saved_state
from deepspeed.zero.redistribute import Run, in_parameters, padded_numel, redistribute

if TYPE_CHECKING:
    from deepspeed.zero.flat_group import ParamShard
    from deepspeed.zero.param_unit import ParamUnit
    from deepspeed.zero.stage3 import Stage3


class GroupState:
    """One parameter group of the optimizer: its parameters, and where their elements are here and in a file."""

    def __init__(self, sharding: Stage3, index: int) -> None:
        self._sharding = sharding
        groups = [group for group in sharding.groups if group.param_group == index]
        order = sharding.saved_order(index)  # parameters of the group, as attached indices
        place = {param: position for position, param in enumerate(order)}
        self.numels = [sharding.numel_of(param) for param in order]
        self.shards: list[ParamShard] = []  # of this rank
        self.params = order
        self._here: list[Run] = []
        offsets = [0] * sharding.world_size
        for group in groups:
            for fragment in group.layout.fragments:
                param = place[group.first_index + fragment.param]
                owner = fragment.owner
                self._here.append(Run(param, fragment.param_start, fragment.numel, owner, offsets[owner]))
                offsets[owner] += fragment.numel
            self.shards += group.shards
        self._numel_here = offsets[sharding.rank]
        self._in_file = in_parameters(self.numels, sharding.world_size)
        self.numel_in_file = padded_numel(self.numels, sharding.world_size)

    def to_file(self, values: list[Tensor | None], dtype: torch.dtype) -> Tensor:
        """[T], from one value per shard of this rank, None for zeros."""
        flat = torch.zeros(self._numel_here, dtype=dtype, device=self._device)
        start = 0
        for value, shard in zip(values, self.shards, strict=True):
            if value is not None:
                flat[start : start + shard.fragment.numel].copy_(value.detach().reshape(-1))
            start += shard.fragment.numel
        return redistribute(flat, self._here, self._in_file, self.numel_in_file, self._sharding.group)

    def from_file(self, part_T: Tensor) -> list[Tensor]:
        """One 1-D tensor per shard of this rank."""
        part_T = part_T.reshape(-1).to(self._device)
        flat = redistribute(part_T, self._in_file, self._here, self._numel_here, self._sharding.group)
        return list(flat.split([shard.fragment.numel for shard in self.shards]))

    @property
    def _device(self) -> torch.device:
        return self.shards[0].master.device if self.shards else torch.device("cpu")


def collect(sharding: Stage3) -> dict[str, Any]:
    """This rank's part of the state, in host memory. A collective."""
    optimizer = sharding.optimizer
    groups = [GroupState(sharding, index) for index in range(len(sharding.saved_parameters()))]
    return {
        "zero_stage": sharding.stage,
        "partition_count": sharding.world_size,
        "fp32_flat_groups": [
            group.to_file([shard.master for shard in group.shards], torch.float32).cpu() for group in groups
        ],
        "base_optimizer_state": {
            "state": {index: _collect_states(sharding, group) for index, group in enumerate(groups)},
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in (optimizer.param_groups if optimizer is not None else [])
            ],
        },
    }


def _collect_states(sharding: Stage3, group: GroupState) -> dict[str, Any]:
    optimizer = sharding.optimizer
    if optimizer is None:
        return {}
    held = [optimizer.state.get(shard.master, {}) for shard in group.shards]
    place = {param: position for position, param in enumerate(group.params)}
    kinds: dict[str, str] = {}
    scalars: dict[str, dict[str, float]] = {}
    for state, shard in zip(held, group.shards, strict=True):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == shard.master.shape and value.dim() > 0:
                kinds[name] = str(value.dtype).removeprefix("torch.")
            elif not isinstance(value, Tensor) or value.dim() == 0:
                scalars.setdefault(name, {})[str(place[shard.index])] = float(value)
    by_rank = all_gather_values([kinds, scalars], sharding.group)
    flat: dict[str, Any] = {}
    for name, dtype in sorted({item for theirs, _ in by_rank for item in theirs.items()}):
        values = [state.get(name) for state in held]
        flat[name] = group.to_file(values, getattr(torch, dtype)).cpu()
    for name in sorted({name for _, theirs in by_rank for name in theirs}):
        by_param = {int(key): value for _, theirs in by_rank for key, value in theirs.get(name, {}).items()}
        flat[name] = torch.tensor(next(iter(by_param.values())))
        if len(by_param) < len(group.params) or len(set(by_param.values())) > 1:
            flat.setdefault("parameter_scalars", {})[name] = by_param
    return flat


def check(sharding: Stage3, saved: dict[str, Any]) -> None:
    """Refuse a state of another model, another kind of optimizer, other groups or another number of ranks.

    Raises:
        CheckpointError: says what was found; nothing was changed.
    """
    optimizer = sharding.optimizer
    base, masters = saved["base_optimizer_state"], saved["fp32_flat_groups"]
    if len(masters) != len(sharding.saved_parameters()):
        raise CheckpointError(
            f"optimizer state: found {len(masters)} parameter groups, this run has {len(sharding.saved_parameters())}; "
            "build the optimizer with the same groups"
        )
    if optimizer is not None:
        check_saved_state(optimizer, base["state"].values(), base["param_groups"])
    for index, master in enumerate(masters):
        wanted = GroupState(sharding, index).numel_in_file
        if master.numel() != wanted:
            raise CheckpointError(
                f"optimizer state of group {index}: found a part of {master.numel()} elements, this run has {wanted}; "
                "load it with the same model and the same number of ranks"
            )


def restore(sharding: Stage3, saved: dict[str, Any], *, load_optimizer_states: bool) -> None:
    """Put a collected state back: masters, and with `load_optimizer_states` also moments and param_groups. A
    collective."""
    optimizer = sharding.optimizer
    base = saved["base_optimizer_state"]
    for index, master in enumerate(saved["fp32_flat_groups"]):
        group = GroupState(sharding, index)
        for shard, value in zip(group.shards, group.from_file(master), strict=True):
            shard.master.data.view(-1).copy_(value)
        if optimizer is not None and load_optimizer_states:
            values = base["param_groups"][index]
            optimizer.param_groups[index].update({name: each for name, each in values.items() if name != "params"})
            _restore_states(sharding, group, base["state"].get(index, {}))


def load_parts(unit: ParamUnit, parts: list[Tensor]) -> None:
    """Fill a unit from this rank's part of each of its parameters, as `saved_part` gave it. A collective."""
    runs = [
        Run(each.param, each.param_start, each.numel, each.owner, each.start - unit.layout.cuts[each.owner])
        for each in unit.layout.fragments
    ]
    flat = torch.cat([part.reshape(-1).to(unit.shard_S) for part in parts])
    before = in_parameters(unit.layout.numels, unit.ranks.world_size)
    unit.shard_S.copy_(redistribute(flat, before, runs, unit.shard_S.numel(), unit.ranks.group))


def _restore_states(sharding: Stage3, group: GroupState, flat: dict[str, Any]) -> None:
    optimizer = sharding.optimizer
    assert optimizer is not None
    scalars = flat.get("parameter_scalars", {})
    place = {param: position for position, param in enumerate(group.params)}
    by_name = {
        name: group.from_file(value) for name, value in flat.items() if isinstance(value, Tensor) and value.dim() > 0
    }
    for number, shard in enumerate(group.shards):
        optimizer.state.pop(shard.master, None)  # of steps that this run made before the load
        position = place[shard.index]
        if any(position not in values for values in scalars.values()):
            continue  # this parameter had never been updated
        state: dict[str, Any] = {
            name: values[number].clone().view(shard.master.shape) for name, values in by_name.items()
        }
        for name, value in flat.items():
            if name not in by_name and name != "parameter_scalars":
                value = scalars[name][position] if name in scalars else value
                state[name] = value.clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        if state:
            optimizer.state[shard.master] = state
