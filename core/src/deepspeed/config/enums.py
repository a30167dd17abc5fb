"""Enumerations that scripts import: stages of ZeRO, devices of offload, kinds of offloaded state."""

from enum import Enum, IntEnum


class ZeroStageEnum(IntEnum):
    """`zero_optimization.stage`: what is partitioned."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """`offload_optimizer.device` and `offload_param.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """`OffloadStateTypeEnum` names the states that `engine.offload_states(include=[...])` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
