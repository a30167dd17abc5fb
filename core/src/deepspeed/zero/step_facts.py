"""`StepFacts`: what all ranks agree on once per step, summed in one small all-reduce that the host waits for once.

Called by `strategy.py`. On a device the squares stay there until they are summed over the ranks, and the flags, which
are the same in nearly every step, are copied there only when they change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.zero.placement import read


class StepFacts:
    """Args:
    backend: of the ranks that agree.
    """

    def __init__(self, backend: GroupBackend) -> None:
        self._backend = backend
        self._flags: list[float] = []
        self._flags_on_device: Tensor | None = None

    def sum(self, norms: Sequence[Tensor], flags: list[float], device: torch.device) -> list[float]:
        """[sum of the squares of `norms`, *flags], summed over the ranks. A collective.

        Args:
            norms: 0-D, of this rank.
            device: of the weights.
        """
        if self._backend.world_size == 1:
            return [square_sum(norms), *flags]
        facts = self._on_host(norms, flags) if device.type == "cpu" else self._on_device(norms, flags, device)
        self._backend.all_reduce(facts).wait()
        sums: list[float] = facts.tolist()
        return sums

    def _on_host(self, norms: Sequence[Tensor], flags: list[float]) -> Tensor:
        values = torch.tensor([square_sum(norms), *flags], dtype=torch.float64)
        return self._backend.allocate(len(values), values.dtype, values.device).copy_(values)

    def _on_device(self, norms: Sequence[Tensor], flags: list[float], device: torch.device) -> Tensor:
        if self._flags_on_device is None or flags != self._flags:
            self._flags, self._flags_on_device = flags, torch.tensor(flags, device=device)
        facts = self._backend.allocate(1 + len(flags), torch.float32, device)  # some devices lack fp64
        facts[0] = torch.stack([norm.to(facts) for norm in norms]).square().sum() if norms else 0.0
        facts[1:] = self._flags_on_device
        return facts


def square_sum(norms: Sequence[Tensor]) -> float:
    """Sum of the squares of 0-D tensors; one wait for all that are on a device."""
    return sum(value**2 for value in read(norms))
