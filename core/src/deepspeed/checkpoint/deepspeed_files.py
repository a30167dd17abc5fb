"""What DeepSpeed 0.19 wrote, in the form in which this package writes it.

A file of DeepSpeed has objects of its own: the loss scaler and the stage, and the addresses of parameters in a shard.
They are loaded as plain records of their attributes; no other class of DeepSpeed is admitted.

`named_by_stage` names the optimizer's states of pipeline stages that DeepSpeed saved without ZeRO. torch's state dict
has their parameters by numbers: of a stage the shared modules first, then the layers in order. Which layers a stage
has, is in no file. It follows from how many parameters each stage has, and is taken where their shapes fit too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.consolidate_files import MODULE_FILES, Attributes
from deepspeed.checkpoint.saved_states import PARAM_NAMES
from deepspeed.errors import CheckpointError
from deepspeed.precision.policy import LossScaler


def is_deepspeeds(shard: Mapping[str, Any]) -> bool:
    """Whether an `optimizer_state_dict` is in DeepSpeed's form: written by it, or for it (`checkpoint.format`)."""
    return isinstance(shard.get("loss_scaler"), Attributes) or "loss_scale_state" in shard


def as_own_shard(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The `optimizer_state_dict` in the content of a shard's file `path`, with our keys and plain values.

    Raises:
        CheckpointError: it is an elastic checkpoint, which has no whole states of groups.
    """
    shard: dict[str, Any] = state["optimizer_state_dict"]
    if not is_deepspeeds(shard):
        return shard
    own = {**shard, "loss_scaler": loss_scale_in(shard), "zero_stage": int(shard["zero_stage"])}
    if "optimizer_state_dict" in own:  # so it is called in stage 3
        own["base_optimizer_state"] = own.pop("optimizer_state_dict")
    found = own.get("base_optimizer_state")
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path}: found base_optimizer_state as a {type(found).__name__}, which DeepSpeed writes with "
            "elastic_checkpoint; save it with elastic_checkpoint false"
        )
    return own


def loss_scale_in(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the loss scaler in what DeepSpeed wrote, or what was written for it; None where it has none."""
    found = state.get("loss_scale_state", state.get("loss_scaler"))
    return dict(vars(found) if isinstance(found, Attributes) else found) if found is not None else None


def constant_scaler() -> LossScaler:
    """What DeepSpeed has without fp16, and wants in files of stage 3."""
    scaler = LossScaler.__new__(LossScaler)
    vars(scaler).update(cur_scale=1.0, dynamic=False)
    return scaler


_TIED = "tied_modules."
_Model = dict[str, Any]


def named_by_stage(ranks: Sequence[dict[int, _Model]], layers: Mapping[int, str] | None) -> list[dict[int, _Model]]:
    """The contents of model files, by data-parallel rank, of each model-parallel rank; with names if they have none.

    Args:
        layers: as in `load.Position`.
    """
    models = [states[0] for states in ranks]
    groups = [(model.get("optimizer") or {}).get("param_groups", []) for model in models]
    is_whole = all(
        model.get("param_shapes") is None and PARAM_NAMES not in (model["optimizer"] or {}) for model in models
    )
    if not is_whole or any(len(its) != 1 for its in groups):
        return list(ranks)
    wanted = [len(its[0]["params"]) for its in groups]
    names = next((each for each in _cut(_layers_of(models[0], models, layers), wanted) if _fit(each, models)), None)
    if names is None:
        return list(ranks)
    return [
        {**states, 0: {**states[0], "optimizer": {**states[0]["optimizer"], PARAM_NAMES: [its]}}}
        for states, its in zip(ranks, names, strict=True)
    ]


def _layers_of(model: _Model, models: Sequence[_Model], layers: Mapping[int, str] | None) -> list[list[str]]:
    """The names of the parameters of each layer that has some."""
    buffers = {name for each in models for name in each.get("buffer_names") or ()}
    found = {}
    for file, names in model.get(MODULE_FILES, {}).items():
        if match := re.match(r"layer_(\d+)-", file):
            found[int(match[1])] = [name for name in names.values() if name not in buffers]
    params = [name for name in model["module"] if name not in buffers]
    for number, prefix in (layers or {}).items():
        if prefix.startswith(_TIED):
            found[number] = [name for name in params if name.startswith(prefix)]
    return [names for _, names in sorted(found.items()) if names]


def _cut(layers: Sequence[list[str]], wanted: Sequence[int]) -> Iterator[list[list[str]]]:
    """Every division of layers into stages with so many parameters: the names of each stage, in its order."""
    if not wanted:
        if not layers:
            yield []
        return
    for stop in range(1, len(layers) + 1):
        held = dict.fromkeys(name for its in layers[:stop] for name in its)
        if len(held) > wanted[0]:
            return
        if len(held) == wanted[0]:
            own = sorted(held, key=lambda name: not name.startswith(_TIED))
            yield from ([own, *rest] for rest in _cut(layers[stop:], wanted[1:]))


def _fit(names: Sequence[Sequence[str]], models: Sequence[_Model]) -> bool:
    """Whether the states of each stage have the shapes of the parameters."""
    for its, model in zip(names, models, strict=True):
        (group,) = model["optimizer"]["param_groups"]
        for number, name in zip(group["params"], its, strict=True):
            moment = model["optimizer"]["state"].get(number, {}).get("exp_avg")
            if isinstance(moment, Tensor) and moment.shape != model["module"][name].shape:
                return False
    return True
