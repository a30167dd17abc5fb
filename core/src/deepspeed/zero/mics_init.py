"""`MiCS_Init`: `zero.Init` for a configuration with `mics_shard_size`."""

from typing import Any

from torch.nn import Module

from deepspeed._absent_members import absent_members
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.zero.construct import Init


@absent_members("runtime.zero.mics:MiCS_Init")
class MiCS_Init(Init):
    """`zero.Init` that asks for MiCS: the configuration must have `zero_optimization.mics_shard_size`.

    Inside it parameters are sharded over all ranks of the group; `initialize` divides them over the shard groups.

    Args:
        args, kwargs: as of `zero.Init`, in its order; `config_dict_or_path`, or `config`, must be among them.

    Raises:
        ConfigError: without a configuration, for one without `mics_shard_size`, or as `zero.Init`.
    """

    def __init__(
        self,
        module: Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, data_parallel_group or sequence_data_parallel_group, *args, **kwargs)

    def _check(self, settings: DeepSpeedConfig | None) -> None:
        super()._check(settings)
        if settings is None:
            raise ConfigError("MiCS_Init: found no configuration; pass config_dict_or_path=<path or dict>")
        size = settings.zero_optimization.mics_shard_size
        if size < 1:
            raise ConfigError(
                f"MiCS_Init: zero_optimization.mics_shard_size is {size}; give the number of ranks that hold one copy "
                "of the model, or use zero.Init"
            )
