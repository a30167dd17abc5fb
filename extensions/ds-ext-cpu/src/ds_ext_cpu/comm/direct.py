"""Collectives between ranks of one machine: each rank reads the data that it needs from the memory of its peers.

`reading_group.py` calls `connect`, which returns one `DirectQueue` per group, or None if the ranks are not all on one
machine or may not read each other's memory. No data goes through a socket, and no thread is woken:

    rank 0                                      rank 1, owner of the piece
    announce(n, address of flat_N)
                                                sees it, reads the piece from there, adds it to its own
                                                done = n
    sees it: flat_N may be written again

A rank writes announcements and `done` on its *board* (`boards.py`), and its peers read the board. A rank runs its
collectives in the order of issue. It reads the boards only when it issues a collective or waits (`waiting.py`). So a
wait for a collective ends when each peer has issued this collective *and* then issues another one or waits. This holds
for the ranks of one program, which wait at the same places.

[Note: epochs] A rank that leaves its collectives unfinished (`abandon`) begins an epoch: its numbers continue at the
next multiple of 2**32, and so does its `done`. A peer that needs data of the old epoch from this rank raises `PeerLeft`
at once, and begins the next epoch, too. If the rank has left that epoch meanwhile, the peer raises there again. When
all ranks are in the same epoch, they can continue: every buffer of earlier epochs was dropped.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from deepspeed.comm import parted
from deepspeed.comm.backend import Work, timeout_of
from deepspeed.comm.failure import FailureRecord
from deepspeed.comm.transports import StagingPool
from deepspeed.errors import CommError, first_line
from torch.distributed import ProcessGroup

from ds_ext_cpu.comm.boards import (
    EPOCH_BITS,
    NOTHING_MORE,
    NUM_SLOTS,
    Meeting,
    Peer,
    PeerGone,
    PeerLeft,
    epoch_of,
    meet,
    what,
)
from ds_ext_cpu.comm.readings import Copy, Reading, Sum, Swap
from ds_ext_cpu.comm.waiting import lock, queues, wait_until


def connect(group: ProcessGroup, staging: StagingPool) -> "DirectQueue | None":
    """Return the queue of `group`; None if a rank cannot read another's memory. Called by all ranks together."""
    meeting = meet(group)
    return None if meeting is None else DirectQueue(group, staging, meeting)


class _Abandoned(NamedTuple):
    """Collectives that this rank left unfinished. Peers up to the epoch of `number` may read their buffers."""

    number: int
    peers: list[Peer]
    works: list[Work]


#: Outlives the queues, like the boards.
_abandoned: list[_Abandoned] = []


