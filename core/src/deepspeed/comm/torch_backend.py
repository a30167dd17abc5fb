"""`Backend` over torch.distributed: gloo for host memory, and any other library by its collectives.

Up to 8 ranks of one machine read each other's memory (`direct.py`), where the kernel lets them. Elsewhere what serves
best depends on the exchange, since gloo's primitives are very unequal. Milliseconds for one full fp32 tensor, messages
over loopback, one core per rank (`benchmarks/collectives.py`; two cores, so four ranks share them):

    exchange                          primitive         2 ranks 64 MiB   4 ranks 16 MiB   4 ranks 64 MiB
    every rank gets the sum           direct                        18               15               45
                                      messages                      59               38              128
                                      all_reduce                    79               35              121
    each piece to its owner           direct                        11                8               27
                                      messages                      33               18               66
                                      reduce each                   73               24               91
                                      all_to_all, sum               43               21               72
                                      reduce_scatter               121               50              216
    each piece from its owner         direct                         7                7               21
                                      messages                      29               17               56
                                      broadcast each                25               18               55
                                      all_gather                    88               24              155
    one owner has all, from it        direct                        13                7               23
                                      messages                      31               23               70
                                      broadcast                     27               15               59

Hence on gloo and for host memory, where ranks cannot read each other's:

- to owners: messages, and a local sum. More than 8 ranks: `reduce` per piece, because the owner of a whole bucket
  would have to hold a message from each.
- every rank: `all_reduce` for two ranks, which beside a running backward is the quicker one, and for more than 8. With
  3 to 8 ranks messages (a sum at each rank's part, sent back), which cost up to 1.3 times an all_reduce and buy that
  stages 0, 1 and 2 get the same sum to the last bit; of two ranks a + b is the same whoever adds.
- from owners: messages between two ranks, `broadcast` per piece among more.

For device memory gloo has only `all_reduce` and `broadcast`. Other libraries get `reduce_scatter` and `all_gather` of
one tensor where the pieces are W equal parts in rank order, `reduce` and `broadcast` per piece where they are not.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.direct import DirectQueue, connect
from deepspeed.comm.libraries import library_by_device, no_group_error
from deepspeed.comm.messages import MessageQueue
from deepspeed.comm.pieces import checked, is_even_cover, view
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.transports import all_gather_into_tensor, reduce_scatter_tensor
from deepspeed.comm.watch import Watch
from deepspeed.comm.work import DONE, as_work

# Among more ranks a sum that its owner makes alone costs more memory and more latency than a tree.
_MAX_SUMMING_RANKS = 8

# Two buckets of the preferred size. They stay between steps: fresh memory costs more than the sum it is for.
_DEFAULT_STAGING_BYTES = 16 << 20


class TorchBackend:
    """The three exchanges over the process groups of torch.distributed.

    Made by `deepspeed.comm.backend()`, once per process. Sums that are made here are added in the order of ranks, so a
    result depends neither on the moment at which values arrive nor on where a buffer is cut.

    Args:
        name: of the library, for example "gloo".
        staging_bytes: limit on the memory for values that are still to be added.
    """

    def __init__(self, name: str, staging_bytes: int = _DEFAULT_STAGING_BYTES) -> None:
        self.name = name
        self._staging = StagingPool(staging_bytes)
        self._members: dict[ProcessGroup, _Member] = {}

    @property
    def held_bytes(self) -> int:
        return self._staging.held_bytes

    def preferred_bucket_bytes(self, world_size: int, *, to_owners: bool) -> int:
        """8 MiB for few ranks: a byte costs little less beyond it, and less of the last exchange is waited for.

        Two ranks that sum into both: 16 MiB, which gloo's all_reduce, in place, steps through 3% faster than 4; ranks
        that read each other's memory do not care. More ranks cut a bucket into smaller messages only when it has
        several owners, so the size grows slowly.
        """
        if world_size == 2 and not to_owners:
            return 16 << 20
        return (8 << 20) if world_size <= _MAX_SUMMING_RANKS else (32 << 20)

    def connect(self, group: ProcessGroup | None = None) -> None:
        """Find out together whether the ranks of `group` can read each other's memory."""
        self._member(group).connect()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D tensor of torch's own allocator."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce(self, flat_N: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """Sum in place on every rank."""
        member = self._member(group)
        checked(flat_N, (), member.world_size)
        if member.world_size == 1 or flat_N.numel() == 0:
            return DONE
        if queue := member.direct(flat_N):
            return queue.reduce(flat_N)
        return member.start(flat_N, lambda: _reduce(member, flat_N))

    def reduce_to_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Sum each piece into its owner."""
        member = self._member(group)
        pieces = checked(flat_N, pieces, member.world_size)
        if member.world_size == 1 or not pieces:
            return DONE
        if queue := member.direct(flat_N):
            return queue.reduce_to_owners(flat_N, pieces)
        return member.start(flat_N, lambda: _reduce_to_owners(member, flat_N, pieces))

    def gather_from_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Copy each piece from its owner."""
        member = self._member(group)
        pieces = checked(flat_N, pieces, member.world_size)
        if member.world_size == 1 or not pieces:
            return DONE
        if queue := member.direct(flat_N):
            return queue.gather_from_owners(flat_N, pieces)
        return member.start(flat_N, lambda: _gather_from_owners(member, flat_N, pieces))

    def abandon(self, works: Sequence[Work], group: ProcessGroup | None = None, *, failed: bool) -> None:
        """Leave `works` unfinished. Ranks that read memory can go on if all of them abandon; see `messages.py` else."""
        self._member(group).abandon(works, failed=failed)

    def release(self) -> None:
        """Drop the staging memory; the connections stay, for engines that go on."""
        self._staging.release()

    def close(self) -> None:
        """This rank leaves all groups because it failed. Called by `destroy_process_group`."""
        for member in self._members.values():
            member.abandon([], failed=True)
            if member.library("cpu") == "gloo":
                member.watch.close()

    def _member(self, group: ProcessGroup | None) -> "_Member":
        resolved = group if group is not None else torch_dist.group.WORLD
        if resolved is None:
            raise no_group_error("an exchange")
        member = self._members.get(resolved)
        if member is None:
            member = self._members[resolved] = _Member(resolved, self._staging)
        return member


