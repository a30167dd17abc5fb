"""`zero.Init`: modules built inside it are partitioned as they are built (stage 3).

This is also what `deepspeed.runtime.zero.partition_parameters` names: libraries replace
`zero_wrapper_for_fp_tensor_constructor` here, so a context that wraps constructors must look it up when it is entered.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError
from deepspeed.zero.gather import GatheredParameters, register_external_parameter, unregister_external_parameter
from deepspeed.zero.param_state import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

# torch's own constructor, by which a replaced wrapper knows what it was asked to wrap
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | str | None = None
) -> Callable[..., Tensor]:
    """A tensor constructor whose results are on this rank's device, floating ones in `target_fp_dtype`.

    Args:
        fn: such as `torch.empty` or `torch.arange`.
        target_device: where tensors go if the caller names no device; default: this rank's device.
    """

    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = target_device or get_accelerator().current_device_name()
        tensor = fn(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    return construct


class Init(contextlib.AbstractContextManager["Init"]):
    """Context in which modules are constructed for stage 3.

    Parameters are whole in stages 0, 1 and 2, so with such a configuration, or with `enabled=False`, the context does
    nothing, as documented. Stage 3 is not in this version and is refused when the context is made.

    Args:
        config_dict_or_path: the DeepSpeed configuration; its `zero_optimization.stage` decides.
        enabled: False turns the context off.

    The other arguments are DeepSpeed's documented ones; they matter to stage 3 only.

    Raises:
        ConfigError: if enabled without a configuration, or with one that asks for stage 3.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **kwargs: Any,
    ) -> None:
        self.enabled = enabled
        source = config_dict_or_path if config_dict_or_path is not None else config
        if not enabled:
            return
        stage = (
            3 if source is None else DeepSpeedConfig(read_config(source), batch_required=False).zero_optimization.stage
        )
        if stage == 3:
            raise ConfigError(
                "zero.Init: asked to partition parameters (zero_optimization.stage 3"
                + ("" if source is not None else ", the default without a configuration")
                + "), which is not in this version; use stage 2, or enabled=False"
            )

    def __exit__(self, *exc: object) -> None:
        return None
