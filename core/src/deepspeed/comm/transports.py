"""A transport implements a group's collectives with the operations that a torch.distributed library has for a device.

`torch_group.py` chooses a transport per device, and checks the arguments. Starting a collective does not block.

Transports that sum themselves, instead of the library, add in the order of ranks, so every rank computes the same bits.
For the values of other ranks they take a buffer from a `StagingPool`, and give it back after the sum. Fresh memory
would cost a page fault per 4 KiB for every bucket, which takes as long as the sum itself.

Shape legend: N numel of a flat buffer, S numel of a shard (N == W * S), W ranks of the group.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Followed, Work, as_work

_ROUND_BYTES = 1 << 12
# A free buffer more than this many times larger than requested is left for a larger collective.
_MAX_WASTE = 4


class StagingPool:
    """`StagingPool` keeps byte buffers for reuse, at most `limit_bytes` over all devices, or a single larger one."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()  # groups share the pool, and each thread may use another group
        self._free: list[torch.Tensor] = []
        self._taken_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are taken or free."""
        return self._taken_bytes + sum(buffer.numel() for buffer in self._free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return a buffer to give back later (None if `numel` is 0), and its first `numel` elements of `dtype`,
        uninitialized."""
        if numel == 0:
            return None, torch.empty(0, dtype=dtype, device=device)
        num_bytes = numel * dtype.itemsize
        with self._lock:
            buffer = self._take(num_bytes, device)
        return buffer, buffer[:num_bytes].view(dtype)

    def _take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        fitting = [
            b
            for b in self._free
            if b.device == device and num_bytes <= b.numel() <= num_bytes * _MAX_WASTE + _ROUND_BYTES
        ]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            # By identity: `list.remove` would compare tensors element by element.
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._make_space(num_bytes)
            rounded = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES
            buffer = torch.empty(rounded, dtype=torch.uint8, device=device)
        self._taken_bytes += buffer.numel()
        return buffer

    def give_back(self, buffer: torch.Tensor | None) -> None:
        """Give back a buffer from `take`. The pool keeps the buffer if the limit allows."""
        if buffer is None:
            return
        with self._lock:
            self._taken_bytes -= buffer.numel()
            if self.held_bytes + buffer.numel() <= self.limit_bytes:
                self._free.append(buffer)

    def release(self) -> None:
        """Drop the free buffers."""
        with self._lock:
            self._free.clear()

    def _make_space(self, num_bytes: int) -> None:
        """Drop free buffers, the oldest first, so that a new one stays within the limit."""
        while self._free and self.held_bytes + num_bytes > self.limit_bytes:
            self._free.pop(0)


# Low-precision sums of three or more ranks run in fp32, in blocks that fit in a core's cache (512 KiB).
_BLOCK_NUMEL = 1 << 17


