"""`MiCS_Init`: `zero.Init` for a configuration with `mics_shard_size`."""

from typing import Any

import torch
from torch.nn import Module

from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError
from deepspeed.zero.construct import Init


class MiCS_Init(Init):
    """`zero.Init` that asks for MiCS: the configuration must have `zero_optimization.mics_shard_size`.

    Inside it parameters are sharded over all ranks of the group; `initialize` divides them over the shard groups.

    Args:
        config_dict_or_path: the DeepSpeed configuration, also as `config`.
        others: as of `zero.Init`.

    Raises:
        ConfigError: without a configuration, for one without `mics_shard_size`, or as `zero.Init`.
    """

    def __init__(
        self,
        module: Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        if enabled:
            _refuse_without_shard_size(source)
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            config_dict_or_path=source,
            enabled=enabled,
            dtype=dtype,
            mpu=mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )


def _refuse_without_shard_size(source: Any) -> None:
    if source is None:
        raise ConfigError("MiCS_Init: found no configuration; pass config_dict_or_path=<path or dict>")
    size = DeepSpeedConfig(read_config(source), batch_required=False).zero_optimization.mics_shard_size
    if size < 1:
        raise ConfigError(
            f"MiCS_Init: zero_optimization.mics_shard_size is {size}; give the number of ranks that hold one copy of "
            "the model, or use zero.Init"
        )
