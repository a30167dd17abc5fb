"""`ReadingGroup` is the `GroupBackend` for host memory: ranks of one machine read memory, others send messages."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from deepspeed.comm.backend import Capabilities, Work, parts_of
from deepspeed.comm.torch_group import DEFAULT_STAGING_BYTES, TorchGroup
from deepspeed.comm.transports import GlooOnHost, StagingPool, Transport
from torch.distributed import ProcessGroup

from ds_ext_cpu.comm.direct import DirectQueue, connect
from ds_ext_cpu.comm.direct_messages import DirectMessages
from ds_ext_cpu.comm.messages import MessageQueue
from ds_ext_cpu.comm.readings import Reading

# With more ranks, each rank would have to read too many boards.
MAX_READING_RANKS = 8


class ReadingGroup(TorchGroup):
    """A group over gloo. Up to 8 ranks of one machine read each other's memory if the kernel permits it.

    Args:
        group: a process group that includes this process.
        staging_bytes: limit on the memory that is kept to receive values before they are summed.
    """

    def __init__(self, group: ProcessGroup, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        super().__init__(group, staging_bytes)
        self.queue: DirectQueue | None = None
        self._has_met = False  # whether `connect` has checked if the ranks can read each other's memory

    @property
    def capabilities(self) -> Capabilities:
        """Direct reads give a native reduce-scatter, and detect ranks that issue different collectives."""
        can = super().capabilities
        by_order = can.matches_by_order and not self.is_direct
        return replace(can, native_reduce_scatter=self.is_direct, matches_by_order=by_order)

    @property
    def is_direct(self) -> bool:
        """Whether the ranks read each other's memory."""
        return self.queue is not None

    def connect(self) -> None:
        """Find out together whether the ranks can read each other's memory."""
        if self._is_connected:
            return
        if not self._has_met and 1 < self.world_size <= MAX_READING_RANKS:
            self.watch.meet()
            self.queue = connect(self.group, self.staging)
        self._has_met = True
        if self.queue is None:
            super().connect()
        self._is_connected = True

    def transport(self, device_type: str) -> Transport:
        """Return direct reads or messages for host memory, the base's transport for a device."""
        if device_type != "cpu":
            return super().transport(device_type)
        return self.queue or _Messages(self.own_group, self.staging)

    def messages(self) -> DirectMessages | None:
        """Return messages between two ranks if the ranks read each other's memory, else None. Called by all ranks
        together, after `connect`."""
        return None if self.queue is None else DirectMessages(self.group, self.queue.peers)

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` unfinished. Direct reads work again when all ranks have abandoned; for gloo see `watch.py`."""
        works = parts_of(works)
        read = [work for work in works if isinstance(work, Reading)]
        if self.queue is not None:
            self.queue.abandon(read, failed=failed)
        if self.queue is None or len(read) < len(works):
            super().abandon([work for work in works if not isinstance(work, Reading)], failed=failed)

    def epoch(self) -> tuple[str, int]:
        """See `HasEpochs` in `deepspeed.comm.give_up`."""
        return super().epoch() if self.queue is None else self.queue.epoch()

    def join_epoch(self, epoch: int) -> None:
        """See `HasEpochs` in `deepspeed.comm.give_up`."""
        if self.queue is None:
            super().join_epoch(epoch)
        else:
            self.queue.join_epoch(epoch)


class _Messages(GlooOnHost):
    """gloo, but all-reduces of 3 to 8 ranks sum in the order of ranks. For two ranks, a + b equals b + a."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        super().__init__(group, staging)
        self._messages = MessageQueue(group, staging)

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """Use messages for 3 to 8 ranks, gloo otherwise: for more ranks, messages would have too much latency."""
        if 2 < self.world_size <= MAX_READING_RANKS:
            return self._messages.all_reduce(full_N)
        return super().all_reduce(full_N, tag)