def add_in_rank_order(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    """`own = x_0 + x_1 + ... + x_{W-1}`, left to right, where `own` is `x_rank` and `others` the rest by rank.

    `others` may be overwritten. With three or more low-precision summands the sum runs in fp32 and is rounded once, as
    a single addition of two values is anyway.
    """
    if own.dtype in (torch.bfloat16, torch.float16) and len(others) > 1:
        _add_in_fp32(own, others, rank)
        return
    # x_0 .. x_{rank-1} add up in the first of them; then own joins (a + b is b + a to the last bit); then the rest.
    if rank > 0:
        for other in others[1:rank]:
            others[0].add_(other)
        own.add_(others[0])
    for other in others[rank:]:
        own.add_(other)


def _add_in_fp32(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    sum_B = torch.empty(min(_BLOCK_NUMEL, own.numel()), dtype=torch.float32, device=own.device)
    terms = [*others[:rank], own, *others[rank:]]
    for start in range(0, own.numel(), _BLOCK_NUMEL):
        stop = min(start + _BLOCK_NUMEL, own.numel())
        block = sum_B[: stop - start]
        block.copy_(terms[0][start:stop])
        for term in terms[1:]:
            block.add_(term[start:stop])
        own[start:stop].copy_(block)


# torch 2.13 renamed both and warns at the old names; torch 2.6 has the old names only.
_REDUCE_SCATTER = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
_ALL_GATHER = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor


class Transport(Protocol):
    """The collectives of `GroupBackend` for two or more ranks. Arguments are checked, and tensors are not empty."""

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """Sum in place."""

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """Sum this rank's part of `full_N` into the shard."""

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """Gather the shards."""

    def broadcast(self, tensor_N: torch.Tensor, source: int, tag: str) -> Work:
        """Copy from `source`."""

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """Exchange parts; `outputs` and `inputs` are views of the parts by rank, which may be empty."""


class TensorCollectives:
    """A library with each collective as one operation on whole tensors, as the libraries of devices have."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """One all-reduce."""
        return as_work(torch_dist.all_reduce(full_N, group=self.group, async_op=True))

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """One reduce-scatter."""
        return as_work(reduce_scatter_tensor(shard_S, full_N, group=self.group, async_op=True))

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """One all-gather."""
        return as_work(all_gather_into_tensor(full_N, shard_S, group=self.group, async_op=True))

    def broadcast(self, tensor_N: torch.Tensor, source: int, tag: str) -> Work:
        """One broadcast."""
        return as_work(torch_dist.broadcast(tensor_N, group=self.group, async_op=True, group_src=source))

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """One all-to-all."""
        sizes = [part.numel() for part in outputs], [part.numel() for part in inputs]
        return as_work(torch_dist.all_to_all_single(output_N, input_N, *sizes, group=self.group, async_op=True))

    def part(self, full_N: torch.Tensor, rank: int) -> torch.Tensor:
        """Return part `rank` of W equal parts."""
        return full_N.narrow(0, rank * (full_N.numel() // self.world_size), full_N.numel() // self.world_size)


class OnlyAllReduceAndBroadcast(TensorCollectives):
    """The transport of gloo on device memory, and of MPI."""

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """All-reduce, then copy this rank's part."""
        own = self.part(full_N, self.rank)
        return Followed(self.all_reduce(full_N, tag), lambda: copy(own, shard_S), in_poll=False)

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """Broadcast from each rank."""
        copy(shard_S, self.part(full_N, self.rank))
        return as_work(
            *[
                torch_dist.broadcast(self.part(full_N, rank), group=self.group, async_op=True, group_src=rank)
                for rank in range(self.world_size)
            ]
        )

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """Exchange through host memory; the copy of `input_N` to the host waits for the device."""
        on_host = torch.empty(output_N.shape, dtype=output_N.dtype, device="cpu")
        work = super().all_to_all(outputs, inputs, on_host, input_N.to("cpu"), tag)
        return Followed(work, lambda: copy(on_host, output_N), in_poll=False)


class GlooOnHost(OnlyAllReduceAndBroadcast):
    """The transport of gloo on host memory. gloo's all-to-all with a local sum is three times as fast as its
    reduce-scatter, and so are broadcasts from each rank as its all-gather; see `benchmarks/collectives.md`."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        super().__init__(group)
        self._staging = staging

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """All-reduce; low precision with three or more ranks runs in fp32, since gloo would round each partial sum."""
        if self.world_size == 2 or full_N.dtype not in (torch.bfloat16, torch.float16):
            return super().all_reduce(full_N, tag)
        buffer, wide_N = self._staging.take(full_N.numel(), torch.float32, full_N.device)
        work = super().all_reduce(wide_N.copy_(full_N), tag)

        def round_off() -> None:
            full_N.copy_(wide_N)
            self._staging.give_back(buffer)

        return Followed(work, round_off, in_poll=True)

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """Exchange parts with an all-to-all, then sum the received parts in the order of ranks."""
        buffer, staged_N = self._staging.take(full_N.numel(), full_N.dtype, full_N.device)
        work = as_work(torch_dist.all_to_all_single(staged_N, full_N, group=self.group, async_op=True))

        def add() -> None:
            others = [self.part(staged_N, rank) for rank in range(self.world_size) if rank != self.rank]
            copy(self.part(full_N, self.rank), shard_S)
            add_in_rank_order(shard_S, others, self.rank)
            self._staging.give_back(buffer)

        return Followed(work, add, in_poll=True)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """One all-to-all."""
        return TensorCollectives.all_to_all(self, outputs, inputs, output_N, input_N, tag)


def reduce_scatter_tensor(output: torch.Tensor, input_: torch.Tensor, **kwargs: object) -> torch_dist.Work | None:
    """Call `torch.distributed.reduce_scatter_tensor` under the name that does not warn in this torch version."""
    return _REDUCE_SCATTER(output, input_, **kwargs)


def all_gather_into_tensor(output: torch.Tensor, input_: torch.Tensor, **kwargs: object) -> torch_dist.Work | None:
    """Call `torch.distributed.all_gather_into_tensor` under the name that does not warn in this torch version."""
    return _ALL_GATHER(output, input_, **kwargs)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy, unless both tensors begin at the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
