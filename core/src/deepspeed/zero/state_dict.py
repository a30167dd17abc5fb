"""Convert a stage's state to plain values with the keys of DeepSpeed's `*_optim_states.pt`, and back.

For each group of `Units.saved_groups`, a file has this rank's part of T elements:

    single_partition_of_fp32_groups   [T] the fp32 master weights (`fp32_flat_groups` in stage 3)
    base_optimizer_state              {"state": {group: {name: [T] tensor or scalar}}, "param_groups": [...]}

`params` of `param_groups` lists the numbers of its groups in the file if these differ from the optimizer's groups: a
group of the optimizer is divided by dtype and by the ranks that share its parameters (tied pipeline stages, say).

Files and units divide parameters differently, so saving and loading are collectives (`redistribute.py`). In stages 0 to
2 the parameters of a group lie end to end and are cut in W parts; in stage 3 each parameter is cut in W parts.

The optimizer keeps one state per shard of a parameter. State tensors of the shard's shape have the layout of the
weights. Scalars, such as Adam's `step`, are stored once; if parameters differ, they are also stored one by one under
`parameter_scalars`. A state of another shape (factored moments) is stored per parameter under `parameter_states`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm.values import all_gather_values, dtype_name
from deepspeed.errors import CheckpointError, counted
from deepspeed.optim.saved_state import (
    OF_PARAMETERS,
    check_each_state,
    check_needed,
    check_options,
    check_saved_state,
    check_state,
)
from deepspeed.optim.traits import kept_options
from deepspeed.zero.layout import Run, contiguous, even_cuts, in_parameters, parameter_cuts
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.placement import MASTER
from deepspeed.zero.redistribute import PendingTensor, pieces_of, redistribute
from deepspeed.zero.unit import owned_copy

if TYPE_CHECKING:
    from deepspeed.zero.sharding import Sharding
    from deepspeed.zero.unit import ParamShard, Unit


_WINDOW_NUMEL = 2**19  # per rank


@dataclass
class UnitWindow:
    """`UnitWindow` holds some units of a group whose elements move together."""

    shards: list[ParamShard] = field(default_factory=list)
    """The shards that this rank has of the window's units."""
    here: list[Run] = field(default_factory=list)
    """The runs of every copy of the weights; the shards of a rank lie end to end."""
    first_copy: list[Run] = field(default_factory=list)
    in_file: list[Run] = field(default_factory=list)
    numel: int = 0
    """The number of elements that the window has on all ranks together, without padding."""

    @property
    def numel_here(self) -> int:
        """Number of elements of this rank's shards."""
        return sum(shard.fragment.numel for shard in self.shards)


