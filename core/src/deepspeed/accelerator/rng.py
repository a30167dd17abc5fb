"""RngFace: the device's random number generators. Activation checkpointing saves and restores them."""

from types import ModuleType

import torch

from deepspeed.accelerator.torch_module import TorchModule


class RngFace(TorchModule):
    """Random numbers. A state is a `torch.uint8` CPU tensor, opaque but for `set_rng_state`."""

    def random(self) -> ModuleType:
        """The `torch.random` module: the host's generator and `fork_rng`."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator of `device_index` (default: the current device) to a state from `get_rng_state`."""
        if device_index is None:
            self._ask("set_rng_state", new_state)
        else:
            self._ask("set_rng_state", new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """A copy of the generator's state, of `device_index` or the current device."""
        state: torch.Tensor
        if device_index is None:
            state = self._ask("get_rng_state")
        else:
            state = self._ask("get_rng_state", device_index)
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._ask("manual_seed", seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices with the same number."""
        self._ask("manual_seed_all", seed)

    def initial_seed(self) -> int:
        """The number with which the current device's generator was last seeded."""
        return int(self._ask("initial_seed"))

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that ops on `device_index` draw from when none is given."""
        generator: torch.Generator = self._attribute("default_generators")[device_index]
        return generator
