"""Weights for use elsewhere: state dicts and 16-bit model files. Called by the engine's methods."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import Checkpointer, save_state_dict_file
from deepspeed.engine.module_state import check_module_state, fill_module
from deepspeed.log import log_dist
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.zero.param_unit import unit_of, whole_in_turn


def module_state_dict(
    module: torch.nn.Module,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
    *,
    exclude_frozen: bool = False,
) -> dict[str, Any]:
    """The module's state dict, on request without frozen parameters."""
    state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # type: ignore[arg-type,type-var]
    if exclude_frozen:
        for name, param in module.named_parameters():
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module(module: torch.nn.Module, weights: dict[str, Any], *, strict: bool, custom_load_fn: Any = None) -> None:
    """Load weights into the module.

    Raises:
        CheckpointError: for weights of another model; nothing was changed.
    """
    if custom_load_fn is None:
        check_module_state(module, weights, strict=strict, source="load_module_state_dict")
    fill_module(module, weights, strict=strict, custom_load_fn=custom_load_fn)


def save_weights(weights: Mapping[str, Any] | None, path: Path, checkpointer: Checkpointer) -> None:
    """Write whole weights, which one rank has; all ranks call it, and fail together."""

    def write() -> None:
        if weights is not None:
            save_state_dict_file(weights, path)

    checkpointer.together(write, f"save {path.name} in {path.parent}")


def gathered(module: torch.nn.Module, *, keeps: bool, exclude_frozen: bool) -> dict[str, Any] | None:
    """The module's state dict, in which sharded weights are whole and in host memory; names of one weight share it.

    Weights that layers store in few bits are the numbers that they stand for, of the type that they had.

    A collective where weights are sharded: they are gathered one unit at a time, on every rank.

    Args:
        keeps: whether this rank gets the result; others get None.
    """
    progress = ProgressLog("gather the weights of the model")
    state = module_state_dict(module, keep_vars=True, exclude_frozen=exclude_frozen)
    tensors = {id(value): value for value in state.values() if isinstance(value, Tensor)}
    layers = [each for each in module.modules() if isinstance(each, StoredLayer)]
    stored = {id(each.get_parameter(name)): (each, name) for each in layers for name in each.forms}

    def numbers(key: int, weight: Tensor) -> Tensor:
        if key not in stored:
            return weight.detach()
        layer, name = stored[key]
        return layer.values(weight, name=name)

    sharded = [value for value in tensors.values() if unit_of(value) is not None]
    whole = {key: value for key, value in tensors.items() if unit_of(value) is None}
    copies = {key: numbers(key, value) for key, value in whole.items()}
    for param, weights in whole_in_turn(sharded):
        if keeps:
            copies[id(param)] = numbers(id(param), weights).to("cpu", copy=True)
        progress.advance(len(sharded))
    return {name: copies.get(id(value), value) for name, value in state.items()} if keeps else None


def owned(weights: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """`weights` of `module` in host memory, each in a storage of its own; names of one weight share it.

    What libraries write to safetensors must be so: they keep one name of each storage, and small weights of the engine
    are views of one flat tensor.
    """
    live = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}

    def own(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        is_own = value.device.type == "cpu" and storage.nbytes() == value.nbytes and storage.data_ptr() not in live
        return value if is_own else value.detach().to("cpu", copy=True)

    copies = {id(value): own(value) for value in weights.values() if isinstance(value, Tensor)}
    return {name: copies.get(id(value), value) for name, value in weights.items()}


class ProgressLog:
    """Logs on the first rank, every few seconds, how far a slow operation is."""

    interval_s = 5.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._last_s = time.monotonic()
        self._done = 0

    def advance(self, total: int) -> None:
        """Called after each of `total` parts."""
        self._done += 1
        if time.monotonic() - self._last_s > self.interval_s:
            self._last_s = time.monotonic()
            log_dist(f"{self._what}: {self._done} of {total}")
