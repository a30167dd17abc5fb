"""`PendingTensor` is a tensor of a checkpoint whose values are copied while training goes on.

Code that changes or moves such values first waits for the copy (`Checkpointer.wait_for_copy`). The object is not a
tensor, so nothing reads its values by mistake.
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
    """`PendingTensor` is a tensor of a checkpoint whose values in host memory are copied later.

    Args:
        shape, dtype: the shape and dtype of the whole tensor, which is contiguous.
        pieces: the first element and the values of each piece: 1-D, contiguous, of `dtype`, in host memory. Pieces do
            not overlap; elements outside of all pieces are zero.
        is_held: whether the values stay unchanged until they are copied. Else the save copies them before it returns.
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
        """Wrap a contiguous tensor in host memory that the caller does not change until it is copied."""
        return cls(tensor.shape, tensor.dtype, [(0, tensor.detach().view(-1))])

    def joined(self) -> Tensor:
        """Return the tensor in its own memory."""
        result = torch.empty(self.shape, dtype=self.dtype)
        if self.shape.numel():
            self.copy_to(cast("NDArray[np.uint8]", result.view(-1).view(torch.uint8).numpy()))
        return result

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        """Write the bytes of the whole tensor; other threads can run meanwhile.

        Raises:
            StateError: if the values were changed since this object was created.
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
        """Return torch's counts of in-place writes."""
        return tuple(0 if values.is_inference() else values._version for _, values in self.pieces)
