"""`zero.Init`: modules built inside it are partitioned as they are built (stage 3)."""

import contextlib
from typing import Any

import torch

from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError


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
