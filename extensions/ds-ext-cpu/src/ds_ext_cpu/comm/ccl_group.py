"""`CCLGroup` is the `GroupBackend` over `ccl`. The engine's collectives have their own group, which a rank can leave.

`plugin.py` provides it for `ccl` groups. The model's own collectives stay in the original group, because each rank may
issue them at a different place among the engine's collectives. After a failure, the ranks create a new own group.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.comm.backend import Capabilities, Work, timeout_of
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.torch_group import TorchGroup
from deepspeed.comm.transports import TensorCollectives, Transport
from deepspeed.errors import CommError, first_line
from torch.distributed import PrefixStore, ProcessGroup

from ds_ext_cpu.comm.ccl import connect

# Larger buckets hardly lower the cost per byte, and lengthen the wait for the last bucket.
_BUCKET_BYTES = 8 << 20


def is_served(group: ProcessGroup) -> bool:
    """Return whether `group` uses this library, and not another library with the name ccl."""
    return hasattr(group._get_backend(torch.device("cpu")), "transport")


class CCLGroup(TorchGroup):
    """The collectives of one group over `ccl`."""

    @property
    def capabilities(self) -> Capabilities:
        """The library has a native reduce-scatter, and detects ranks that issue different collectives."""
        return replace(
            super().capabilities, preferred_bucket_bytes=_BUCKET_BYTES, preferred_all_reduce_bytes=_BUCKET_BYTES
        )

    def connect(self) -> None:
        """Create the own group of these collectives, also after a failure."""
        if self._is_connected:
            return
        if self.world_size > 1:
            store = PrefixStore(self.watch.meet(), torch_dist.distributed_c10d._get_default_store())
            self.own_group = _group_over(store, self.rank, self.watch.ranks, timeout_of(self.group))
        self._is_connected = True

    def transport(self, device_type: str) -> Transport:
        """Return a transport that runs each collective as one operation of the library."""
        return _Named(self.own_group, self._explained)

    def barrier(self) -> None:
        """Wait for every rank, in the engine's own group."""
        self.connect()
        _NamedWork(torch_dist.barrier(group=self.own_group, async_op=True), "a barrier", self._explained).wait()

    def messages(self) -> "_Messages | None":
        """Return messages in the own group. Called by all ranks together, after `connect`."""
        return None if self.world_size == 1 else _Messages(self)

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works`, which the library continues. After a failure, peers that wait for this rank raise."""
        own = self.own_group
        super().abandon([], failed=failed)  # records the cause before a peer reads it
        if failed and own is not self.group:
            reason = sys.exc_info()[1]
            text = f"rank {torch_dist.get_rank()} failed" + (f": {first_line(reason)}" if reason else "")
            _library(own).fail(text)

    def _explained(self, error: RuntimeError, what: str) -> CommError:
        if cause := self.watch.cause():
            return PeerFailed(f"rank {torch_dist.get_rank()} cannot finish {what}: {cause}", cause)
        return CommError(first_line(error))


_Explain = Callable[[RuntimeError, str], CommError]


class _NamedWork:
    """A work that raises an error with the rank that failed first."""

    def __init__(self, work: Any, what: str, explain: _Explain) -> None:
        self._work, self._what, self._explain = work, what, explain

    def poll(self) -> bool:
        """Return whether the work is over; only `wait` raises failures."""
        return bool(self._work.is_completed() if isinstance(self._work, torch_dist.Work) else self._work.poll())

    def wait(self) -> None:
        """Wait for the work."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise self._explain(error, self._what) from error


class _Named(TensorCollectives):
    """The library's collectives, wrapped in `_NamedWork`."""

    def __init__(self, group: ProcessGroup, explain: _Explain) -> None:
        super().__init__(group)
        self._explain = explain

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """One all-reduce."""
        return self._named(super().all_reduce(full_N, tag), "an all-reduce", tag)

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """One reduce-scatter."""
        return self._named(super().reduce_scatter(shard_S, full_N, tag), "a reduce-scatter", tag)

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """One all-gather."""
        return self._named(super().all_gather(full_N, shard_S, tag), "an all-gather", tag)

    def broadcast(self, tensor_N: torch.Tensor, source: int, tag: str) -> Work:
        """One broadcast."""
        return self._named(super().broadcast(tensor_N, source, tag), "a broadcast", tag)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """One all-to-all."""
        return self._named(super().all_to_all(outputs, inputs, output_N, input_N, tag), "an all-to-all", tag)

    def _named(self, work: Work, kind: str, tag: str) -> Work:
        return _NamedWork(work, f"{kind} ({tag})" if tag else kind, self._explain)


class _Messages:
    """Implements `deepspeed.comm.backend.Messages`."""

    def __init__(self, group: CCLGroup) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start a send."""
        work = torch_dist.isend(tensor, group=self._group.own_group, tag=tag, group_dst=peer)
        return _NamedWork(work, f"a send to rank {self._group.watch.ranks[peer]}", self._group._explained)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start a receive."""
        work = torch_dist.irecv(tensor, group=self._group.own_group, tag=tag, group_src=peer)
        return _NamedWork(work, f"a receive from rank {self._group.watch.ranks[peer]}", self._group._explained)

    def abandon(self) -> None:
        """Do nothing: `CCLGroup.abandon` leaves the group and its messages."""


def _library(group: ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def _group_over(store: PrefixStore, rank: int, ranks: Sequence[int], timeout: Any) -> ProcessGroup:
    """Create a group that torch does not register, so it ends with the last reference to it."""
    own, kind = ProcessGroup(store, rank, len(ranks)), ProcessGroup.BackendType.CUSTOM
    own._set_default_backend(kind)
    own._register_backend(torch.device("cpu"), kind, connect(store, rank, ranks, timeout))
    return own
