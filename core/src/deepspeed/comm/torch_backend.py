"""`Backend` over torch.distributed: gloo for host memory, and any other library by its collectives.

gloo's primitives are very unequal. Milliseconds for one full fp32 tensor over loopback, one core per rank
(`benchmarks/collectives.py`; the machine had two cores, so four ranks share them):

    exchange                          primitive         2 ranks 64 MiB   4 ranks 16 MiB   4 ranks 64 MiB
    every rank gets the sum           messages                     69               30              158
                                      all_reduce                   76               25              120
    each piece to its owner           messages                     36               15               80
                                      reduce each                  96               20               91
                                      all_to_all, sum              46               16               86
                                      reduce_scatter              123               42              241
    each piece from its owner         messages                     32               12               65
                                      broadcast each               45               14               58
                                      all_gather                  101               18              217
    one owner has all, from it        messages                     49               15               74
                                      broadcast                    40               12               68

Hence on gloo, for host memory:

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

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.staging import StagingPool
from deepspeed.errors import CommError

# Tags of our messages start here, out of the way of tags that users give to send and recv.
_FIRST_TAG = 1 << 20
_NUM_TAGS = 1 << 20

# A low-precision sum of three or more ranks goes through fp32 in blocks that stay in a core's cache (512 KiB).
_BLOCK_NUMEL = 1 << 17

# Among more ranks a message to each costs more memory and more latency than a tree.
_MAX_MESSAGE_RANKS = 8

# Two buckets of the preferred size. They stay between steps: fresh memory costs more than the sum it is for.
_DEFAULT_STAGING_BYTES = 16 << 20


class TorchBackend:
    """The three exchanges over the process groups of torch.distributed.

    Made by `deepspeed.comm.backend()`, once per process. Sums by messages are added in the order of ranks, so a result
    depends neither on the moment at which messages arrive nor on where a buffer is cut. At most `staging_bytes` (or one
    exchange, if that is more) are held for messages that are still to be added; a further exchange first finishes
    the oldest, which its peers have always sent already or are about to send, so that this cannot deadlock.
    """

    def __init__(self, name: str, staging_bytes: int = _DEFAULT_STAGING_BYTES) -> None:
        self.name = name
        self._staging = StagingPool(staging_bytes)
        self._queues: dict[ProcessGroup, _Queue] = {}

    @property
    def held_bytes(self) -> int:
        return self._staging.held_bytes

    def preferred_bucket_bytes(self, world_size: int, *, to_owners: bool) -> int:
        """8 MiB for few ranks: messages cost little less per byte beyond it, and less of the last one is waited for.

        Two ranks all-reduce in place: 16 MiB, which stage 0 steps through 3% faster than 4 and which holds no memory
        of its own. More ranks cut a bucket into smaller messages only when it has several owners, so the size grows
        slowly.
        """
        if world_size == 2 and not to_owners:
            return 16 << 20
        return (8 << 20) if world_size <= _MAX_MESSAGE_RANKS else (32 << 20)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D tensor of torch's own allocator."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce(self, flat_N: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """Sum in place on every rank."""
        queue = self._queue(group)
        _check(flat_N, (), queue.world_size)
        if queue.world_size == 1 or flat_N.numel() == 0:
            return DONE
        if queue.world_size == 2 or not queue.sums_by_messages(flat_N):
            return as_work(torch_dist.all_reduce(flat_N, group=queue.group, async_op=True))
        return _Exchange(queue, flat_N, even_pieces(flat_N.numel(), queue.world_size), then_gather=True)

    def reduce_to_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Sum each piece into its owner."""
        queue = self._queue(group)
        pieces = _check(flat_N, pieces, queue.world_size)
        if queue.world_size == 1 or not pieces:
            return DONE
        if queue.sums_by_messages(flat_N):
            return _Exchange(queue, flat_N, pieces)
        if queue.only_broadcast_and_all_reduce(flat_N):
            return _each(pieces, lambda p: torch_dist.all_reduce(_view(flat_N, p), group=queue.group, async_op=True))
        if _is_even_cover(flat_N, pieces, queue.world_size) and queue.has_tensor_collectives(flat_N):
            own = _view(flat_N, pieces[queue.rank])
            return as_work(reduce_scatter_tensor(own, flat_N, group=queue.group, async_op=True))
        return _each(
            pieces,
            lambda p: torch_dist.reduce(_view(flat_N, p), group=queue.group, async_op=True, group_dst=p.owner),
        )

    def gather_from_owners(
        self, flat_N: torch.Tensor, pieces: Sequence[Piece], group: ProcessGroup | None = None
    ) -> Work:
        """Copy each piece from its owner."""
        queue = self._queue(group)
        pieces = _check(flat_N, pieces, queue.world_size)
        if queue.world_size == 1 or not pieces:
            return DONE
        if queue.world_size == 2 and queue.is_gloo_on_host(flat_N):
            return as_work(*queue.post_gather(flat_N, pieces, queue.next_tag()))
        if _is_even_cover(flat_N, pieces, queue.world_size) and queue.has_tensor_collectives(flat_N):
            own = _view(flat_N, pieces[queue.rank])
            return as_work(all_gather_into_tensor(flat_N, own, group=queue.group, async_op=True))
        return _each(
            pieces,
            lambda p: torch_dist.broadcast(_view(flat_N, p), group=queue.group, async_op=True, group_src=p.owner),
        )

    def release(self) -> None:
        """Finish what is in flight and drop the staging memory."""
        for queue in self._queues.values():
            queue.finish_reductions()
        self._queues.clear()
        self._staging.release()

    def _queue(self, group: ProcessGroup | None) -> "_Queue":
        resolved = group if group is not None else torch_dist.group.WORLD
        if resolved is None:
            raise no_group_error("an exchange")
        queue = self._queues.get(resolved)
        if queue is None:
            queue = self._queues[resolved] = _Queue(resolved, self._staging)
        return queue


