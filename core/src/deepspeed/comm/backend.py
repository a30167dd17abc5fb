"""The contract between ZeRO and a communication library: three exchanges of flat buffers.

A step of ZeRO calls them, never a collective by name: which primitive serves "reduce this bucket to its owners" is a
property of the library, measured once and chosen by it. (What is not a step's is `torch.distributed`'s: the first
weights, a fragment that a user asks for.) `torch_backend.TorchBackend` is the implementation over `torch.distributed`;
a plugin gives another one with the hook `ds_comm_backend(name)`.

Shape legend: N numel of a flat buffer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.distributed import ProcessGroup


class Piece(NamedTuple):
    """The half-open range `[start, stop)` of a flat buffer, in elements, and the rank that owns it.

    `owner` is a rank *within the group* that the buffer is exchanged in.
    """

    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        """Elements in the piece; 0 is legal and costs nothing."""
        return self.stop - self.start


@runtime_checkable
class Work(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when the result may be used: the host blocks, or on a device the current stream does. Idempotent."""


@runtime_checkable
class Backend(Protocol):
    """What a communication library offers to the sharding strategies.

    Call order: `connect` once per engine; `preferred_bucket_bytes` and `allocate` while buffers are built; then
    `reduce*` in backward, one `reduce` of a few fp64 or fp32 numbers per step, and `gather_from_owners` after the
    update, each followed by `Work.wait`, or all by one `abandon` where a rank cannot go on; `release` when an engine is
    destroyed.

    The exchanges do not wait for peers. All ranks of `group` (None: every rank) call them in the same order with the
    same sizes and pieces, and wait for them at the same places among the collectives of the program: an exchange may
    need all ranks inside a call here before it is over. `flat_N` is contiguous, 1-D, and must be neither written nor
    freed before `wait()`.
    """

    name: str

    @property
    def held_bytes(self) -> int:
        """Bytes kept between exchanges for the next ones."""

    def connect(self, group: ProcessGroup | None = None) -> None:
        """Set up what exchanges in `group` need. Called by all ranks together, outside of any backward; idempotent."""

    def preferred_bucket_bytes(self, world_size: int, *, to_owners: bool) -> int:
        """Bytes of a bucket at which an exchange among `world_size` ranks is efficient and still overlaps.

        `to_owners`: of `reduce_to_owners`, else of `reduce`.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D buffer that exchanges well; a shared-memory backend hands out its own memory."""

    def reduce(self, flat_N: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """Sum `flat_N` over the ranks, in place, on every rank (stage 0, and what ranks agree on)."""

    def reduce_to_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Sum each piece over the ranks into its owner's `flat_N` (stages 1 and up).

        The pieces need not cover `flat_N` and do not overlap. After `wait()` the owner's pieces hold the sum; pieces
        of others are undefined; elements outside every piece are untouched.
        """

    def gather_from_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Copy each piece from its owner's `flat_N` into everyone's."""

    def abandon(self, works: Sequence[Work], group: ProcessGroup | None = None, *, failed: bool) -> None:
        """Leave the collectives `works` of `group` unfinished; their buffers are not used any more. Waits for nobody.

        `failed`: an exception is the reason, so peers that wait for this rank in `group` are to raise, and to name it.
        Otherwise all ranks abandon the same collectives, and go on. Afterwards a collective in `group` works where that
        is safe, and raises `CommError` where it is not.
        """

    def release(self) -> None:
        """Give back memory that is kept between collectives. Waits for nobody."""
