"""`SplitPlacement`: a part of the parameters is offloaded, the rest stays beside the weights (`ratio`)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.zero.placement import Placement


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
