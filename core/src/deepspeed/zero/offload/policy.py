"""Which placement an engine gets: `zero_optimization.offload_optimizer` and the accelerator decide.

Called once by `engine/build.py`.
"""

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config.zero import OffloadOptimizerConfig, OffloadParamConfig
from deepspeed.errors import ConfigError
from deepspeed.log import log_dist
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.host import HostPlacement
from deepspeed.zero.placement import Placement


def asks_for_host(offload: OffloadOptimizerConfig | None) -> bool:
    """Whether the section asks for optimizer states in host memory."""
    return offload is not None and offload.device == "cpu"


def check_param_offload(offload: OffloadParamConfig | None, *, stage: int, device: torch.device) -> None:
    """Refuse parameters in host memory where that is another memory than the accelerator's.

    Raises:
        ConfigError: says what to do.
    """
    if offload is None or offload.device != "cpu":
        return
    if stage < 3:
        raise ConfigError(
            f"zero_optimization.offload_param.device: found 'cpu' with zero_optimization.stage {stage}, which shards "
            'no parameters; set stage to 3, or device to "none"'
        )
    if HostPlacement.is_needed(device):
        raise ConfigError(
            "zero_optimization.offload_param.device: found 'cpu'; parameters in host memory beside an accelerator with "
            'memory of its own are not in this version; set it to "none"'
        )
    log_dist("zero_optimization.offload_param: the accelerator's memory is the host's; nothing moves")


def choose_placement(offload: OffloadOptimizerConfig | None, *, stage: int, device: torch.device) -> Placement:
    """The placement for an engine on `device`.

    Raises:
        ConfigError: offload without a stage that shards the optimizer's states.
    """
    if offload is None or not asks_for_host(offload):
        return Placement()
    if stage == 0:
        raise ConfigError(
            "zero_optimization.offload_optimizer.device: found 'cpu' with zero_optimization.stage 0, which shards no "
            'optimizer states; set stage to 1, 2 or 3, or device to "none"'
        )
    if not HostPlacement.is_needed(device):
        log_dist("zero_optimization.offload_optimizer: the accelerator's memory is the host's; nothing moves")
        return Placement(HostMemory(get_accelerator(), pins=offload.pin_memory))
    return HostPlacement(get_accelerator(), pins=offload.pin_memory)
