"""Weights for use elsewhere: state dicts and 16-bit model files."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint import Checkpointer, save_state_dict_file
from deepspeed.engine.module_state import check_module_state
from deepspeed.errors import ConfigError
from deepspeed.zero.strategy import Sharding


class Export:
    """Mixed into `DeepSpeedEngine`, whose attributes it names here."""

    module: torch.nn.Module
    sharding: Sharding
    checkpointer: Checkpointer

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, on request without frozen parameters."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # type: ignore[arg-type,type-var]
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Load weights from `checkpoint["module"]` and start the fp32 masters from them.

        Raises:
            CheckpointError: for weights of another model; nothing was changed.
        """
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        else:
            check_module_state(self.module, checkpoint["module"], strict=strict, source="load_module_state_dict")
            self.module.load_state_dict(checkpoint["module"], strict=strict)
        self.sharding.masters_from_weights()

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the model's dtype, to `<save_dir>/<save_filename>`; every rank calls it.

        Returns:
            True: whole weights were saved.
        """

        def write() -> None:
            path = Path(save_dir) / save_filename
            if comm.get_rank() == 0:
                state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
                save_state_dict_file(state, path)

        self.checkpointer.together(write, f"save {save_filename} in {save_dir}")
        return True

    save_fp16_model = save_16bit_model  # the documented older name

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Whole weights on the host, under every stage of this version."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Whole weights of a partitioned model; libraries call it when the stage is 3."""
        raise ConfigError(
            f"_zero3_consolidated_16bit_state_dict: zero_optimization.stage is {self.sharding.stage}, nothing is "
            "partitioned; use module.state_dict()"
        )
