"""Loading a stage-3 checkpoint into an engine that shards other parameters (`stage3_param_persistence_threshold`).

A model file of stage 3 has an empty tensor for each parameter that was sharded at the save. What the optimizer trains
comes from the optimizer's shards, whether it was sharded or not. Of the others `frozen_param_fragments` has this rank's
part, or the whole parameter.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from deepspeed.checkpoint.stored_tensor import StoredTensor
from deepspeed.errors import CheckpointError
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.redistribute import part_of


def fit_module_state(module: Module, model_state: Mapping[str, Any], *, compares_shapes: bool = True) -> dict[str, Any]:
    """The weights of a model file, with the module's own value for each parameter that is whole on one side only.

    Args:
        module: its sharded parameters are released.
        model_state: content of the model file.
        compares_shapes: the file's are those of the parameters here; else of parts of a model divided otherwise.

    Raises:
        CheckpointError: a parameter that is sharded on both sides had another shape; nothing was changed.
    """
    saved = copy.copy(model_state["module"])
    shapes = saved_shapes(model_state)
    for name, param in module.named_parameters(remove_duplicate=False):
        value = saved.get(name)
        if not isinstance(value, Tensor | StoredTensor):
            continue
        was_sharded = value.numel() == 0
        shape = shapes.get(name) if was_sharded else value.shape
        if value.shape != param.shape and shape == shape_of(param):
            saved[name] = param.detach()
        elif compares_shapes and was_sharded and shape not in (None, shape_of(param)) and unit_of(param) is not None:
            raise CheckpointError(
                f"{name}: found shape {tuple(shape)}, and the model has {tuple(shape_of(param))}; build the model of "
                "the save"
            )
    return saved


def frozen_parts(module: Module, model_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of each parameter that no optimizer trains and that is sharded here, at the save, or both."""
    fragments = model_state.get("frozen_param_fragments") or {}
    shapes = saved_shapes(model_state)
    parts = {}
    for name, param in module.named_parameters():
        if name in fragments:
            was_sharded = model_state["module"][name].numel() == 0
            unit = unit_of(param)
            if was_sharded or fragments[name].shape != shapes[name]:  # a part; `mics_shard_size` 1 saves the whole, too
                parts[name] = fragments[name]
            elif unit is not None:
                parts[name] = part_of(fragments[name], unit.unit_ranks.everyone)
    return parts


def saved_shapes(model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Of the whole parameters, as they were saved; also under the names of shared ones."""
    groups = [*(model_state.get("param_shapes") or []), model_state.get("frozen_param_shapes") or {}]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    shared = model_state.get("shared_params") or {}
    return {**shapes, **{alias: shapes[name] for alias, name in shared.items() if name in shapes}}
