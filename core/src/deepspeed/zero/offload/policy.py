"""Which placement an engine gets: `zero_optimization.offload_optimizer` and the accelerator decide.

Called once by `engine/build.py`.
"""

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.errors import ConfigError
from deepspeed.log import log_dist
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.host import HostPlacement
from deepspeed.zero.placement import Placement


def asks_for_host(offload: OffloadOptimizerConfig | None) -> bool:
    """Whether the section asks for optimizer states in host memory."""
    return offload is not None and offload.device == "cpu"


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
            'optimizer states; set stage to 1 or 2, or device to "none"'
        )
    if not HostPlacement.is_needed(device):
        log_dist("zero_optimization.offload_optimizer: the accelerator's memory is the host's; nothing moves")
        return Placement(HostMemory(get_accelerator(), pins=offload.pin_memory))
    return HostPlacement(get_accelerator(), pins=offload.pin_memory)
