"""The three in-place collectives of stages 0 to 2 for host memory: by reading, else by messages, else by gloo's.

Where ranks cannot read each other's memory (`benchmarks/collectives.md` has the figures):

- to owners: messages, and a local sum. More than 8 ranks: gloo's all-to-all, and the sum.
- every rank: gloo's all-reduce for two ranks, which beside a running backward is the quicker one, and for more than 8.
  With 3 to 8 ranks messages (a sum at each rank's part, sent back), which cost up to 1.3 times an all-reduce and buy
  that stages 0, 1 and 2 get the same sum to the last bit; of two ranks a + b is the same whoever adds.
- from owners: messages between two ranks, a broadcast per piece among more.
"""

from collections.abc import Sequence

import torch
from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.torch_backend import TorchBackend
from deepspeed.comm.torch_group import TorchGroup
from torch.distributed import ProcessGroup

from ds_ext_cpu.comm.direct import DirectQueue
from ds_ext_cpu.comm.messages import MessageQueue
from ds_ext_cpu.comm.reading_group import MAX_READING_RANKS, ReadingGroup


class ReadingBackend(TorchBackend):
    """`Backend` over groups that are `ReadingGroup`s."""

    def make_group(self, group: ProcessGroup) -> TorchGroup:
        """A `ReadingGroup` with messages of its own."""
        return _Member(group, self.staging_bytes)

    def sum_everywhere(self, member: TorchGroup, flat_N: torch.Tensor) -> Work:
        """By reading; by messages among 3 to 8 ranks."""
        if queue := _queue(member, flat_N):
            return queue.reduce(flat_N)
        if member.world_size > 2 and (messages := _messages(member, flat_N)):
            return member.watch.start(lambda: messages.reduce(flat_N))
        return super().sum_everywhere(member, flat_N)

    def sum_to_owners(self, member: TorchGroup, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """By reading; by messages among up to 8 ranks."""
        if queue := _queue(member, flat_N):
            return queue.reduce_to_owners(flat_N, pieces)
        if messages := _messages(member, flat_N):
            return member.watch.start(lambda: messages.reduce_to_owners(flat_N, pieces))
        return super().sum_to_owners(member, flat_N, pieces)

    def copy_from_owners(self, member: TorchGroup, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """By reading; by messages between two ranks."""
        if queue := _queue(member, flat_N):
            return queue.gather_from_owners(flat_N, pieces)
        if member.world_size == 2 and (messages := _messages(member, flat_N)):
            return member.watch.start(lambda: messages.gather_from_owners(flat_N, pieces))
        return super().copy_from_owners(member, flat_N, pieces)


class _Member(ReadingGroup):
    """A group, and the messages of this backend in it."""

    def __init__(self, group: ProcessGroup, staging_bytes: int) -> None:
        super().__init__(group, staging_bytes)
        self.messages = MessageQueue(group, self.staging)


def _queue(member: TorchGroup, flat_N: torch.Tensor) -> DirectQueue | None:
    """Where this buffer is read, if the ranks can."""
    assert isinstance(member, _Member)
    member.connect()
    return member.queue if flat_N.device.type == "cpu" else None


def _messages(member: TorchGroup, flat_N: torch.Tensor) -> MessageQueue | None:
    """Where this buffer goes by messages with a sum made here: host memory, and few ranks."""
    assert isinstance(member, _Member)
    return member.messages if flat_N.device.type == "cpu" and member.world_size <= MAX_READING_RANKS else None
