"""`Backend` over torch.distributed: three collectives in place, made of a `TorchGroup`'s.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.libraries import no_group_error
from deepspeed.comm.pieces import checked, is_even_cover, view
from deepspeed.comm.summing import add_in_rank_order
from deepspeed.comm.torch_group import DEFAULT_STAGING_BYTES, TorchGroup
from deepspeed.comm.work import DONE, AllOf, Followed


class TorchBackend:
    """The three collectives over the process groups of torch.distributed.

    Made by `deepspeed.comm.backend()`, once per process. An extension may derive from it and give `make_group`,
    `sum_everywhere`, `sum_to_owners` and `copy_from_owners`.

    Args:
        name: of the library, for example "gloo".
        staging_bytes: limit, per group, on the memory that is kept for values that are still to be added.
    """

    def __init__(self, name: str, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        self.name = name
        self.staging_bytes = staging_bytes
        self.groups: dict[ProcessGroup, TorchGroup] = {}

    @property
    def held_bytes(self) -> int:
        return sum(group.held_bytes for group in self.groups.values())

    def preferred_bucket_bytes(self, world_size: int, *, to_owners: bool) -> int:
        """See `TorchGroup.capabilities`."""
        capabilities = self.group_of(None).capabilities_of(world_size)
        return capabilities.preferred_bucket_bytes if to_owners else capabilities.preferred_all_reduce_bytes

    def connect(self, group: ProcessGroup | None = None) -> None:
        """Set up what collectives in `group` need."""
        self.group_of(group).connect()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D tensor of torch's own allocator."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce(self, flat_N: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """Sum in place on every rank."""
        member = self.group_of(group)
        checked(flat_N, (), member.world_size)
        if member.world_size == 1 or flat_N.numel() == 0:
            return DONE
        return self.sum_everywhere(member, flat_N)

    def reduce_to_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Sum each piece into its owner."""
        member = self.group_of(group)
        pieces = checked(flat_N, pieces, member.world_size)
        if member.world_size == 1 or not pieces:
            return DONE
        return self.sum_to_owners(member, flat_N, pieces)

    def gather_from_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Copy each piece from its owner."""
        member = self.group_of(group)
        pieces = checked(flat_N, pieces, member.world_size)
        if member.world_size == 1 or not pieces:
            return DONE
        return self.copy_from_owners(member, flat_N, pieces)

    def abandon(self, works: Sequence[Work], group: ProcessGroup | None = None, *, failed: bool) -> None:
        """Leave `works` unfinished."""
        self.group_of(group).abandon(works, failed=failed)

    def release(self) -> None:
        """Drop the staging memory; the connections stay, for engines that go on."""
        for group in self.groups.values():
            group.release()

    def close(self) -> None:
        """This rank leaves all groups because it failed. Called by `destroy_process_group`."""
        for group in self.groups.values():
            group.close()

    def group_of(self, group: ProcessGroup | None) -> TorchGroup:
        """What serves this process group (None: the world)."""
        resolved = group if group is not None else torch_dist.group.WORLD
        if resolved is None:
            raise no_group_error("a collective")
        if resolved not in self.groups:
            self.groups[resolved] = self.make_group(resolved)
        return self.groups[resolved]

    def make_group(self, group: ProcessGroup) -> TorchGroup:
        """What serves a process group that was not used before."""
        return TorchGroup(group, self.staging_bytes)

    def sum_everywhere(self, member: TorchGroup, flat_N: torch.Tensor) -> Work:
        """An all-reduce."""
        return member.all_reduce(flat_N)

    def sum_to_owners(self, member: TorchGroup, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """A reduce-scatter of W equal pieces in rank order; of others an all-to-all, and the sum of what came."""
        if is_even_cover(flat_N, pieces, member.world_size):
            return member.reduce_scatter(view(flat_N, pieces[member.rank]), flat_N)
        by_owner = sorted(pieces, key=lambda piece: piece.owner)
        numels = [sum(piece.numel for piece in by_owner if piece.owner == rank) for rank in range(member.world_size)]
        staged_N = torch.empty(numels[member.rank] * member.world_size, dtype=flat_N.dtype, device=flat_N.device)
        work = member.all_to_all(staged_N, _joined(flat_N, by_owner), [numels[member.rank]] * member.world_size, numels)
        own = [view(flat_N, piece) for piece in by_owner if piece.owner == member.rank]
        return Followed(work, lambda: _add(own, staged_N, member), in_poll=flat_N.device.type == "cpu")

    def copy_from_owners(self, member: TorchGroup, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """An all-gather of W equal pieces in rank order; of others a broadcast each."""
        if is_even_cover(flat_N, pieces, member.world_size):
            return member.all_gather(flat_N, view(flat_N, pieces[member.rank]))
        return AllOf([member.broadcast(view(flat_N, piece), piece.owner) for piece in pieces])


def _joined(flat_N: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """The pieces one after the other: the buffer itself where they lie so."""
    if all(before.stop == after.start for before, after in pairwise(pieces)):
        return flat_N[pieces[0].start : pieces[-1].stop]
    return torch.cat([view(flat_N, piece) for piece in pieces])


def _add(own: Sequence[torch.Tensor], staged_N: torch.Tensor, member: TorchGroup) -> None:
    """The sum of what the ranks sent, into the pieces of this rank."""
    parts = [part.split([piece.numel() for piece in own]) for part in staged_N.chunk(member.world_size)] if own else []
    for number, piece in enumerate(own):
        others = [part[number] for rank, part in enumerate(parts) if rank != member.rank]
        add_in_rank_order(piece, others, member.rank)
