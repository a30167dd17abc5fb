"""Lightning's accelerator for DeepSpeed on a machine whose only device is its processor.

Lightning's DeepSpeed strategy refuses every accelerator but its `CUDAAccelerator`; this is one that gives each rank the
processor. It is not needed on a machine with such a device.
"""

from typing import Any

import torch
from lightning.fabric.accelerators import CUDAAccelerator as FabricAccelerator
from lightning.pytorch.accelerators import CUDAAccelerator as TrainerAccelerator


class _OnHost:
    def setup_device(self, device: torch.device) -> None:
        """Nothing: every rank may use the processor."""

    def setup(self, trainer: Any) -> None:
        """Nothing."""

    def teardown(self) -> None:
        """Nothing."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class HostTrainerAccelerator(_OnHost, TrainerAccelerator):
    """For `lightning.pytorch.Trainer`."""


class HostFabricAccelerator(_OnHost, FabricAccelerator):
    """For `lightning.fabric.Fabric`."""
