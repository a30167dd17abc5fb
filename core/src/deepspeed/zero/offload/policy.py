"""The sections `offload_optimizer` and `offload_param` and the accelerator say where an engine keeps what it offloads.

The builders in `engine/` ask once; `zero.Init` calls `choose_shard_home` too. `SplitPlacement` is the answer where
`ratio` leaves a part of the parameters beside the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.config.training import AioConfig
from deepspeed.config.zero import OffloadOptimizerConfig, OffloadParamConfig
from deepspeed.errors import ConfigError
from deepspeed.log import log_dist, warn_once
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.host import HostPlacement, HostShards, UpdateOnDevice
from deepspeed.zero.offload.nvme import NvmePlacement
from deepspeed.zero.offload.swapped_shards import SwappedShards
from deepspeed.zero.placement import Placement, ShardHome


class SplitPlacement(Placement):
    """Gives each unit one of two placements; what concerns all units goes to both.

    Units are not divided, so that the part is met as closely as their sizes permit.

    Args:
        offloaded: of the part that is offloaded.
        near: of the rest.
        ratio: that part of all elements, 0 to 1.
    """

    is_offloaded = True

    def __init__(self, offloaded: Placement, near: Placement, ratio: float) -> None:
        super().__init__()
        self._offloaded, self._near, self._ratio = offloaded, near, ratio
        self.fetches = offloaded.fetches
        self.max_in_flight = offloaded.max_in_flight
        self._is_near: list[bool] = []  # by unit
        self._numel = self._offloaded_numel = 0  # of the units so far

    def of_unit(self, numel: int) -> Placement:
        self._numel += numel
        is_near = self._offloaded_numel + numel / 2 > self._ratio * self._numel
        self._is_near.append(is_near)
        self._offloaded_numel += 0 if is_near else numel
        return self._near if is_near else self._offloaded

    def prepare(
        self, optimizer: Optimizer, numel: int, gradient_dtype: torch.dtype, *, max_sub_group_numel: int
    ) -> None:
        part = int(numel * self._ratio)
        self._offloaded.prepare(optimizer, part, gradient_dtype, max_sub_group_numel=max_sub_group_numel)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._offloaded.scratch(numel, dtype, device)

    def settle(self) -> None:
        self._offloaded.settle()

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        near = [gradients for gradients, is_near in zip(reduced, self._is_near, strict=True) if is_near]
        offloaded = [gradients for gradients, is_near in zip(reduced, self._is_near, strict=True) if not is_near]
        return self._near.norms(near) + self._offloaded.norms(offloaded)

    def gradients_changed(self) -> None:
        self._offloaded.gradients_changed()

    def finish_sending(self) -> None:
        self._offloaded.finish_sending()

    def forget(self) -> None:
        self._offloaded.forget()

    @property
    def held_bytes(self) -> int:
        return self._offloaded.held_bytes

    def release(self) -> None:
        self._offloaded.release()


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
    """Choose where the shards of parameters rest for an engine on `device`; None: on that device.

    Below stage 3 no parameter is sharded, and the section has no effect, as in DeepSpeed: scripts write it at every
    stage.

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