class SavedGroup:
    """`SavedGroup` is one group of a checkpoint: its parameters, and where their elements are here and in the files.

    Values move between the division of units and the division of files one window at a time, so that a save or a load
    needs little more memory than the file's part or the kept values.
    """

    def __init__(self, sharding: Sharding, index: int) -> None:
        self._sharding = sharding
        self.params = sharding.units.saved_groups[index]  # attached indices, in the order of the file
        #: index of the optimizer's param group with these parameters
        self.param_group = next(each.param_group for each in sharding.units if each.first_index in self.params)
        #: all ranks that hold the group's parameters; their files divide the group
        self.ranks = sharding.units.ranks.of(sharding.units.params[self.params[0]]).reduce_group
        self._ranks = None if sharding.stage == 0 else self.ranks
        self.place = {param: position for position, param in enumerate(self.params)}
        self.shapes = [shape_of(sharding.units.params[param]) for param in self.params]
        self.numels = [shape.numel() for shape in self.shapes]
        self.in_file, self.numel_in_file = self._divide_for_file()
        rank = self.ranks.rank if sharding.stage > 0 else 0
        own = sum(run.numel for run in self.in_file if run.owner == rank)
        self.padding = self.numel_in_file - own  # elements of this rank's part outside of all parameters
        self.windows = list(self._divide_in_windows())
        self.shards = [shard for window in self.windows for shard in window.shards]  # this rank's shards

    def _divide_for_file(self) -> tuple[list[Run], int]:
        sharding, world_size = self._sharding, self.ranks.world_size
        if sharding.stage == 3:
            size = sum(math.ceil(numel / world_size) for numel in self.numels)
            return in_parameters(self.numels, world_size), size
        if sharding.stage == 0:
            return contiguous(self.numels, (0, sum(self.numels))), sum(self.numels)
        cut = parameter_cuts if sharding.units.keeps_params_whole else even_cuts
        cuts = cut(self.numels, world_size)
        return contiguous(self.numels, cuts), cuts[self.ranks.rank + 1] - cuts[self.ranks.rank]

    def _divide_in_windows(self) -> Iterator[UnitWindow]:
        in_file: dict[int, list[Run]] = {}
        for run in self.in_file:
            in_file.setdefault(run.param, []).append(run)
        window, used = UnitWindow(), dict[int, int]()  # number of elements by owner
        for unit in self._sharding.units:
            if unit.first_index in self.place:
                numel = sum(unit.layout.numels)
                if window.numel and window.numel + numel > _WINDOW_NUMEL * self.ranks.world_size:
                    yield window
                    window, used = UnitWindow(), {}
                self._add(unit, window, used, in_file)
        yield window

    def _add(self, unit: Unit, window: UnitWindow, used: dict[int, int], in_file: Mapping[int, list[Run]]) -> None:
        for each in unit.layout.fragments:
            param, offset = self.place[unit.first_index + each.param], used.get(each.owner, 0)
            runs = [
                Run(param, each.param_start, each.numel, holder, offset) for holder in unit.ranks.holders(each.owner)
            ]
            window.here += runs
            window.first_copy.append(runs[0])
            used[each.owner] = offset + each.numel
        for number in range(len(unit.params)):
            window.in_file += in_file[self.place[unit.first_index + number]]
        window.shards += unit.shards
        window.numel += sum(unit.layout.numels)

    def owners(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the rank that has a parameter, by place: here and in the files. Only for undivided parameters."""
        here = {run.param: run.owner for window in self.windows for run in window.here}
        return here, {run.param: run.owner for run in self.in_file}

    def to_file(self, values: Iterable[Tensor | None], dtype: torch.dtype, *, is_held: bool | None = None) -> Any:
        """Return [T] from one value per shard of this rank (None: zeros); an iterator is read one value at a time.

        Args:
            is_held: `is_held` of the `PendingTensor` that is returned for values in host memory; None: a tensor.
        """
        device = self.shards[0].master.device if self.shards else torch.device("cpu")
        if is_held is not None and device.type == "cpu" and not any(shard.placement.fetches for shard in self.shards):
            pieces = list(self._pieces(iter(values), dtype))
            return PendingTensor(torch.Size([self.numel_in_file]), dtype, pieces, is_held)
        part_T = self._sharding.placement.scratch(self.numel_in_file, dtype, device)
        remaining = iter(values)
        for window in self.windows:
            flat = torch.zeros(window.numel_here, dtype=dtype, device=device)
            numels = [shard.fragment.numel for shard in window.shards]
            for place, value in zip(flat.split(numels), remaining, strict=False):
                if value is not None:
                    place.copy_(value.detach().reshape(-1))
            redistribute(flat, window.first_copy, window.in_file, part_T, self._ranks)
        return part_T

    def _pieces(self, values: Iterator[Tensor | None], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's part of the file in pieces: the offset of each piece in the part, and its values."""
        for window in self.windows:
            sources, start = [], 0
            for shard in window.shards:
                numel, value = shard.fragment.numel, next(values)
                found = torch.zeros(numel, dtype=dtype) if value is None else value.detach().reshape(-1)
                sources.append((start, found.to("cpu", dtype)))
                start += numel
            yield from pieces_of(sources or [(0, torch.zeros(0, dtype=dtype))], window.first_copy, window.in_file,
                                 self._ranks)  # fmt: skip

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the group's master weights in files, the same on all ranks."""
        return master_dtype(self._sharding.units.params[self.params[0]].dtype)

    @property
    def has_masters(self) -> bool:
        """Whether all master weights have memory separate from the model's weights."""
        return all(shard.has_master for shard in self.shards)

    def masters(self) -> Iterator[Tensor]:
        """Yield the master weights of this rank's shards."""
        return (shard.placement.read(shard, MASTER, shard.master) for shard in self.shards)

    def states(self, name: str, held: Sequence[Mapping[str, Any]]) -> Iterator[Tensor | None]:
        """Yield the state `name` of this rank's shards from the optimizer states `held`, one per shard."""
        return (
            shard.placement.read(shard, name, state[name]) if name in state else None
            for shard, state in zip(self.shards, held, strict=True)
        )

    def from_file(self, part_T: Tensor, window: UnitWindow) -> list[Tensor]:
        """Return one 1-D tensor per shard of this rank in a window."""
        flat = part_T.new_zeros(window.numel_here)
        redistribute(part_T.reshape(-1), window.in_file, window.here, flat, self._ranks)
        return list(flat.split([shard.fragment.numel for shard in window.shards]))


#: keys in a group's states whose values are dicts by parameter
PER_PARAMETER = ("parameter_scalars", "parameter_states")


def collect(sharding: Sharding, *, is_pending: bool = False) -> dict[str, Any]:
    """Return the state dict of a stage. A collective, except in stage 0.

    Args:
        is_pending: return `PendingTensor`s in place of tensors in host memory. Master weights that are also the model's
            weights are not held, because users change them.
    """
    sharding.states.take_outside_changes()
    optimizer = sharding.optimizer
    groups = [SavedGroup(sharding, index) for index in range(len(sharding.units.saved_groups))]
    param_groups = optimizer.param_groups if optimizer is not None else []
    counts = [group.ranks.world_size if sharding.stage > 0 else 1 for group in groups]
    groups_in_file = [{name: value for name, value in group.items() if name != "params"} for group in param_groups]
    owners = [group.param_group for group in groups]
    if owners != list(range(len(param_groups))):
        for index, in_file in enumerate(groups_in_file):
            in_file["params"] = [number for number, owner in enumerate(owners) if owner == index]
    masters = [
        group.to_file(group.masters(), group.master_dtype, is_held=group.has_masters if is_pending else None)
        for group in groups
    ]
    states = {index: _collect_states(sharding, group, is_pending) for index, group in enumerate(groups)}
    return {
        "zero_stage": sharding.stage,
        "partition_count": sharding.world_size if sharding.stage == 3 else counts,
        "group_paddings": [group.padding for group in groups],
        masters_key(sharding.stage): masters,
        "base_optimizer_state": {"state": states, "param_groups": groups_in_file},
    }


def masters_key(stage: int) -> str:
    """Return the key of the master weights in a file."""
    return "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"


def _collect_states(sharding: Sharding, group: SavedGroup, is_pending: bool) -> dict[str, Any]:
    optimizer = sharding.optimizer
    if optimizer is None:
        return {}
    held = [optimizer.state.get(shard.master, {}) for shard in group.shards]
    names = list(dict.fromkeys(name for state in held for name in state))
    by_element = {name for name in names if _has_the_masters_shape([state.get(name) for state in held], group.shards)}
    dtypes, scalars, odd = {}, {}, {}
    for name in names:
        present = {group.place[shard.index]: state[name] for state, shard in zip(held, group.shards, strict=True)
                   if name in state}  # fmt: skip
        if name in by_element:
            dtypes[name] = dtype_name(next(iter(present.values())).dtype)
        elif all(map(_is_scalar, present.values())):
            scalars[name] = {str(place): _packed(value) for place, value in present.items()}
        else:
            odd[name] = present
    facts = _gathered(sharding, group, [names, dtypes, scalars])
    flat: dict[str, Any] = {}
    for name in dict.fromkeys(name for theirs, _, _ in facts for name in theirs):
        dtype = next((theirs[name] for _, theirs, _ in facts if name in theirs), None)
        by_param = {int(place): value for _, _, theirs in facts for place, value in theirs.get(name, {}).items()}
        if dtype is not None:
            values = group.states(name, held)
            flat[name] = group.to_file(values, getattr(torch, dtype), is_held=is_pending or None)
        elif by_param:
            _put_scalars(flat, name, {place: _unpacked(value) for place, value in by_param.items()}, len(group.params))
        else:
            moved = _move_by_parameter(sharding, group, name, odd.get(name, {}), to_file=True)
            flat.setdefault("parameter_states", {})[name] = moved
    return flat


def _put_scalars(flat: dict[str, Any], name: str, by_param: Mapping[int, Any], num_params: int) -> None:
    """Add a scalar state to a group's states: once, and also one by one if parameters differ or lack it.

    Args:
        by_param: values by the place of the parameter in its group.
    """
    flat[name] = first = next(iter(by_param.values()))
    if len(by_param) < num_params or any(value != first for value in by_param.values()):
        flat.setdefault("parameter_scalars", {})[name] = {place: by_param[place] for place in sorted(by_param)}


def check(sharding: Sharding, saved: dict[str, Any], *, with_states: bool) -> None:
    """Refuse a state of another model, another kind of optimizer, other groups or another division.

    Args:
        with_states: whether to restore optimizer states besides master weights.

    Raises:
        CheckpointError: names the difference; nothing was changed.
    """
    if lacking := [key for key in (masters_key(sharding.stage), "base_optimizer_state") if key not in saved]:
        raise CheckpointError(
            f"optimizer state: found the keys {', '.join(map(str, saved)) or 'none'}, and no {lacking[0]!r}, which has "
            f"this rank's part at zero_optimization.stage {sharding.stage}; load what state_dict() of the engine's "
            "optimizer gave at this stage, or call engine.load_checkpoint(folder)"
        )
    masters = saved[masters_key(sharding.stage)]
    optimizer = sharding.optimizer
    base = saved["base_optimizer_state"]
    param_groups = base["param_groups"]
    if with_states and optimizer is not None and len(param_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer state: found {counted(len(param_groups), 'parameter group')}, this run has "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups, or load with "
            "load_optimizer_states=False"
        )
    if with_states and optimizer is not None:
        check_saved_state(optimizer, base["state"].values(), param_groups)
        check_each_state(optimizer, base["state"].values())
        check_options(optimizer, param_groups)
    if len(masters) != len(sharding.units.saved_groups):
        raise CheckpointError(
            f"optimizer state: found {counted(len(masters), 'parameter group')}, this run has "
            f"{len(sharding.units.saved_groups)}; build the optimizer with the same groups, or load with "
            "load_optimizer_states=False"
        )
    for index, master in enumerate(masters):
        group = SavedGroup(sharding, index)
        if master.numel() not in (group.numel_in_file, group.numel_in_file - group.padding):
            raise CheckpointError(
                f"optimizer state of group {index}: found a partition of {counted(master.numel(), 'element')}, this "
                f"run has {group.numel_in_file}; build the model of the save, or load with load_optimizer_states=False"
            )
        if with_states and optimizer is not None:
            flat = base["state"].get(index, {})
            _check_values(flat, index, master)
            check_needed(optimizer, param_groups[group.param_group], [flat])


def _check_values(flat: Mapping[str, Any], index: int, master: Tensor) -> None:
    """Check types, sizes and ranges of a group's states, including those stored one by one."""
    scalars, odd = flat.get("parameter_scalars", {}), flat.get("parameter_states", {})
    kept = {name: value for name, value in flat.items() if name not in PER_PARAMETER and name not in scalars}
    check_state(kept, f"group {index}", numel=master.numel(), dtype=master.dtype)
    for by_name in (scalars, odd):
        for name, values in by_name.items():
            for place, value in values.items():
                check_state({name: value}, f"parameter {place} of group {index}", dtype=master.dtype)


def restore(sharding: Sharding, saved: dict[str, Any], *, load_optimizer_states: bool) -> None:
    """Restore a state that `check` accepted: master weights, and with `load_optimizer_states` also moments and
    param_groups. A collective, except in stage 0. The caller calls `Sharding.weights_from_masters` next."""
    sharding.states.wait_for_copy()
    optimizer = sharding.optimizer
    base = saved["base_optimizer_state"]
    if optimizer is not None and load_optimizer_states:
        restore_param_groups(optimizer, base["param_groups"])
    for index, master in enumerate(saved[masters_key(sharding.stage)]):
        group = SavedGroup(sharding, index)
        flat = base["state"].get(index, {})
        odd: dict[str, dict[int, Any]] = {}
        if optimizer is not None and load_optimizer_states:
            for name, values in flat.get("parameter_states", {}).items():
                odd[name] = _move_by_parameter(sharding, group, name, values, to_file=False)
        for window in group.windows:
            for shard, value in zip(window.shards, group.from_file(master, window), strict=True):
                shard.placement.write(shard, MASTER, shard.master, value)
            if optimizer is not None and load_optimizer_states:
                _restore_states(optimizer, group, window, flat, odd)


def load(sharding: Sharding, saved: dict[str, Any], *, load_optimizer_states: bool = True) -> None:
    """Load master weights and optimizer state of a run with the same stage and number of ranks. A collective.

    Raises:
        CheckpointError: names the difference; nothing was changed.
    """
    check(sharding, saved, with_states=True)
    restore(sharding, saved, load_optimizer_states=load_optimizer_states)
    sharding.weights_from_masters()
    sharding.options.stage.restore_rounding(sharding.units, None)


def restore_param_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of the optimizer's groups from saved ones, except parameters and options that it keeps."""
    left = {*OF_PARAMETERS, *kept_options(optimizer)}
    for param_group, values in zip(optimizer.param_groups, saved, strict=True):
        param_group.update({name: value for name, value in values.items() if name not in left})


def _restore_states(
    optimizer: Optimizer, group: SavedGroup, window: UnitWindow, flat: dict[str, Any], odd: dict[str, dict[int, Any]]
) -> None:
    """Set the optimizer's states of this rank's shards in `window`.

    Args:
        flat: the file's states of the group.
        odd: the states with other shapes than their parameters, by name and by the place of this rank's parameters.
    """
    scalars = flat.get("parameter_scalars", {})
    by_name = {
        name: group.from_file(value, window)
        for name, value in flat.items()
        if name not in scalars and isinstance(value, Tensor) and value.dim() > 0
    }
    for number, shard in enumerate(window.shards):
        optimizer.state.pop(shard.master, None)  # from steps of this run before the load
        place = group.place[shard.index]
        if any(values.get(place) is None for values in scalars.values()):
            continue  # this parameter had never been updated
        state: dict[str, Any] = {}
        for name, value in flat.items():
            if name in by_name:
                part = by_name[name][number].view(shard.shape)
                state[name] = part.to(shard.master.device, copy=True)  # also for a 0-D parameter
            elif name not in PER_PARAMETER:
                own = scalars[name][place] if name in scalars else value
                if own is not None:
                    state[name] = owned_copy(own, shard.master.device)
        for name, values in odd.items():
            if values.get(place) is not None:
                state[name] = owned_copy(values[place], shard.master.device)
        if state:
            optimizer.state[shard.master] = state
            shard.placement.put_away_state(shard, state)


def _move_by_parameter(
    sharding: Sharding, group: SavedGroup, name: str, values: dict[int, Any], *, to_file: bool
) -> dict[int, Any]:
    """Move states of odd shapes, by parameter, to the rank that has the parameter in the other division.

    Raises:
        CheckpointError: if parameters are divided, so that no rank has the state of a whole parameter.
    """
    if sharding.stage == 0:
        return values
    if not sharding.units.keeps_params_whole:
        raise CheckpointError(
            f"optimizer state {name!r}: found a shape that is not the parameter's, and stage {sharding.stage} divides "
            "parameters; save it with stage 0"
        )
    mine = {str(place): [list(value.shape), dtype_name(value.dtype)] for place, value in values.items()}
    known = {int(place): what for theirs in _gathered(sharding, group, mine) for place, what in theirs.items()}
    here, in_file = group.owners()
    source, target = (here, in_file) if to_file else (in_file, here)
    moved: dict[int, Any] = {}
    for place in sorted(known):
        shape, dtype = torch.Size(known[place][0]), getattr(torch, known[place][1])
        value = values.get(place)
        flat = value.reshape(-1).contiguous() if value is not None else torch.empty(0, dtype=dtype)
        before, after = [Run(0, 0, shape.numel(), owner[place], 0) for owner in (source, target)]
        is_mine = target[place] == group.ranks.rank
        result = flat.new_zeros(shape.numel() if is_mine else 0)
        redistribute(flat, [before], [after], result, group.ranks)
        if is_mine:
            moved[place] = (flat if source[place] == target[place] else result).view(shape)
    return moved


def _gathered(sharding: Sharding, group: SavedGroup, value: Any) -> list[Any]:
    """Return the values of all ranks with other parts of a group; in stage 0 every rank has everything."""
    return [value] if sharding.stage == 0 else all_gather_values(value, backend=group.ranks)


def _packed(value: Any) -> list[Any]:
    """Return a scalar as JSON together with its dtype."""
    return [dtype_name(value.dtype), value.item()] if isinstance(value, Tensor) else ["", value]


def _unpacked(packed: list[Any]) -> Any:
    kind, value = packed
    return torch.tensor(value, dtype=getattr(torch, kind)) if kind else value


def _has_the_masters_shape(values: list[Any], shards: list[ParamShard]) -> bool:
    """Return whether a state has one number per element in every shard that has the state.

    A single shard does not show it: a moment per row of a matrix has the size of the matrix's bias. Nor does a 0-D
    parameter, whose `step` looks like its moments. States in swap files are as empty as their master weights.
    """
    present = [(value, shard) for value, shard in zip(values, shards, strict=True) if value is not None]
    fits = all(
        isinstance(value, Tensor) and value.shape in (shard.shape, shard.master.shape) for value, shard in present
    )
    return fits and any(value.dim() > 0 for value, _ in present)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of master weights in checkpoints, for parameters of `dtype`.

    This is fp32, or for a wider or complex `dtype` the result of torch's promotion with fp32.
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else torch.float32
