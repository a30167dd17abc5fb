"""The exchanges by gloo's point-to-point messages, with the sum made here.

One `MessageQueue` per group, made by `torch_backend.py`, which says where messages beat gloo's collectives.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as torch_dist
from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.pieces import even_pieces, view
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.summing import add_in_rank_order
from deepspeed.comm.work import as_work
from torch.distributed import ProcessGroup

# Tags of our messages start here, out of the way of tags that users give to send and recv.
FIRST_TAG = 1 << 20
NUM_TAGS = 1 << 20


class MessageQueue:
    """What this rank has in flight in one group: tags in the order of issue, and sums that are still to be added.

    At most the staging's limit (or one exchange, if that is more) is held for messages that are still to be added; a
    further exchange first finishes the oldest, which its peers have always sent already or are about to send, so that
    this cannot deadlock. Without `waits_for_room` the limit does not hold, and no call waits.
    """

    def __init__(
        self, group: ProcessGroup, staging: StagingPool, first_tag: int = FIRST_TAG, *, waits_for_room: bool = True
    ) -> None:
        self.staging = staging
        self.rank = group.rank()
        self.world_size = group.size()
        self.sums: deque[_Sum] = deque()
        self._group = group
        self._first_tag = first_tag
        self._num_issued = 0
        self._waits_for_room = waits_for_room

    def reduce(self, flat_N: torch.Tensor) -> Work:
        """Sum into every rank."""
        return _Sum(self, flat_N, even_pieces(flat_N.numel(), self.world_size), then_gather=True)

    def reduce_to_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Sum each piece into its owner."""
        return _Sum(self, flat_N, pieces)

    def gather_from_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Copy each piece from its owner."""
        return as_work(*self.post_gather(flat_N, pieces, self.next_tag()))

    def next_tag(self) -> int:
        """One tag per exchange; several messages of one exchange between two ranks arrive in the order of pieces."""
        tag = self._first_tag + self._num_issued % NUM_TAGS
        self._num_issued += 1
        return tag

    def post_gather(self, flat_N: torch.Tensor, pieces: Sequence[Piece], tag: int) -> list[torch_dist.Work]:
        """Post receives straight into the pieces of others, then sends of our own."""
        works = [self.receive(view(flat_N, p), p.owner, tag) for p in pieces if p.owner != self.rank]
        for piece in pieces:
            if piece.owner == self.rank:
                works += [self.send(view(flat_N, piece), peer, tag) for peer in self.peers()]
        return works

    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not everyone sends to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start to send; `peer` is a rank of the group."""
        work = torch_dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start to receive; `peer` is a rank of the group."""
        work = torch_dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def make_room(self, num_bytes: int) -> None:
        """Finish the oldest sums until `num_bytes` more of staging are within the limit."""
        while self._waits_for_room and self.sums and not self.staging.has_room(num_bytes):
            self.sums[0].advance()

    def advance_through(self, exchange: "_Sum") -> None:
        """Finish `exchange` and all sums issued before it.

        In the order of issue on every rank, whatever the order of the waits: the gather that follows a sum in
        `reduce` then cannot wait for a rank which itself waits for us.
        """
        while not exchange.is_summed:
            self.sums[0].advance()


class _Sum:
    """Everyone sends each piece to its owner, which adds what came in the order of ranks.

    Two states, summed or not; only `advance` moves it. With `then_gather` the sums are sent back to everyone.
    """

    def __init__(
        self, queue: MessageQueue, flat_N: torch.Tensor, pieces: Sequence[Piece], *, then_gather: bool = False
    ) -> None:
        self.is_summed = False
        self._queue = queue
        self._flat_N = flat_N
        self._pieces = pieces
        self._gather_tag = 0
        tag = queue.next_tag()
        if then_gather:
            self._gather_tag = queue.next_tag()
        self._own = [p for p in pieces if p.owner == queue.rank]
        numel = sum(p.numel for p in self._own) * (queue.world_size - 1)
        queue.make_room(numel * flat_N.element_size())
        self._buffer, staged = queue.staging.take(numel, flat_N.dtype, flat_N.device)
        self._staged = self._cut(staged)
        # Receives before sends: a message that finds its receive posted needs no extra round.
        self._receives = [
            queue.receive(slot, peer, tag)
            for slots in self._staged
            for peer, slot in zip(queue.peers(), slots, strict=True)
        ]
        self._sends = [queue.send(view(flat_N, p), p.owner, tag) for p in pieces if p.owner != queue.rank]
        queue.sums.append(self)

    def poll(self) -> bool:
        """Whether it was waited for: of gloo's messages nobody can say before that whether they came."""
        return self.is_summed and not self._sends

    def wait(self) -> None:
        """Add what came, send sums back if asked, and return when `flat_N` may be used and written."""
        if not self.is_summed:
            self._queue.advance_through(self)
        self._finish_sends()

    def _finish_sends(self) -> None:
        sends, self._sends = self._sends, []
        for work in sends:
            work.wait()

    def advance(self) -> None:
        """Wait for the messages to us, add them, give the staging back. The oldest of the queue only."""
        oldest = self._queue.sums.popleft()
        assert oldest is self
        assert not self.is_summed
        for work in self._receives:
            work.wait()
        queue = self._queue
        for piece, slots in zip(self._own, self._staged, strict=True):
            by_rank: list[torch.Tensor] = [
                slots[(r - queue.rank - 1) % queue.world_size] for r in range(queue.world_size) if r != queue.rank
            ]
            add_in_rank_order(view(self._flat_N, piece), by_rank, queue.rank)
        queue.staging.give_back(self._buffer)
        self._receives, self._staged, self._buffer = [], [], None
        self.is_summed = True
        if self._gather_tag:
            # Ours is sent now; others' pieces of flat_N are overwritten, so their own sends must be over.
            self._finish_sends()
            self._sends = queue.post_gather(self._flat_N, self._pieces, self._gather_tag)

    def _cut(self, staged: torch.Tensor) -> list[list[torch.Tensor]]:
        """Per owned piece, one slot for each peer, in the order of `peers()`."""
        slots, offset = [], 0
        for piece in self._own:
            row = []
            for _ in range(self._queue.world_size - 1):
                row.append(staged[offset : offset + piece.numel])
                offset += piece.numel
            slots.append(row)
        return slots
