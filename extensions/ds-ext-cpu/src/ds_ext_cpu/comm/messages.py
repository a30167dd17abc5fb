"""All-reduces over gloo's point-to-point messages. The sum is computed here, in the order of ranks.

`reading_group.py` creates one `MessageQueue` per group, and decides when it is used instead of gloo's all-reduce.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

from collections import deque

import torch
import torch.distributed as torch_dist
from deepspeed.comm.transports import StagingPool, add_in_rank_order
from torch.distributed import ProcessGroup

# Tags of these messages start here, above the tags that users pass to send and recv.
FIRST_TAG = 1 << 20
NUM_TAGS = 1 << 20


class MessageQueue:
    """The all-reduces of this rank in one group: the next tag, and the all-reduces whose sums are still to be added."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        self.staging = staging
        self.rank = group.rank()
        self.world_size = group.size()
        self.unsummed: deque[AllReduce] = deque()
        self._group = group
        self._num_tags = 0

    def all_reduce(self, full_N: torch.Tensor) -> "AllReduce":
        """Start an in-place all-reduce. Does not block."""
        return AllReduce(self, full_N)

    def next_tag(self) -> int:
        """Return a tag for one message between each pair of ranks."""
        tag = FIRST_TAG + self._num_tags % NUM_TAGS
        self._num_tags += 1
        return tag

    def peers(self) -> list[int]:
        """Return the other ranks, starting with the next one, so that not all ranks send to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start a send to the rank `peer` of the group."""
        work = torch_dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start a receive from the rank `peer` of the group."""
        work = torch_dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def sum_through(self, last: "AllReduce") -> None:
        """Compute the sums of `last` and of all all-reduces that were issued before it.

        Every rank computes them in the order of issue, whatever the order of the waits. So no rank waits for a sum from
        a rank that waits for it.
        """
        while not last.is_summed:
            self.unsummed.popleft().sum_and_return()


class AllReduce:
    """An all-reduce: each rank sends part r of its buffer to rank r, which adds the parts in the order of ranks and
    sends the sum back. A buffer of few elements has fewer parts than ranks."""

    def __init__(self, queue: MessageQueue, full_N: torch.Tensor) -> None:
        self.is_summed = False
        self._queue = queue
        self._parts = full_N.split(-(-full_N.numel() // queue.world_size))
        self._own = self._parts[queue.rank] if queue.rank < len(self._parts) else full_N[:0]
        self._tag, self._return_tag = queue.next_tag(), queue.next_tag()
        numel = self._own.numel() * (queue.world_size - 1)
        self._buffer, staged = queue.staging.take(numel, full_N.dtype, full_N.device)
        self._staged = dict(zip(queue.peers(), staged.split(self._own.numel()), strict=True)) if numel else {}
        # Receives before sends: a message for a posted receive needs no extra round trip.
        self._receives = [queue.receive(slot, peer, self._tag) for peer, slot in self._staged.items()]
        self._messages = [queue.send(self._parts[rank], rank, self._tag) for rank in self._owners()]
        queue.unsummed.append(self)

    def poll(self) -> bool:
        """Return whether `wait` has returned: before that, gloo cannot say whether messages have arrived."""
        return self.is_summed and not self._messages

    def wait(self) -> None:
        """Compute the pending sums, send them back, and return when all sums are in the buffer."""
        self._queue.sum_through(self)
        self._finish()

    def sum_and_return(self) -> None:
        """Wait for the messages to this rank, add them, and send the sum to all ranks. Only for the oldest one."""
        for work in self._receives:
            work.wait()
        queue = self._queue
        others = [self._staged[rank] for rank in sorted(self._staged)]
        if others:
            add_in_rank_order(self._own, others, queue.rank)
        queue.staging.give_back(self._buffer)
        self._receives, self._staged, self._buffer = [], {}, None
        self.is_summed = True
        self._finish()  # the receives below overwrite the parts of other ranks
        self._messages = [queue.receive(self._parts[rank], rank, self._return_tag) for rank in self._owners()]
        if self._own.numel() > 0:
            self._messages += [queue.send(self._own, peer, self._return_tag) for peer in queue.peers()]

    def _owners(self) -> list[int]:
        return [rank for rank in self._queue.peers() if rank < len(self._parts)]

    def _finish(self) -> None:
        messages, self._messages = self._messages, []
        for work in messages:
            work.wait()
