"""Convert a checkpoint of another number of ranks, stage, precision or program into the form that this run saves.

`saving.py` calls these functions before it changes anything. Three kinds of files need care:

- DeepSpeed's files of stage 0 name no parameters: torch's state dict numbers the optimizer states within its groups.
  A run can load them if its optimizer got the parameters in the same order. In bf16 the master weights are stored
  beside them (`fp32_groups`).
- Weights of another program have no optimizer states.
- A model file of stage 3 has an empty tensor for each parameter that was sharded at the save. This run may shard other
  parameters (`stage3_param_persistence_threshold`). Trained parameters are read from the optimizer's shards. For every
  other parameter, `frozen_param_fragments` has this rank's part or the whole parameter.

In the other direction, a save is converted to the keys and the division that DeepSpeed 0.19 loads (`checkpoint.format`
"deepspeed"). The file names and most keys are the same in both forms. DeepSpeed needs

    param_groups                 with `params`, the numbers of the groups' buffers
    loss_scaler                  an object; in stages 1 and 2 without one it keeps its configured scale
    stages 1, 2: master weights  without the padding that the optimizer states have
    stage 3: the base optimizer  under `optimizer_state_dict`
    stage 3: fp32_flat_groups    one buffer, and one state, per sub-group of `sub_group_size` elements of a rank
    stage 3: param_shapes        by sub-group
    stage 3: module              empty tensors for all parameters; this rank's part of the frozen ones
"""

import copy
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from deepspeed.checkpoint import LoadedCheckpoint, SavedParts, StatesByName
from deepspeed.checkpoint.deepspeed_files import constant_scaler
from deepspeed.checkpoint.model_ranks import AcrossRanks
from deepspeed.checkpoint.saved_states import PARAM_NAMES, TorchStates, is_flat, states_of
from deepspeed.checkpoint.tensors import StoredTensor
from deepspeed.engine.training_state import TrainingState
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import parts_held
from deepspeed.zero.named_states import SavedStates
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.redistribute import part_of, part_of_parts
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.state_dict import PER_PARAMETER, masters_key


def with_names(found: LoadedCheckpoint, state: TrainingState) -> LoadedCheckpoint:
    """Return `found` with this run's parameter names in its optimizer state; unchanged if it needs none.

    Raises:
        CheckpointError: this run trains another number of parameters, or parameters of other shapes.
    """
    own = found.model_state
    whole = own.get("optimizer") or {}
    base = whole.get("optimizer_state_dict", whole)
    if PARAM_NAMES in whole or "param_groups" not in base or "+core" in str(own.get("ds_version")):
        return found
    names = state.trained_names()
    _check_order(found.path, base, names, own["module"])
    masters = {
        name: tensor
        for its, group in zip(names, whole.get("fp32_groups", ()), strict=False)
        for name, tensor in zip(its, group, strict=True)
    }
    model_state = {
        **own,
        "module": {**own["module"], **masters},
        "optimizer": {"state": base["state"], "param_groups": base["param_groups"], PARAM_NAMES: names},
    }
    return dataclasses.replace(found, model_state=model_state, parts=SavedParts([model_state], []))


def _check_order(path: str, base: Mapping[str, Any], names: list[list[str]], weights: Mapping[str, Any]) -> None:
    saved, own = [len(group["params"]) for group in base["param_groups"]], list(map(len, names))
    if saved != own:
        raise CheckpointError(
            f"load {path}: found an optimizer state of groups of {saved} parameters without their names, and this run "
            f"trains groups of {own}; build the optimizer as in the run that saved it, or load_optimizer_states=False"
        )
    for group, its in zip(base["param_groups"], names, strict=True):
        for number, name in zip(group["params"], its, strict=True):
            moment = base["state"].get(number, {}).get("exp_avg")
            if moment is not None and name in weights and moment.shape != weights[name].shape:
                raise CheckpointError(
                    f"load {path}: found an optimizer state without names, whose number {number} has shape "
                    f"{tuple(moment.shape)}, and here that is {name} of {tuple(weights[name].shape)}; give the "
                    "optimizer its parameters in the order of the run that saved it, or load_optimizer_states=False"
                )


