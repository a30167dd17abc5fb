"""The weights of another program's checkpoint, as a run like this one would have saved them, for `adapting.py`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.checkpoint import LoadedCheckpoint
from deepspeed.checkpoint.stored_tensor import StoredTensor
from deepspeed.engine.training_state import TrainingState
from deepspeed.errors import CheckpointError
from deepspeed.zero.param_unit import shape_of, unit_of


def read_weights(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """`found`, whose `model_state` has the weights that a rank of this run saves.

    Read are buffers, what no optimizer trains (of sharded parameters this rank's part), and trained parameters that are
    whole here. The latter come from the master weights where these are restored.

    Args:
        with_states: the optimizer's state, and so the master weights, are to be restored.

    Raises:
        CheckpointError: for parameters of other shapes; nothing was changed.
    """
    assert found.stored is not None
    params = dict(state.module.named_parameters(remove_duplicate=False))
    _check_shapes(found, params)
    trained = set(state.sharding.params)
    weights: dict[str, Any] = {}
    fragments: dict[str, Tensor] = {}
    for name, stored in found.stored.items():
        param = params.get(name)
        if param is not None and (unit_of(param) is not None or (with_states and param in trained)):
            weights[name] = param.detach()
            if param not in trained:
                fragments[name] = _part(stored, param)
        else:
            weights[name] = stored.whole()
    own = {
        **found.model_state,
        "module": weights,
        "frozen_param_fragments": fragments,
        "frozen_param_shapes": {name: found.stored[name].shape for name in fragments},
    }
    return dataclasses.replace(found, model_state=own)


def _part(stored: StoredTensor, param: Parameter) -> Tensor:
    """This rank's part of ceil(n / W) elements of a sharded parameter, 1-D, padded with zeros."""
    unit = unit_of(param)
    assert unit is not None
    ranks = unit.unit_ranks.everyone
    size = math.ceil(stored.numel() / ranks.world_size)
    first = min(size * ranks.rank, stored.numel())
    part = torch.zeros(size, dtype=param.dtype)
    values = stored.read(first, min(size, stored.numel() - first))
    part[: values.numel()] = values
    return part


def _check_shapes(found: LoadedCheckpoint, params: Mapping[str, Parameter]) -> None:
    assert found.stored is not None
    faults = [
        f"{name} is {tuple(stored.shape)} there and {tuple(shape_of(params[name]))} in the model"
        for name, stored in found.stored.items()
        if name in params and stored.shape != shape_of(params[name])
    ]
    if faults:
        raise CheckpointError(
            f"{found.path}: the weights are of another model: {'; '.join(faults[:6])}. Nothing was loaded; build the "
            "model of the save"
        )
