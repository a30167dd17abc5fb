"""The optimizer's state of a checkpoint that DeepSpeed saved at stage 0, which has no names of parameters.

torch's state dict has them by their number in the optimizer's groups. It is taken by a run whose optimizer got its
parameters in the same order. In bf16 the master weights are beside it (`fp32_groups`). Called by `adapting.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint import LoadedCheckpoint, SavedParts
from deepspeed.checkpoint.saved_states import PARAM_NAMES
from deepspeed.engine.training_state import TrainingState
from deepspeed.errors import CheckpointError


def with_names(found: LoadedCheckpoint, state: TrainingState) -> LoadedCheckpoint:
    """`found`, whose optimizer's state has the names that this run's parameters have; others as they are.

    Raises:
        CheckpointError: this run trains other numbers of parameters, or of other shapes.
    """
    own = found.model_state
    whole = own.get("optimizer") or {}
    base = whole.get("optimizer_state_dict", whole)
    if PARAM_NAMES in whole or "param_groups" not in base or "+core" in str(own.get("ds_version")):
        return found
    by_id = {id(param): name for name, param in state.module.named_parameters()}
    names = [[by_id[id(param)] for param in group] for group in state.sharding.saved_parameters()]
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
