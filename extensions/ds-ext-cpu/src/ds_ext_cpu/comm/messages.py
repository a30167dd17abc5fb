"""All-reduces by gloo's point-to-point messages, with the sum made here, in the order of ranks.

One `MessageQueue` per group, made by `reading_group.py`, which says where messages beat gloo's own all-reduce.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

from collections import deque

import torch
import torch.distributed as torch_dist
from deepspeed.comm.transports import StagingPool, add_in_rank_order
from torch.distributed import ProcessGroup

# Tags of our messages start here, out of the way of tags that users give to send and recv.
FIRST_TAG = 1 << 20
NUM_TAGS = 1 << 20


class MessageQueue:
    """What this rank has in flight in one group: tags in the order of issue, and sums that are still to be added."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        self.staging = staging
        self.rank = group.rank()
        self.world_size = group.size()
        self.unsummed: deque[AllReduce] = deque()
        self._group = group
        self._num_tags = 0

    def all_reduce(self, full_N: torch.Tensor) -> "AllReduce":
        """Sum into every rank; waits for nobody."""
        return AllReduce(self, full_N)

    def next_tag(self) -> int:
        """A tag for one message between each two ranks."""
        tag = FIRST_TAG + self._num_tags % NUM_TAGS
        self._num_tags += 1
        return tag

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

    def sum_through(self, last: "AllReduce") -> None:
        """Make the sums of `last` and of all that were issued before it.

        In the order of issue on every rank, whatever the order of the waits: sending sums back then cannot wait for a
        rank which itself waits for this one.
        """
        while not last.is_summed:
            self.unsummed.popleft().sum_and_return()


class AllReduce:
    """Everyone sends each part of its buffer to one rank, which adds what came in the order of ranks and sends the sum
    back. Part r is rank r's; a buffer of few elements has fewer parts than ranks."""

    def __init__(self, queue: MessageQueue, full_N: torch.Tensor) -> None:
        self.is_summed = False
        self._queue = queue
        self._parts = full_N.split(-(-full_N.numel() // queue.world_size))
        self._own = self._parts[queue.rank] if queue.rank < len(self._parts) else full_N[:0]
        self._tag, self._return_tag = queue.next_tag(), queue.next_tag()
        numel = self._own.numel() * (queue.world_size - 1)
        self._buffer, staged = queue.staging.take(numel, full_N.dtype, full_N.device)
        self._staged = dict(zip(queue.peers(), staged.split(self._own.numel()), strict=True)) if numel else {}
        # Receives before sends: a message that finds its receive posted needs no extra round.
        self._receives = [queue.receive(slot, peer, self._tag) for peer, slot in self._staged.items()]
        self._messages = [queue.send(self._parts[rank], rank, self._tag) for rank in self._owners()]
        queue.unsummed.append(self)

    def poll(self) -> bool:
        """Whether it was waited for: of gloo's messages nobody can say before that whether they came."""
        return self.is_summed and not self._messages

    def wait(self) -> None:
        """Make the sums that are due, send them back, and return when the buffer has all of them."""
        self._queue.sum_through(self)
        self._finish()

    def sum_and_return(self) -> None:
        """Wait for the messages to this rank, add them, and send the sum to everyone. The oldest of the queue only."""
        for work in self._receives:
            work.wait()
        queue = self._queue
        others = [self._staged[rank] for rank in sorted(self._staged)]
        if others:
            add_in_rank_order(self._own, others, queue.rank)
        queue.staging.give_back(self._buffer)
        self._receives, self._staged, self._buffer = [], {}, None
        self.is_summed = True
        self._finish()  # the parts of others are about to be overwritten
        self._messages = [queue.receive(self._parts[rank], rank, self._return_tag) for rank in self._owners()]
        if self._own.numel() > 0:
            self._messages += [queue.send(self._own, peer, self._return_tag) for peer in queue.peers()]

    def _owners(self) -> list[int]:
        return [rank for rank in self._queue.peers() if rank < len(self._parts)]

    def _finish(self) -> None:
        messages, self._messages = self._messages, []
        for work in messages:
            work.wait()