def no_group_error(asked: str) -> CommError:
    """What to say when something needs a process group and there is none."""
    return CommError(f"{asked} was asked for, but no process group exists; call deepspeed.init_distributed() first")


def even_pieces(numel: int, world_size: int) -> list[Piece]:
    """Cut `[0, numel)` into `world_size` pieces in rank order, the last ones shorter or empty."""
    size = math.ceil(numel / world_size)
    return [Piece(min(r * size, numel), min((r + 1) * size, numel), r) for r in range(world_size)]


def reduce_scatter_tensor(output: torch.Tensor, input_: torch.Tensor, **kwargs: object) -> torch_dist.Work | None:
    """`torch.distributed.reduce_scatter_tensor` under the name that this torch gives it without a warning."""
    return _REDUCE_SCATTER(output, input_, **kwargs)


def all_gather_into_tensor(output: torch.Tensor, input_: torch.Tensor, **kwargs: object) -> torch_dist.Work | None:
    """`torch.distributed.all_gather_into_tensor` under the name that this torch gives it without a warning."""
    return _ALL_GATHER(output, input_, **kwargs)


# torch 2.13 renamed both and warns at the old names; torch 2.6 has the old names only.
_REDUCE_SCATTER = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
_ALL_GATHER = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor


class _Done:
    """Nothing to wait for: one rank, or nothing to exchange."""

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


