"""Names of values of `zero_optimization`, for scripts that compare with them. The sections take the plain values."""

from enum import Enum, IntEnum


class ZeroStageEnum(IntEnum):
    """Values of `zero_optimization.stage`, by what is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Values of `device` in `offload_optimizer` and `offload_param`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