def read_weights(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """Return `found` with the weights that a rank of this run saves in its `model_state`.

    It reads the buffers, the untrained parameters (this rank's part of sharded ones), and the trained parameters that
    are whole here. If master weights are restored, trained parameters come from these instead.

    Args:
        with_states: whether the optimizer's state, and so the master weights, will be restored.

    Raises:
        CheckpointError: for parameters of other shapes; nothing was changed.
    """
    assert found.stored is not None
    params = dict(state.module.named_parameters(remove_duplicate=False))
    _check_shapes(found, params)
    trained = set(state.sharding.units.params)
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
    """Return this rank's part of a sharded parameter: ceil(n / W) elements, 1-D, padded with zeros."""
    unit = unit_of(param)
    assert unit is not None
    ranks = unit.unit_ranks.reduce_group
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


def fit_module_state(module: Module, model_state: Mapping[str, Any], *, compares_shapes: bool = True) -> dict[str, Any]:
    """Return the weights of a model file, with the module's own value of parameters that are whole on one side only.

    Args:
        module: its sharded parameters are released.
        model_state: content of the model file.
        compares_shapes: False if the file has parts of a model that was divided otherwise, so that shapes may differ.

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
    """Return this rank's part of each untrained parameter that is sharded here, was sharded at the save, or both."""
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
                parts[name] = part_of(fragments[name], unit.unit_ranks.reduce_group)
    return parts


def saved_shapes(model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the whole parameters as they were saved, also under the names of shared ones."""
    groups = [*(model_state.get("param_shapes") or []), model_state.get("frozen_param_shapes") or {}]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    shared = model_state.get("shared_params") or {}
    return {**shapes, **{alias: shapes[name] for alias, name in shared.items() if name in shapes}}


def with_own_parts(found: LoadedCheckpoint, state: TrainingState, elsewhere: Collection[str]) -> LoadedCheckpoint:
    """Return `found` with this rank's parts of the weights and states, if the saving run divided its model otherwise.

    Args:
        elsewhere: names, in the undivided model, of the weights and buffers that other ranks of this run have.
    """
    if not found.model_ranks:
        return found
    states = AcrossRanks(found.model_ranks, parts_held(state.module), elsewhere)
    return dataclasses.replace(found, stored=states.weights(), states=states)


def with_own_weights(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """Return `found` with its untrained parameters, in `model_state`, in the form that a rank of this run saves."""
    if found.parts is None:
        return found
    if found.stored is not None:
        return read_weights(found, state, with_states=with_states)
    own, divided = found.model_state, _states_in(found, with_states=False)
    weights, fragments = dict(own["module"]), dict(own.get("frozen_param_fragments") or {})
    shapes, known = dict(own.get("frozen_param_shapes") or {}), saved_shapes(own)
    trained = set(state.sharding.units.params)
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
    """Return this rank's part of a parameter sharded here, else the whole; None if undivided, or missing there."""
    assert found.parts is not None
    own, unit = found.model_state, unit_of(param)
    rank, world_size = (unit.unit_ranks.reduce_group.rank, unit.unit_ranks.reduce_group.world_size) if unit else (0, 1)
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
        return part_of(value.whole() if isinstance(value, StoredTensor) else value, unit.unit_ranks.reduce_group)
    else:
        return None
    return part if unit is not None else part.view(shape)


def with_own_states(found: LoadedCheckpoint, state: TrainingState, *, with_states: bool) -> LoadedCheckpoint:
    """Return `found` with `by_name`: the master weights, and the optimizer state, that this rank did not save itself.
    `by_name` is None if the module has all weights, or for a torch state dict as older versions wrote it.

    Args:
        with_states: whether the optimizer's state will be restored, and not only the weights.

    Raises:
        CheckpointError: the states have no names, or are incomplete.
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


def as_deepspeeds_shard(state: Mapping[str, Any], sharding: Sharding, sub_group_size: int) -> dict[str, Any]:
    """Return the content of a `*_optim_states.pt` in DeepSpeed's form.

    Args:
        sub_group_size: `zero_optimization.sub_group_size` of this run; the DeepSpeed run that loads must have it too.

    Raises:
        CheckpointError: the optimizer keeps a state per parameter, for which DeepSpeed's files have no place.
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
    """Return the content of a `*_model_states.pt`; the arguments are those of `as_deepspeeds_shard`."""
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
    """Return the number of elements that a rank has of each parameter of a group."""
    return [-(-shape.numel() // sharding.world_size) for shape in shapes]


def _places(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where a group's sub-groups begin and end, in parameters; each is filled until it has `limit` elements."""
    places, numel = [0], 0
    for place, size in enumerate(sizes, 1):
        numel += size
        if numel >= limit or place == len(sizes):
            places.append(place)
            numel = 0
    return places


def _cuts(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the boundaries of `_places` in elements."""
    ends = [0, *accumulate(sizes)]
    return [ends[place] for place in _places(sizes, limit)]


def _cut(flat: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return [_range(flat, first, stop) for first, stop in pairwise(cuts)]


def _range(value: Any, first: int, stop: int) -> Any:
    """Return a copy of a sub-group's range of a value: an optimizer that loads it increments its step in place."""
    if not isinstance(value, Tensor) or value.shape == (stop - first,):
        return value
    return value[first:stop].clone() if value.dim() > 0 else value.clone()
