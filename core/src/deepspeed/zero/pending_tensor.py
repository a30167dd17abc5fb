"""`PendingTensor`: a tensor of a save whose values are copied while training goes on, from where they are.

Code that changes or moves such values first waits for the copy (`Checkpointer.wait_for_copy`). A `PendingTensor` is no
tensor, so that nothing reads it by mistake before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspeed.errors import StateError


@dataclass(frozen=True, eq=False)
class PendingTensor:
    """A `PendingTensor` is a tensor of a save whose values are copied later, from where they are in host memory.

    Args:
        shape, dtype: the shape and dtype of the whole tensor, which is contiguous.
        pieces: the first element of each, and its values: 1-D, contiguous, of `dtype`, in host memory. They do not
            overlap; what none of them has is zero.
        is_held: whether the values stay as they are until they are copied. Else a save copies them before it returns.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: Sequence[tuple[int, Tensor]]
    is_held: bool = True
    _versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for _, values in self.pieces:
            assert (values.dim(), values.is_contiguous(), values.device.type) == (1, True, "cpu")
            assert values.dtype == self.dtype, values.dtype
        object.__setattr__(self, "_versions", self._find_versions())

    @classmethod
    def of(cls, tensor: Tensor) -> "PendingTensor":
        """A contiguous tensor in host memory, which the caller leaves as it is until it is copied."""
        return cls(tensor.shape, tensor.dtype, [(0, tensor.detach().view(-1))])

    def joined(self) -> Tensor:
        """The tensor, in memory of its own."""
        result = torch.empty(self.shape, dtype=self.dtype)
        if self.shape.numel():
            self.copy_to(cast("NDArray[np.uint8]", result.view(-1).view(torch.uint8).numpy()))
        return result

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        """Write the bytes of the whole tensor; other threads go on meanwhile.

        Raises:
            StateError: something has changed the values since this object was made.
        """
        end = 0
        for start, values in sorted(self.pieces, key=lambda piece: piece[0]):
            first = start * self.dtype.itemsize
            source = values.view(torch.uint8).numpy()
            target[end:first] = 0
            end = first + source.nbytes
            np.copyto(target[first:end], source)
        target[end:] = 0
        if self._find_versions() != self._versions:
            raise StateError(
                "master weights or optimizer states were changed in place while they were copied for a checkpoint, by "
                "code that is not the engine's; change them with safe_set_*, or call wait_for_checkpoint() before"
            )

    def _find_versions(self) -> tuple[int, ...]:
        """Counts of torch's in-place writes."""
        return tuple(0 if values.is_inference() else values._version for _, values in self.pieces)
