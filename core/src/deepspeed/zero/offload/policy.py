"""Where an engine keeps what it offloads: `zero_optimization.offload_optimizer`, `offload_param` and the accelerator
decide.

Called once by the builders in `engine/`; `choose_shard_home` by `zero.Init` too.
"""

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config.data import AioConfig
from deepspeed.config.zero import OffloadOptimizerConfig, OffloadParamConfig
from deepspeed.errors import ConfigError
from deepspeed.log import log_dist, warn_once
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.host import HostPlacement
from deepspeed.zero.offload.host_shards import HostShards, UpdateOnDevice
from deepspeed.zero.offload.nvme import NvmePlacement
from deepspeed.zero.offload.split import SplitPlacement
from deepspeed.zero.offload.swapped_shards import SwappedShards
from deepspeed.zero.placement import Placement
from deepspeed.zero.shard_home import ShardHome


def asks_for_host(offload: OffloadOptimizerConfig | None, stage: int) -> bool:
    """Whether the section asks for an optimizer that updates in host memory, at a stage that can do so."""
    return stage > 0 and offload is not None and offload.device in ("cpu", "nvme") and offload.ratio > 0


def choose_shard_home(
    offload: OffloadParamConfig | None,
    aio: AioConfig,
    *,
    device: torch.device,
    stage: int = 3,
    keeps_int8: bool = False,
) -> ShardHome | None:
    """Where the shards of parameters rest for an engine on `device`; None: there.

    Below stage 3 there are none, and the section has no effect, as in DeepSpeed: scripts write it at every stage.

    Args:
        keeps_int8: `zero_quantized_nontrainable_weights`.

    Raises:
        ConfigError: offload with `keeps_int8`; says what to do.
    """
    if offload is None or offload.device == "none":
        return None
    if stage < 3:
        warn_once(
            f"zero_optimization.offload_param: has no effect at stage {stage}, which shards no parameters; they stay "
            "on the device. To offload them set stage to 3"
        )
        return None
    is_needed = HostPlacement.is_needed(device)
    if offload.device == "cpu" and not is_needed:
        log_dist("zero_optimization.offload_param: the accelerator's memory is the host's; nothing moves")
        return None
    if keeps_int8:
        raise ConfigError(
            f"zero_optimization.offload_param.device: found {offload.device!r} with "
            "zero_quantized_nontrainable_weights true, whose int8 shards stay on the device; set device to "
            '"none", or the other key to false'
        )
    pins = offload.pin_memory and is_needed
    memory = HostShards(get_accelerator(), pins=pins) if is_needed else None
    if offload.device == "cpu":
        return memory
    rank = torch.distributed.get_rank()
    return SwappedShards(get_accelerator(), offload, aio, memory=memory, pins=pins, rank=rank)


def choose_placement(
    offload: OffloadOptimizerConfig | None,
    *,
    stage: int,
    device: torch.device,
    home: ShardHome | None = None,
    aio: AioConfig | None = None,
    rank: int = 0,
) -> Placement:
    """The placement for an engine on `device`, whose parameters have their shards at `home`.

    At stage 0 the section has no effect, as in DeepSpeed: scripts write it at every stage.

    Args:
        aio: how swap files are read and written.
        rank: of this process, for the name of its swap folder.

    Raises:
        ConfigError: offload to a folder that cannot be used.
        OpUnavailable: offload to NVMe without an extension that reads and writes files.
    """
    if offload is not None and offload.device != "none" and stage == 0:
        warn_once(
            "zero_optimization.offload_optimizer: has no effect at stage 0, which shards no optimizer states; they "
            "stay on the device and are updated there. To offload them set stage to 1, 2 or 3"
        )
    if offload is None or not asks_for_host(offload, stage):
        return Placement() if home is None else UpdateOnDevice()
    if offload.device == "nvme":
        return _in_part(_on_nvme(offload, aio or AioConfig(), rank), offload.ratio, home)
    if not HostPlacement.is_needed(device):
        log_dist("zero_optimization.offload_optimizer: the accelerator's memory is the host's; nothing moves")
        memory = HostMemory(get_accelerator(), pins=offload.pin_memory)
        return Placement(memory) if home is None else UpdateOnDevice(memory)
    return _in_part(HostPlacement(get_accelerator(), pins=offload.pin_memory), offload.ratio, home)


def _in_part(offloaded: Placement, ratio: float, home: ShardHome | None) -> Placement:
    near = Placement() if home is None else UpdateOnDevice()
    return SplitPlacement(offloaded, near, ratio) if ratio < 1 else offloaded


def _on_nvme(offload: OffloadOptimizerConfig, aio: AioConfig, rank: int) -> Placement:
    if not offload.nvme_path:
        raise ConfigError(
            'zero_optimization.offload_optimizer.nvme_path: found none with device "nvme"; name a folder on a '
            "local disk"
        )
    return NvmePlacement(
        get_accelerator(),
        offload.nvme_path,
        rank=rank,
        aio=aio,
        pins=offload.pin_memory,
        reads_ahead=offload.pipeline_read,
        writes_behind=offload.pipeline_write,
        buffer_count=offload.buffer_count,
    )