class DirectQueue:
    """The collectives of one group, in the order of issue, which is the same on all ranks.

    A failed collective cannot be repeated, since its buffer may hold part of a sum. So after a failure, every call
    raises the first failure at once, until `abandon`. If a peer's process has ended, calls raise forever.
    """

    def __init__(self, group: ProcessGroup, staging: StagingPool, meeting: Meeting) -> None:
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.staging = staging
        self.board, self.peers, first_epoch = meeting
        self._ranks = torch_dist.get_process_group_ranks(group)
        self._timeout_s = timeout_of(group).total_seconds()
        self.done = 0  # the last collective for which this rank has read all data
        self._first = self._next = 1  # numbers of the epoch's first and next collective
        self._open: deque[Reading] = deque()
        self._unannounced: deque[Reading] = deque()  # the part of `_open` that waits for a slot on the board
        self._failure: CommError | None = None
        self._is_dead = False  # a peer has ended: `abandon` does not clear the failure
        self._left_epoch = first_epoch  # the epoch of the failure
        self._failures = FailureRecord(group)
        with lock:
            self._begin_epoch(first_epoch)
            queues.add(self)
        parted.count(self)

    # ----- one call per collective -----------------------------------------------------------------------------------

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """See `GroupBackend.all_reduce`. Each rank sums one part, then reads the summed parts of its peers."""
        is_ = what("an all-reduce", full_N.numel(), full_N.dtype, tag)
        size = -(-full_N.numel() // self.world_size)
        places = dict(enumerate(full_N.split(size)))  # a buffer of few elements has fewer parts than ranks
        owners, is_owner = [rank for rank in self.peers if rank in places], self.rank in places
        everyone = list(self.peers) if is_owner else []
        own = [(self.rank * size, places[self.rank])] if is_owner else []
        self._issue(lambda number: Sum(self, number, full_N, is_, everyone, owners, parts=own))
        parts = [(rank, rank * size, places[rank]) for rank in owners]
        return self._issue(
            lambda number: Copy(self, number, full_N, is_, owners, everyone, parts=parts), announce=False
        )

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """See `GroupBackend.reduce_scatter`."""
        is_ = what("a reduce-scatter", full_N.numel(), full_N.dtype, tag)
        everyone, parts = list(self.peers), [(self.rank * shard_S.numel(), shard_S)]
        return self._issue(lambda number: Sum(self, number, full_N, is_, everyone, everyone, parts=parts))

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """See `GroupBackend.all_gather`."""
        is_ = what("an all-gather", full_N.numel(), full_N.dtype, tag)
        everyone, places = list(self.peers), full_N.split(shard_S.numel())
        _copy_own(shard_S, places[self.rank])
        parts = [(rank, 0, places[rank]) for rank in everyone]
        return self._issue(lambda number: Copy(self, number, shard_S, is_, everyone, everyone, parts=parts))

    def broadcast(self, tensor_N: torch.Tensor, source: int, tag: str) -> Work:
        """See `GroupBackend.broadcast`."""
        is_ = what(f"a broadcast from rank {source} of the group", tensor_N.numel(), tensor_N.dtype, tag)
        is_source = self.rank == source
        sources, readers = ([], list(self.peers)) if is_source else ([source], [])
        parts = [(rank, 0, tensor_N) for rank in sources]
        return self._issue(lambda number: Copy(self, number, tensor_N, is_, sources, readers, parts=parts))

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        tag: str,
    ) -> Work:
        """See `GroupBackend.all_to_all`."""
        is_ = what("an all-to-all", self.world_size, output_N.dtype, tag)
        _copy_own(inputs[self.rank], outputs[self.rank])
        everyone = list(self.peers)
        return self._issue(
            lambda number: Swap(self, number, input_N, is_, everyone, everyone, outputs=outputs, inputs=inputs)
        )

    # ----- order -----------------------------------------------------------------------------------------------------

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave the works in flight unfinished. Does not block. See [Note: epochs] and `GroupBackend.abandon`."""
        if not (failed or works):
            return
        if failed:  # first, so peers that see this rank leave find the cause
            self._failures.record(epoch_of(self._next) if self._failure is None else self._left_epoch)
        with lock:
            self._keep(works)
            if self._failure is None:
                self._begin_epoch(epoch_of(self._next) + 1)
            elif not self._is_dead:  # this rank is in the next epoch already
                self._failure = None

    def epoch(self) -> tuple[str, int]:
        """Return a name for the group's epochs, and the current epoch."""
        return self._failures.name, epoch_of(self._next)

    def join_epoch(self, epoch: int) -> None:
        """Leave the works in flight, and begin the later epoch `epoch`. Does not block."""
        with lock:
            if not self._is_dead:
                self._keep([])
                self._begin_epoch(epoch)
                self._failure = None

    def wait_until(self, is_over: Callable[[], bool], number: int, text: str) -> None:
        """Advance the queues of all groups until `is_over()` is True. `number` and `text` are the number and the
        description of the collective that `is_over` checks."""
        wait_until(
            self,
            lambda: self._look(is_over, number),
            self._timeout_s,
            lambda: self._leave(self._late(number)),
            lambda: self._never(number, text),
            parted.Wait(text, self._failures.name, number, self._ranks),
        )

    def poll(self, is_over: Callable[[], bool], number: int) -> bool:
        """Return `is_over()`, which advances the queue and checks the collective `number`. Does not block."""

        def is_over_here() -> bool:
            try:
                return is_over()
            except PeerLeft:  # only a wait raises this, as in `_advance_unless_left`
                return False

        with lock:
            return self._look(is_over_here, number)

    def _issue(self, make: Callable[[int], Reading], *, announce: bool = True) -> Reading:
        """Append a collective. Does not block.

        The collective is announced as soon as its slot on the board is free.
        """
        issued: list[Reading] = []

        def issue() -> bool:
            if _abandoned:
                _drop_unread()
            self._advance_unless_left()
            reading = make(self._next)
            self._next += 1
            self._open.append(reading)
            if announce:
                self._unannounced.append(reading)
            issued.append(reading)
            return self._advance_unless_left()

        with lock:
            self._look(issue, self._next)
        return issued[0]

    def has_free_slot(self, number: int) -> bool:
        """Return whether the board slot for `number` is free: all ranks are done with the collective that used it."""
        before = number - NUM_SLOTS
        return before < self._first or (
            self.done >= before and all(peer.is_done(before) for peer in self.peers.values())
        )

    def _look(self, look: Callable[[], bool], number: int) -> bool:
        """Return `look()`. Called under the lock. An exception of `look` makes the queue fail."""
        if self._failure is not None:
            raise self._failure
        if number < self._first:
            raise CommError("this collective was abandoned after a failure; its buffer holds no result")
        try:
            return look()
        except PeerLeft as error:
            self._follow(error)
            raise
        except PeerGone as error:
            self._die(error)
            raise
        except CommError as error:
            self._leave(error)
            raise
        except BaseException as error:  # for example Ctrl-C during a read
            self._failures.record(epoch_of(self._next))
            cause = first_line(error)
            self._leave(CommError(f"a collective was interrupted: {cause}; leave it (`abandon`) before the next one"))
            raise

    def _advance_unless_left(self) -> bool:
        """Advance, and return True. Only a wait raises `PeerLeft`: this rank may be about to fail by itself, like the
        peer, and then the user expects this rank's own exception."""
        with contextlib.suppress(PeerLeft):
            self.advance()
        return True

    def advance(self) -> None:
        """Run the next collectives in order as long as their peers are ready. Does not block."""
        self._announce()
        while self._open and self._open[0].run():
            self.done = self._open.popleft().number
            self.board.set_done(self.done)

    def _announce(self) -> None:
        """Announce the collectives that have a free slot now, in the order of issue."""
        while self._unannounced and self.has_free_slot(self._unannounced[0].number):
            reading = self._unannounced.popleft()
            if not reading.is_announced:
                reading.announce()

    def go_on(self) -> None:
        """Advance while a thread waits in another queue."""
        if self._open and self._failure is None:
            with contextlib.suppress(CommError):  # `_failure` keeps it for the callers of this queue
                self._look(self._advance_unless_left, self._next)

    def _begin_epoch(self, epoch: int) -> None:
        self._open.clear()
        self._unannounced.clear()
        left, self.done = self.done, epoch << EPOCH_BITS
        self._first = self._next = self.done + 1
        self.board.leave(left, self.done)

    def _follow(self, error: PeerLeft) -> None:
        """Leave the epoch, too, so other peers see it. Calls raise `error` until `abandon` or `join_epoch`."""
        self._failure, self._left_epoch = error, epoch_of(self._next)
        error.name_cause(self._failures.first(self._left_epoch))
        self._keep([])
        if error.done < NOTHING_MORE:
            self._begin_epoch(self._left_epoch + 1)
        else:
            self._die(CommError(str(error)))

    def _keep(self, works: Sequence[Work]) -> None:
        """Keep the buffers that peers may still read, and drop the others."""
        _drop_unread()
        kept = [*works, *self._open]
        if kept:
            _abandoned.append(_Abandoned(self._next, list(self.peers.values()), kept))

    def _leave(self, failure: CommError) -> CommError:
        """Leave the epoch: calls raise `failure` until `abandon`, and peers that need this rank in this epoch raise."""
        self._left_epoch = epoch_of(self._next)
        self._failures.claim(self._left_epoch, failure)
        self._keep([])
        self._begin_epoch(self._left_epoch + 1)
        self._failure = failure
        return failure

    def _die(self, failure: CommError) -> None:
        """Fail forever: every call raises `failure`, and peers that need this rank raise."""
        self._keep([])
        self._failure, self._is_dead = failure, True
        self._open.clear()
        self._unannounced.clear()
        self.board.leave(self.done, NOTHING_MORE)

    def _never(self, number: int, text: str) -> CommError | None:
        """Return the error if peers wait for this rank elsewhere, where they do not advance; else None."""
        try:
            with lock:
                behind = self._behind(number)
        except PeerLeft:  # the next look at the boards raises it
            return None
        return parted.find(self._ranks, text, lambda rank, _: rank in behind)

    def num_started(self) -> dict[str, int]:
        """Return the number of the last issued collective, for `deepspeed.comm.parted`."""
        return {self._failures.name: self._next - 1}

    def _behind(self, number: int) -> list[int]:
        """Return the global ranks of the peers that have not finished a collective."""
        return [peer.rank for peer in self.peers.values() if not peer.is_done(number)]

    def _late(self, number: int) -> CommError:
        behind = self._behind(number)
        return CommError(
            f"rank {torch_dist.get_rank()} waited {self._timeout_s:g} s, the group's timeout, in a collective to whose "
            f"end ranks {behind} have not come. See what they are doing; if they are only slow, give "
            "init_distributed a longer timeout"
        )


def _drop_unread() -> None:
    """Drop the buffers of abandoned collectives that no peer can read any more."""
    _abandoned[:] = [old for old in _abandoned if not all(peer.is_beyond(old.number) for peer in old.peers)]


def _copy_own(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
