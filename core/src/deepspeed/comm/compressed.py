"""Average over ranks with one bit per element and error feedback. 1-bit optimizers use it in place of gradients.

    average     an all-to-all and an all-gather of 1 bit per element: each rank sends each peer the signs and one scale
                of the peer's part; the peer averages its part, and sends the signs and one scale of it to all ranks

The error of rounding to signs is kept and added the next time, for the all-to-all (`worker`) and for the all-gather
(`server`). H. Tang et al., 1-bit Adam, arXiv 2102.02888, section 4.2 and algorithm 1. With x a tensor of n elements:

    Q(x)  = |x| / sqrt(n) * sign(x)                  | | the L2 norm, sign(0) = 1
    c     = x + worker,     worker <- c - Q(c)       on each rank, for the whole tensor
    a     = mean of the ranks' Q(c) + server,        on the rank that has the part
            server <- a - Q(a)
    x     <- Q(a)                                    part by part, the same on all ranks

One message carries several tensors, each with its own scale, so the result does not depend on how tensors are grouped.
The average uses the collectives of a `GroupBackend`, so any library can serve it.

Legend: N numel of a tensor, W ranks, S numel of its part on a rank (padded to whole bytes), C sum of S over tensors.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend

_SCALE_BYTES = torch.float32.itemsize
_ALIGNMENT_BYTES = 16


@dataclass(slots=True)
class RoundingErrors:
    """`RoundingErrors` holds the part of a tensor's values that is not sent yet: fp32, zero at first."""

    worker: Tensor  # [N]: the unsent rest of this rank's own values
    server: Tensor  # [S]: the unsent rest of the average of this rank's part

    @classmethod
    def zero(cls, tensor: Tensor, world_size: int) -> "RoundingErrors":
        """The errors of a tensor before its first average."""
        numels = tensor.numel(), part_numel(tensor.numel(), world_size)
        worker, server = (torch.zeros(numel, dtype=torch.float32, device=tensor.device) for numel in numels)
        return cls(worker, server)


def part_numel(numel: int, world_size: int) -> int:
    """Return the padded numel of a rank's part of a tensor: equal on all ranks, a multiple of 8 for whole bytes."""
    return 8 * math.ceil(numel / (8 * world_size))


def average(
    ranks: GroupBackend,
    tensors: Sequence[Tensor],
    errors: Sequence[RoundingErrors],
    *,
    tag: str | int | None = None,
) -> None:
    """Replace each tensor by its average over `ranks`; see the module docstring.

    A collective; it returns when the averages are ready. A group of one rank sends and rounds nothing.

    Args:
        tensors: floating-point, contiguous, on one device, with the same shapes in the same order on all ranks.
        errors: the rounding errors of each tensor; changed in place.
    """
    if ranks.world_size == 1 or not tensors:
        return
    device = tensors[0].device
    layout = _layout(tuple(tensor.numel() for tensor in tensors), ranks.world_size, ranks.rank)
    sent_WB, received_WB = (layout.allocate(ranks, device) for _ in range(2))
    layout.compress(tensors, errors, sent_WB)
    ranks.all_to_all(received_WB.view(-1), sent_WB.view(-1), tag=tag).wait()
    own_B = layout.average_part(received_WB, errors, ranks.allocate(layout.num_bytes, torch.uint8, device))
    ranks.all_gather(sent_WB.view(-1), own_B, tag=tag).wait()
    layout.expand(sent_WB, tensors)


