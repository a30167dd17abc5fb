"""Weights for use elsewhere: state dicts and 16-bit model files. Called by the engine's methods."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint import Checkpointer, save_state_dict_file
from deepspeed.engine.module_state import check_module_state, fill_module


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


def save_weights(module: torch.nn.Module, path: Path, checkpointer: Checkpointer, *, exclude_frozen: bool) -> None:
    """Write the module's state dict, in its own dtype, on the first rank; all ranks call it, and fail together."""

    def write() -> None:
        if comm.get_rank() == 0:
            save_state_dict_file(module_state_dict(module, exclude_frozen=exclude_frozen), path)

    checkpointer.together(write, f"save {path.name} in {path.parent}")


def consolidated(module: torch.nn.Module, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """Whole weights on the host, under every stage of this version."""
    state = module_state_dict(module, exclude_frozen=exclude_frozen)
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