class _Works:
    """Several torch works, waited for once."""

    __slots__ = ("_works",)

    def __init__(self, works: list[torch_dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each, in the order of issue."""
        works, self._works = self._works, []
        for work in works:
            work.wait()


class _Queue:
    """What this rank has in flight in one group: tags in the order of issue, and sums that are still to be added."""

    def __init__(self, group: ProcessGroup, staging: StagingPool) -> None:
        self.group = group
        self.staging = staging
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.reductions: deque[_Exchange] = deque()
        self._num_issued = 0
        self._library_of = _library_by_device(group)

    def library(self, tensor: torch.Tensor) -> str:
        """The library that moves tensors of this device: "gloo", ..."""
        return self._library_of.get(tensor.device.type, self._library_of.get("", ""))

    def is_gloo_on_host(self, tensor: torch.Tensor) -> bool:
        """True where point-to-point messages exist and beat most collectives."""
        return tensor.device.type == "cpu" and self.library(tensor) == "gloo"

    def sums_by_messages(self, tensor: torch.Tensor) -> bool:
        """True where sums are made here, in the order of ranks, from messages."""
        return self.world_size <= _MAX_MESSAGE_RANKS and self.is_gloo_on_host(tensor)

    def only_broadcast_and_all_reduce(self, tensor: torch.Tensor) -> bool:
        """True where the library has no other collective: gloo, on device memory."""
        return tensor.device.type != "cpu" and self.library(tensor) == "gloo"

    def has_tensor_collectives(self, tensor: torch.Tensor) -> bool:
        """True where reduce_scatter and all_gather of one tensor exist and may work in place (torch's MPI has none)."""
        return self.library(tensor) not in ("gloo", "mpi")

    def next_tag(self) -> int:
        """One tag per exchange; several messages of one exchange between two ranks arrive in the order of pieces."""
        tag = _FIRST_TAG + self._num_issued % _NUM_TAGS
        self._num_issued += 1
        return tag

    def post_gather(self, flat_N: torch.Tensor, pieces: Sequence[Piece], tag: int) -> list[torch_dist.Work]:
        """Post receives straight into the pieces of others, then sends of our own."""
        works = [self.receive(_view(flat_N, p), p.owner, tag) for p in pieces if p.owner != self.rank]
        for piece in pieces:
            if piece.owner == self.rank:
                works += [self.send(_view(flat_N, piece), peer, tag) for peer in self.peers()]
        return works

    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not everyone sends to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start to send; `peer` is a rank of the group."""
        work = torch_dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> torch_dist.Work:
        """Start to receive; `peer` is a rank of the group."""
        work = torch_dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def make_room(self, num_bytes: int) -> None:
        """Finish the oldest sums until `num_bytes` more of staging are within the limit."""
        while self.reductions and not self.staging.has_room(num_bytes):
            self.reductions[0].advance()

    def advance_through(self, exchange: "_Exchange") -> None:
        """Finish the sums of `exchange` and of all issued before it.

        In the order of issue on every rank, whatever the order of the waits: the gather that follows a sum in
        `reduce` then cannot wait for a rank which itself waits for us.
        """
        while not exchange.is_summed:
            self.reductions[0].advance()

    def finish_reductions(self) -> None:
        """Finish every sum in flight."""
        while self.reductions:
            self.reductions[0].advance()


class _Exchange:
    """A sum by messages: everyone sends each piece to its owner, which adds what came in the order of ranks.

    Two states, summed or not; only `advance` moves it. With `then_gather` the sums are sent back to everyone.
    """

    def __init__(
        self, queue: _Queue, flat_N: torch.Tensor, pieces: Sequence[Piece], *, then_gather: bool = False
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
        self._sends = [queue.send(_view(flat_N, p), p.owner, tag) for p in pieces if p.owner != queue.rank]
        queue.reductions.append(self)

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
        oldest = self._queue.reductions.popleft()
        assert oldest is self
        assert not self.is_summed
        for work in self._receives:
            work.wait()
        queue = self._queue
        for piece, slots in zip(self._own, self._staged, strict=True):
            by_rank: list[torch.Tensor] = [
                slots[(r - queue.rank - 1) % queue.world_size] for r in range(queue.world_size) if r != queue.rank
            ]
            add_in_rank_order(_view(self._flat_N, piece), by_rank, queue.rank)
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


def add_in_rank_order(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    """`own = x_0 + x_1 + ... + x_{W-1}`, left to right, where `own` is `x_rank` and `others` the rest by rank.

    `others` are overwritten. With three or more low-precision summands the sum runs in fp32 and is rounded once, as
    one addition of two does anyway.
    """
    if own.dtype in (torch.bfloat16, torch.float16) and len(others) > 1:
        _add_in_fp32(own, others, rank)
        return
    # x_0 .. x_{rank-1} add up in the first slot; then own joins (a + b is b + a to the last bit); then the rest.
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


def _library_by_device(group: ProcessGroup) -> dict[str, str]:
    """`"cpu:gloo,xyz:abc"` as a dict; a plain name serves every device and is stored under ""."""
    config = str(torch_dist.get_backend_config(group))
    libraries = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return libraries or {"": str(torch_dist.get_backend(group))}


def _check(flat_N: torch.Tensor, pieces: Sequence[Piece], world_size: int) -> list[Piece]:
    """The pieces that hold something; raises `CommError` for a buffer or piece that breaks the contract."""
    if flat_N.dim() != 1 or not flat_N.is_contiguous():
        raise CommError(
            f"an exchange needs a contiguous 1-D buffer, got shape {tuple(flat_N.shape)} with strides"
            f" {flat_N.stride()}; pass buffer.view(-1)"
        )
    filled = []
    for piece in pieces:
        if not (0 <= piece.start <= piece.stop <= flat_N.numel() and 0 <= piece.owner < world_size):
            raise CommError(
                f"{piece} does not fit a buffer of {flat_N.numel()} elements and a group of {world_size} ranks;"
                " `owner` is a rank within the group"
            )
        if piece.stop > piece.start:
            filled.append(piece)
    return filled


def _is_even_cover(flat_N: torch.Tensor, pieces: Sequence[Piece], world_size: int) -> bool:
    """True if the pieces are W equal parts of the whole buffer in the order of ranks."""
    size, rest = divmod(flat_N.numel(), world_size)
    return (
        rest == 0
        and len(pieces) == world_size
        and all(p == (r * size, (r + 1) * size, r) for r, p in enumerate(pieces))
    )


def _each(pieces: Sequence[Piece], start: Callable[[Piece], torch_dist.Work | None]) -> Work:
    return as_work(*[start(piece) for piece in pieces])


def as_work(*works: torch_dist.Work | None) -> Work:
    """Several torch works (None: already done) as one."""
    return _Works([work for work in works if work is not None])


def _view(flat_N: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat_N[piece.start : piece.stop]
