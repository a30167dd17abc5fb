"""A checkpoint of another number of ranks, another stage or another precision, as a run like this one would have saved
it. Called by `saving.py`, before anything is changed.
"""

import dataclasses
import math
from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.checkpoint import LoadedCheckpoint, StatesByName
from deepspeed.checkpoint.model_ranks import AcrossRanks
from deepspeed.checkpoint.saved_states import PARAM_NAMES, TorchStates, is_flat, states_of
from deepspeed.checkpoint.stored_tensor import StoredTensor
from deepspeed.engine.sharded_weights import saved_shapes
from deepspeed.engine.stored_weights import read_weights
from deepspeed.engine.training_state import TrainingState
from deepspeed.engine.unnamed_states import with_names
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import parts_held
from deepspeed.zero.named_states import SavedStates
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.redistribute import part_of, part_of_parts


def with_own_parts(found: LoadedCheckpoint, state: TrainingState, elsewhere: Collection[str]) -> LoadedCheckpoint:
    """`found` of a run that divided its model otherwise: with weights and states of the parts that this rank has.

    Args:
        elsewhere: names in the undivided model of what other ranks of this run have.
    """
    if not found.model_ranks:
        return found
    states = AcrossRanks(found.model_ranks, parts_held(state.module), elsewhere)
    return dataclasses.replace(found, stored=states.weights(), states=states)


def with_own_weights(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """`found`, whose `model_state` has what a rank of this run saves of parameters that no optimizer trains here."""
    if found.parts is None:
        return found
    if found.stored is not None:
        return read_weights(found, state, with_states=with_states)
    own, divided = found.model_state, _states_in(found, with_states=False)
    weights, fragments = dict(own["module"]), dict(own.get("frozen_param_fragments") or {})
    shapes, known = dict(own.get("frozen_param_shapes") or {}), saved_shapes(own)
    trained = set(state.sharding.params)
    for name, param in state.module.named_parameters():
        if param not in trained and (part := _own_part(name, param, found, divided)) is not None:
            fragments[name] = part
            if name not in known:
                shapes[name] = shape_of(param)
            if unit_of(param) is None:
                weights[name] = part
    frozen = {"frozen_param_fragments": fragments, "frozen_param_shapes": shapes}
    return dataclasses.replace(found, model_state={**own, "module": weights, **frozen})


def _own_part(name: str, param: Parameter, found: LoadedCheckpoint, divided: SavedStates) -> Tensor | None:
    """This rank's part of a parameter that is sharded here, else the whole. None: nothing is divided, or not there."""
    assert found.parts is not None
    own, unit = found.model_state, unit_of(param)
    rank, world_size = (unit.unit_ranks.everyone.rank, unit.unit_ranks.everyone.world_size) if unit else (0, 1)
    was_sharded = name in own["module"] and own["module"][name].numel() == 0
    fragment = (own.get("frozen_param_fragments") or {}).get(name)
    if fragment is not None:
        shape = torch.Size(own["frozen_param_shapes"][name])
        if not was_sharded and fragment.shape == shape:
            return None
        parts = [each["frozen_param_fragments"][name] for each in found.parts.model_states]
        part = part_of_parts(parts, shape, rank, world_size)
    elif was_sharded and name in divided.shapes:  # it was trained there
        shape = divided.shapes[name]
        part = torch.zeros(math.ceil(shape.numel() / world_size))
        values = divided.master(name, rank * part.numel(), part.numel())
        part[: values.numel()] = values
    elif unit is not None and name in own["module"]:
        value = own["module"][name]
        return part_of(value.whole() if isinstance(value, StoredTensor) else value, unit.unit_ranks.everyone)
    else:
        return None
    return part if unit is not None else part.view(shape)


def with_own_states(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """`found`, whose `by_name` has the master weights, and the optimizer's state, of what this rank did not save. It is
    None where the module has all weights, or for a state dict of torch as older versions wrote it.

    Args:
        with_states: the optimizer's state is to be restored, not only the weights.

    Raises:
        CheckpointError: they have no names, or are not whole.
    """
    if found.states is not None:
        if not (found.model_ranks[0].states is not None or with_states or state.sharding.stage == 3):
            return found
        return dataclasses.replace(found, by_name=StatesByName(found.states, found.model_ranks[0].loss_scaler))
    if with_states:
        found = with_names(found, state)
    parts, whole = found.parts, found.model_state.get("optimizer") or {}
    if parts is None:
        is_plain = whole and not (PARAM_NAMES in whole or is_flat(whole))
        if found.shard_state is not None or not with_states or (is_plain and not state.has_masters):
            return found
    elif not (parts.shard_states or with_states or state.sharding.stage == 3):
        return found
    saved_scaler = parts.shard_states[0] if parts is not None and parts.shard_states else whole
    by_name = StatesByName(_states_in(found, with_states=with_states), saved_scaler.get("loss_scaler"))
    return dataclasses.replace(found, by_name=by_name)


def _states_in(found: LoadedCheckpoint, *, with_states: bool) -> SavedStates:
    weights = found.model_state["module"] if found.stored is None else found.stored
    shards = found.parts.shard_states if found.parts is not None else ()
    if (states := states_of(found.model_state, shards, weights)) is not None:
        return states
    if with_states:
        raise CheckpointError(
            f"load {found.path}: found an optimizer state without the names of its parameters, as older versions "
            "wrote; load it once with the stage, precision and number of ranks of the save, and save it again"
        )
    return TorchStates(weights, {"state": {}, "param_groups": []}, [])