class _OneBitLayout:
    """`_OneBitLayout` packs tensors into a message of B bytes per rank: the scales of all tensors, then the signs of
    each tensor in whole bytes."""

    def __init__(self, numels: Sequence[int], world_size: int, rank: int) -> None:
        self._numels, self._world_size = numels, world_size
        self._part_numels = [part_numel(numel, world_size) for numel in numels]
        #: numel of this rank's parts without padding
        self._own_numels = [
            min(max(numel - rank * part, 0), part) for numel, part in zip(numels, self._part_numels, strict=True)
        ]
        self._total_numel = sum(self._part_numels)
        self._signs = slice(_aligned(len(numels) * _SCALE_BYTES), None)
        self.num_bytes = _aligned(self._signs.start + self._total_numel // 8)

    def allocate(self, ranks: GroupBackend, device: torch.device) -> Tensor:
        """Allocate one message per rank: (W, B)."""
        num_bytes = self._world_size * self.num_bytes
        return ranks.allocate(num_bytes, torch.uint8, device).view(self._world_size, self.num_bytes)

    def compress(self, tensors: Sequence[Tensor], errors: Sequence[RoundingErrors], sent_WB: Tensor) -> None:
        """Write the message for each rank to `sent_WB`, and keep the rounding error in the worker errors."""
        values_WC = torch.zeros(self._world_size, self._total_numel, dtype=torch.float32, device=sent_WB.device)
        worker = [error.worker for error in errors]
        torch._foreach_add_(worker, [tensor.reshape(-1).to(torch.float32) for tensor in tensors])
        for part_WS, sum_N in zip(values_WC.split(self._part_numels, dim=1), worker, strict=True):
            padded_N = torch.nn.functional.pad(sum_N, (0, part_WS.numel() - sum_N.numel()))
            part_WS.copy_(padded_N.view(part_WS.shape))
        scales = _scales(worker, self._numels)
        for sum_N, scale in zip(worker, scales.unbind(), strict=True):
            sum_N.sub_(_signs_of(sum_N).mul_(scale))
        self._scales_in(sent_WB).copy_(scales)
        self._signs_in(sent_WB).copy_(_packed(values_WC))

    def average_part(self, received_WB: Tensor, errors: Sequence[RoundingErrors], own_B: Tensor) -> Tensor:
        """Average this rank's parts over all ranks into `own_B`, and keep the rounding error in the server errors."""
        sum_C = torch.zeros(self._total_numel, dtype=torch.float32, device=own_B.device)
        for message_B in received_WB:  # in the order of ranks
            sum_C += self._values(message_B)
        parts = sum_C.div_(self._world_size).split(self._part_numels)
        server = [error.server for error in errors]
        for part_S, rest_S, numel in zip(parts, server, self._own_numels, strict=True):
            part_S.add_(rest_S)[numel:].zero_()
        scales = _scales(parts, self._own_numels)
        for part_S, rest_S, numel, scale in zip(parts, server, self._own_numels, scales.unbind(), strict=True):
            torch.sub(part_S, _signs_of(part_S).mul_(scale), out=rest_S)[numel:].zero_()
        self._scales_in(own_B).copy_(scales)
        self._signs_in(own_B).copy_(_packed(sum_C))
        return own_B

    def expand(self, received_WB: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the averages of all ranks' parts to `tensors`."""
        parts = self._values(received_WB).split(self._part_numels, dim=-1)
        for tensor, part_WS, numel in zip(tensors, parts, self._numels, strict=True):
            tensor.copy_(part_WS.reshape(-1)[:numel].view(tensor.shape))

    def _values(self, message: Tensor) -> Tensor:
        """Decode messages (..., B) into numbers (..., C)."""
        counts = torch.tensor(self._part_numels, device=message.device)
        scales = self._scales_in(message).repeat_interleave(counts, dim=-1, output_size=self._total_numel)
        return _unpacked(self._signs_in(message)).mul_(scales)

    def _scales_in(self, message: Tensor) -> Tensor:
        return message[..., : len(self._numels) * _SCALE_BYTES].view(torch.float32)

    def _signs_in(self, message: Tensor) -> Tensor:
        return message[..., self._signs][..., : self._total_numel // 8]


_layout = functools.lru_cache(maxsize=256)(_OneBitLayout)


def _scales(tensors: Sequence[Tensor], numels: Sequence[int]) -> Tensor:
    """Return |x| / sqrt(n) of each tensor, in fp32 on the tensors' device."""
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    roots = torch.tensor([math.sqrt(max(numel, 1)) for numel in numels], dtype=torch.float32, device=norms.device)
    return norms / roots


def _signs_of(values: Tensor) -> Tensor:
    """1 where a value is 0 or more, and -1 elsewhere."""
    return (values >= 0).to(torch.float32).mul_(2).sub_(1)


def _packed(values: Tensor) -> Tensor:
    """Pack the signs of (..., 8 B) values into (..., B) bytes, the first in the lowest bit."""
    bits = (values >= 0).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (bits * _places(values.device)).sum(-1, dtype=torch.uint8)


def _unpacked(signs: Tensor) -> Tensor:
    """Unpack the signs in (..., B) bytes to (..., 8 B) numbers, 1 or -1."""
    bits = signs.unsqueeze(-1).bitwise_and(_places(signs.device)).ne(0)
    return bits.flatten(-2).to(torch.float32).mul_(2).sub_(1)


def _places(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
