"""What DeepSpeed 0.19 wrote, in the form in which this package writes it.

A file of DeepSpeed has objects of its own: the loss scaler and the stage, and the addresses of parameters in a shard.
They are loaded as plain records of their attributes; no other class of DeepSpeed is admitted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.consolidate_files import Attributes
from deepspeed.errors import CheckpointError
from deepspeed.precision.loss_scaler import LossScaler


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
