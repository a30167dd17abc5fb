"""A checkpoint of another number of ranks, another stage or another precision, as a run like this one would have saved
it. Called by `saving.py`, before anything is changed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.checkpoint import LoadedCheckpoint
from deepspeed.engine.training_state import TrainingState
from deepspeed.errors import CheckpointError
from deepspeed.zero.param_unit import unit_of
from deepspeed.zero.parameter_parts import part_of_parts
from deepspeed.zero.saved_states import DividedStates, SavedStates, TorchStates, state_for

#: under it, a state dict of stage 0 has the names of the optimizer's parameters
NAMES = "param_names"


def with_own_weights(found: LoadedCheckpoint, module: torch.nn.Module) -> LoadedCheckpoint:
    """`found`, whose `model_state` has what a rank of this run saves of parameters that no optimizer trains."""
    if found.parts is None:
        return found
    own = _with_frozen_of(found.parts.model_states, found.model_state, module)
    return dataclasses.replace(found, model_state=own)


def with_own_states(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """`found`, whose `shard_state` has the master weights, and the optimizer's state, that this rank needs. It stays
    None where the module has all weights, or for a state dict of torch as older versions wrote it.

    Args:
        with_states: the optimizer's state is to be restored, not only the weights.

    Raises:
        CheckpointError: it is of another model; nothing was changed.
    """
    parts, whole = found.parts, found.model_state.get("optimizer") or {}
    if parts is None:
        is_plain = whole and not (NAMES in whole or _is_flat(whole))
        if found.shard_state is not None or not with_states or (is_plain and not state.has_masters):
            return found
    elif not (parts.shard_states or with_states or state.sharding.stage == 3):
        return found
    divided = parts.shard_states if parts is not None else []
    source = _states_in(found, divided, with_states=with_states)
    shard = {**state_for(state.sharding, source), **_loss_scaler(divided[0] if divided else whole)}
    return dataclasses.replace(found, shard_state={"optimizer_state_dict": shard})


def _states_in(found: LoadedCheckpoint, divided: Sequence[Mapping[str, Any]], *, with_states: bool) -> SavedStates:
    groups = found.model_state.get("param_shapes") or []
    if divided:
        return DividedStates(divided, groups)
    whole, weights = found.model_state.get("optimizer") or {}, found.model_state["module"]
    if _is_flat(whole):
        return DividedStates([whole], groups)
    if NAMES in whole:
        return TorchStates(weights, whole, whole[NAMES])
    if with_states:
        raise CheckpointError(
            f"load {found.path}: found an optimizer state without the names of its parameters, as older versions "
            "wrote; load it once with the stage, precision and number of ranks of the save, and save it again"
        )
    return TorchStates(weights, {"state": {}, "param_groups": []}, [])


def _is_flat(whole: Mapping[str, Any]) -> bool:
    """Whether a state of stage 0 has master weights."""
    return "single_partition_of_fp32_groups" in whole


def _loss_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss_scaler": state["loss_scaler"]} if "loss_scaler" in state else {}


def _with_frozen_of(
    model_states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], module: torch.nn.Module
) -> dict[str, Any]:
    """The model state of a rank of stage 3, with parameters that no optimizer trains as this rank has them: its part of
    one that is sharded here, else the whole."""
    weights, fragments = dict(own["module"]), dict(own.get("frozen_param_fragments") or {})
    shapes = own.get("frozen_param_shapes") or {}
    params = dict(module.named_parameters())
    for name, shape in shapes.items():
        if name not in params or name not in fragments:
            continue  # it is not in this model, which is refused later, or was left out of the save
        was_sharded = weights[name].numel() == 0
        if not was_sharded and fragments[name].shape == shape:
            continue
        parts = [each["frozen_param_fragments"][name] for each in model_states]
        unit = unit_of(params[name])
        if unit is not None:
            ranks = unit.unit_ranks.everyone
            fragments[name] = part_of_parts(parts, torch.Size(shape), ranks.rank, ranks.world_size)
        else:
            weights[name] = fragments[name] = part_of_parts(parts, torch.Size(shape), 0, 1).view(shape)
    return {**own, "module": weights, "frozen_param_fragments": fragments}