class _Member:
    """This rank in one group: what the group's library can do, and what the rank has in flight there."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        self.group = group
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.watch = Watch(group)
        self.messages = MessageQueue(group, staging)
        self._staging = staging
        self._direct: DirectQueue | None = None
        self._is_connected = False
        self._library_of = library_by_device(group)

    def library(self, device_type: str) -> str:
        """The library that moves tensors of such a device: "gloo", ..."""
        return self._library_of.get(device_type, self._library_of.get("", ""))

    def is_gloo_on_host(self, tensor: torch.Tensor) -> bool:
        """True where point-to-point messages exist and beat most collectives."""
        return tensor.device.type == "cpu" and self.library("cpu") == "gloo"

    def connect(self) -> None:
        """Called by all ranks together; the first call counts."""
        if self._is_connected:
            return
        self._is_connected = True
        if 1 < self.world_size <= _MAX_SUMMING_RANKS and self.library("cpu") == "gloo":
            self._direct = connect(self.group, self._staging)

    def direct(self, tensor: torch.Tensor) -> DirectQueue | None:
        """The queue in which ranks read each other's memory, where they can."""
        if not self.is_gloo_on_host(tensor):
            return None
        self.connect()
        return self._direct

    def sums_by_messages(self, tensor: torch.Tensor) -> bool:
        """True where sums are made here, in the order of ranks, from messages."""
        return self.world_size <= _MAX_SUMMING_RANKS and self.is_gloo_on_host(tensor)

    def only_broadcast_and_all_reduce(self, tensor: torch.Tensor) -> bool:
        """True where the library has no other collective: gloo, on device memory."""
        return tensor.device.type != "cpu" and self.library(tensor.device.type) == "gloo"

    def has_tensor_collectives(self, tensor: torch.Tensor) -> bool:
        """True where reduce_scatter and all_gather of one tensor exist and may work in place (torch's MPI has none)."""
        return self.library(tensor.device.type) not in ("gloo", "mpi")

    def start(self, tensor: torch.Tensor, collective: Callable[[], Work]) -> Work:
        """Start a collective of the group's library; over gloo its errors name the rank that failed."""
        return self.watch.start(collective) if self.library(tensor.device.type) == "gloo" else collective()

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` unfinished."""
        (self._direct or self.watch).abandon(works, failed=failed)


def _reduce(member: _Member, flat_N: torch.Tensor) -> Work:
    if member.world_size > 2 and member.sums_by_messages(flat_N):
        return member.messages.reduce(flat_N)
    return as_work(torch_dist.all_reduce(flat_N, group=member.group, async_op=True))


def _reduce_to_owners(member: _Member, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
    if member.sums_by_messages(flat_N):
        return member.messages.reduce_to_owners(flat_N, pieces)
    if member.only_broadcast_and_all_reduce(flat_N):
        return _each(pieces, lambda p: torch_dist.all_reduce(view(flat_N, p), group=member.group, async_op=True))
    if is_even_cover(flat_N, pieces, member.world_size) and member.has_tensor_collectives(flat_N):
        own = view(flat_N, pieces[member.rank])
        return as_work(reduce_scatter_tensor(own, flat_N, group=member.group, async_op=True))
    return _each(
        pieces,
        lambda p: torch_dist.reduce(view(flat_N, p), group=member.group, async_op=True, group_dst=p.owner),
    )


def _gather_from_owners(member: _Member, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
    if member.world_size == 2 and member.is_gloo_on_host(flat_N):
        return member.messages.gather_from_owners(flat_N, pieces)
    if is_even_cover(flat_N, pieces, member.world_size) and member.has_tensor_collectives(flat_N):
        own = view(flat_N, pieces[member.rank])
        return as_work(all_gather_into_tensor(flat_N, own, group=member.group, async_op=True))
    return _each(
        pieces,
        lambda p: torch_dist.broadcast(view(flat_N, p), group=member.group, async_op=True, group_src=p.owner),
    )


def _each(pieces: Sequence[Piece], start: Callable[[Piece], torch_dist.Work | None]) -> Work:
    return as_work(*[start(piece) for piece in pieces])
