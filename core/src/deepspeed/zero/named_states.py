"""Restore master weights and optimizer states from `SavedStates`: of other ranks, another stage or another program.

Each rank reads the ranges of its shards, one shard at a time, and holds its own values plus those of one shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.errors import CheckpointError, counted
from deepspeed.optim.saved_state import (
    check_dtype,
    check_each_state,
    check_moment,
    check_needed,
    check_options,
    check_saved_state,
    check_state,
    is_moment,
)
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.placement import MASTER
from deepspeed.zero.state_dict import master_dtype, restore_param_groups
from deepspeed.zero.unit import owned_copy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from deepspeed.zero.sharding import Sharding
    from deepspeed.zero.unit import ParamShard

_SHOWN = 8  # names in one message


class SavedStates(ABC):
    """`SavedStates` gives access to the trained parameters of a checkpoint by their names."""

    shapes: Mapping[str, torch.Size]
    trained: frozenset[str]
    param_groups: Sequence[Mapping[str, Any]]  # without their parameters
    names: Sequence[Sequence[str]]  # of the parameters, by param group of the file
    are_by_group = False  # whether parameters that were never updated have states, too (except scalars)
    are_mapped = False  # whether files are memory-mapped, so that repeated reads cost one read

    @abstractmethod
    def master(self, name: str, start: int, numel: int) -> Tensor:
        """Return [numel] elements from `start` of the fp32 master weights."""

    @abstractmethod
    def dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """Return, by name, the dtypes of the states with one number per element of the parameter."""

    @abstractmethod
    def elements(self, name: str, state: str, start: int, numel: int) -> Tensor:
        """Return [numel] elements from `start` of a state that `dtypes` names."""

    @abstractmethod
    def scalars(self, name: str) -> Mapping[str, Any]:
        """Return the scalar states; empty for a parameter that was never updated."""

    @abstractmethod
    def others(self, name: str) -> Mapping[str, Tensor]:
        """Return the states of other shapes."""


def check(sharding: Sharding, saved: SavedStates, *, with_states: bool, strict: bool) -> None:
    """Refuse states of another model or of another kind of optimizer.

    Args:
        with_states: whether to restore optimizer states besides master weights; then this run must train the same
            parameters as the run that saved them.
        strict: if False and without states, parameters that `saved` lacks keep their master weights.

    Raises:
        CheckpointError: names the difference; nothing was changed.
    """
    names = _names(sharding)
    for param, name in names.items():
        if name in saved.shapes or with_states or strict:
            _check_shape(saved, name, shape_of(sharding.units.params[param]), with_states=with_states)
    optimizer = sharding.optimizer
    if not with_states or optimizer is None:
        return
    if rest := saved.trained - set(names.values()):
        raise CheckpointError(
            f"optimizer state: found {counted(len(rest), 'parameter')} that this run does not train "
            f"({', '.join(sorted(rest)[:_SHOWN])}); train the parameters that the checkpoint's run "
            "trained, or load with load_optimizer_states=False"
        )
    if len(saved.param_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer state: found {counted(len(saved.param_groups), 'parameter group')}, this run has "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups, or load with "
            "load_optimizer_states=False"
        )
    odd = {name: saved.others(name) for name in names.values()}
    states = [{**saved.dtypes(name), **saved.scalars(name), **its} for name, its in odd.items()]
    check_saved_state(optimizer, states, saved.param_groups)
    check_each_state(optimizer, states)
    check_options(optimizer, saved.param_groups)
    _check_needed(sharding, saved, names)
    for index, name in names.items():
        master = master_dtype(sharding.units.params[index].dtype)
        for key, dtype in saved.dtypes(name).items():
            check_dtype(key, dtype, name, master)
        check_state({**saved.scalars(name), **odd[name]}, name, numel=saved.shapes[name].numel(), dtype=master)
    if saved.are_mapped:
        _check_elements(sharding, saved, names)
    others = {key for its in odd.values() for key in its}
    if others and sharding.stage > 0 and not sharding.units.keeps_params_whole:
        raise CheckpointError(
            f"optimizer state {', '.join(sorted(others))}: found a shape that is not the parameter's, and stage "
            f"{sharding.stage} divides parameters; load it with the stage of the save"
        )


def _check_needed(sharding: Sharding, saved: SavedStates, names: Mapping[int, str]) -> None:
    """Check that states are complete. In states by group, a never updated parameter lacks the step count that others
    have; it is assumed here, since `_restore_state` skips such parameters."""
    optimizer = sharding.optimizer
    assert optimizer is not None
    for group in sharding.units.saved_groups:
        owner = next(each.param_group for each in sharding.units if each.first_index in group)
        states = [
            {**saved.dtypes(name), **saved.scalars(name), **saved.others(name)}
            for name in (names[index] for index in group)
        ]
        count = {"step": True} if saved.are_by_group and any("step" in state for state in states) else {}
        check_needed(optimizer, saved.param_groups[owner], [{**count, **state} for state in states])


def _check_elements(sharding: Sharding, saved: SavedStates, names: Mapping[int, str]) -> None:
    """Check sizes and ranges of the moments of this rank's shards; longer ones are padded, as in DeepSpeed's files."""
    for shard in _shards(sharding, names):
        name, fragment = names[shard.index], shard.fragment
        for key in filter(is_moment, saved.dtypes(name)):
            values = saved.elements(name, key, fragment.param_start, fragment.numel)
            dtype = master_dtype(sharding.units.params[shard.index].dtype)
            check_moment(key, values, name, numel=fragment.numel, dtype=dtype)


def _names(sharding: Sharding) -> dict[int, str]:
    """Return the names of the parameters that the optimizer has, by attached index."""
    names = {id(param): name for name, param in sharding.units.named_parameters}
    return {index: names[id(sharding.units.params[index])] for group in sharding.units.saved_groups for index in group}


def _check_shape(saved: SavedStates, name: str, shape: torch.Size, *, with_states: bool) -> None:
    if name not in saved.shapes:
        other = "load_optimizer_states=False" if with_states else "load_module_strict=False"
        raise CheckpointError(
            f"optimizer state: found none of the parameter {name}, which this run trains; train the parameters "
            f"that the checkpoint's run trained, or load with {other}"
        )
    if saved.shapes[name] != shape:
        raise CheckpointError(
            f"optimizer state of {name}: found shape {tuple(saved.shapes[name])}, and the model has "
            f"{tuple(shape)}; build the model of the save"
        )


def restore(sharding: Sharding, saved: SavedStates, *, with_states: bool) -> None:
    """Restore what `check` accepted; the caller calls `weights_from_masters` next. No collective."""
    sharding.states.wait_for_copy()
    names, optimizer = _names(sharding), sharding.optimizer
    if with_states and optimizer is not None:
        restore_param_groups(optimizer, saved.param_groups)
    for group in sharding.units.saved_groups:
        there = {index: names[index] for index in group if names[index] in saved.shapes}
        counted = _counted(saved, there.values())
        for shard in _shards(sharding, there):
            name, fragment = names[shard.index], shard.fragment
            master = saved.master(name, fragment.param_start, fragment.numel)
            shard.placement.write(shard, MASTER, shard.master, master)
            if with_states and optimizer is not None:
                _restore_state(optimizer, shard, saved, name, counted)


def _shards(sharding: Sharding, params: Collection[int]) -> Iterator[ParamShard]:
    """Yield this rank's shards of `params`, given by attached index."""
    return (shard for group in sharding.units for shard in group.shards if shard.index in params)


def _counted(saved: SavedStates, names: Iterable[str]) -> frozenset[str]:
    """Return the keys of the scalar states that updated parameters have."""
    return frozenset(key for name in names for key in saved.scalars(name))


def _restore_state(
    optimizer: Optimizer, shard: ParamShard, saved: SavedStates, name: str, counted: frozenset[str]
) -> None:
    optimizer.state.pop(shard.master, None)  # from steps of this run before the load
    scalars, device = saved.scalars(name), shard.master.device
    if not counted <= scalars.keys():
        return  # this parameter had never been updated
    start, numel = shard.fragment.param_start, shard.fragment.numel
    state: dict[str, Any] = {}
    for key, dtype in saved.dtypes(name).items():
        values = saved.elements(name, key, start, numel).view(shard.shape)
        state[key] = values.to(device, dtype, copy=True)  # also for a 0-D parameter
    rest: Mapping[str, Any] = {**scalars, **saved.others(name)}
    state.update({key: owned_copy(value, device) for key, value in rest.items() if value is not None})
    if state:
        optimizer.state[shard.master] = state
        shard.placement.put_away_state(shard, state)
