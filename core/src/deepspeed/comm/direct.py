"""The exchanges between ranks of one machine: each reads what it needs from the memory of the others.

One `DirectQueue` per group, from `connect`, asked for by `torch_backend.py`; None where the ranks are not all on one
machine or may not read each other's memory. No byte goes through a socket, and no thread is woken:

    rank 0                                      rank 1, owner of the piece
    announce(n, address of flat_N)
                                                sees it, reads the piece from there, adds it to its own
                                                done = n
    sees it: flat_N may be written again

Announcements and `done` stand on a *board* (`boards.py`), which a rank writes and its peers read. A rank does its
exchanges in the order of issue, and looks at the boards whenever it issues one or waits for one; nothing happens in
between. So a wait ends when the peers have come to that exchange *and* issue or wait for one after it, as ranks of one
program do that wait at the same places.

[Note: threads] A wait advances the queues of all groups, in whatever thread it runs: autograd may run hooks in a thread
of its own. One lock serves all queues. It is held for one look at the boards, never while a thread pauses: a thread
that waits for peers does not keep another one from issuing what those peers wait for. A failure in the queue of another
group is raised to the callers of that group, not to the thread that saw it.

[Note: epochs] A rank that leaves its collectives unfinished (`abandon`) begins an epoch: its numbers continue at the
next multiple of 2**32, and its `done` says so. A peer that needs anything of the old epoch from it raises `PeerLeft` at
once and joins the epoch. When all ranks are in it they can go on: every buffer of the old epoch was dropped.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

import contextlib
import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.boards import EPOCH_BITS, NUM_SLOTS, Meeting, Peer, PeerLeft, What, epoch_of, meet
from deepspeed.comm.failure import FailureRecord
from deepspeed.comm.pieces import even_pieces, view
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.summing import add_in_rank_order
from deepspeed.errors import CommError, first_line

#: elements that are read and added at a time: what a core's cache holds
_READ_NUMEL = 1 << 17
#: what a rank that cannot go on says it has done: an epoch that no peer can join
_NOTHING_MORE = 2**62
#: looks at the boards before a wait gives the processor away; the pauses then grow with the time waited, to a limit
_NUM_LOOKS = 50
_PAUSE_SHARE = 0.02
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3

#: queues in use; a wait in one group goes on with the exchanges of all
_queues: "weakref.WeakSet[DirectQueue]" = weakref.WeakSet()
#: guards all queues, what they know of their peers, and their staging: [Note: threads]
_lock = threading.RLock()


def connect(group: ProcessGroup, staging: StagingPool) -> "DirectQueue | None":
    """The queue of `group`; None where not every rank can read every other's memory. Called by all ranks together."""
    meeting = meet(group)
    return None if meeting is None else DirectQueue(group, staging, meeting)


class _Abandoned(NamedTuple):
    """Collectives that a rank left unfinished; a peer in an epoch before `number` may still read their buffers."""

    number: int
    peers: list[Peer]
    works: list[Work]


#: Outlives the queues, as boards do.
_abandoned: list[_Abandoned] = []


class DirectQueue:
    """The exchanges of one group, in the order of issue, which is the same on all ranks.

    An exchange that failed cannot be made again, since part of a sum may be in its buffer. So from then on every call
    raises the first failure, at once; after `PeerLeft` only until `abandon`.
    """

    def __init__(self, group: ProcessGroup, staging: StagingPool, meeting: Meeting) -> None:
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.staging = staging
        self.board, self.peers, first_epoch = meeting
        self._timeout_s = _timeout_of(group).total_seconds()
        self.done = 0  # the last exchange for which this rank has read
        self._open: deque[_Exchange] = deque()
        self._failure: CommError | None = None
        self._left_epoch = first_epoch  # in which a peer left, where that is the failure
        self._failures = FailureRecord(group)
        with _lock:
            self._begin_epoch(first_epoch)
            _queues.add(self)

    def reduce(self, flat_N: torch.Tensor) -> Work:
        """Sum into every rank: each sums one piece, and reads the others' when they are summed."""
        pieces = [piece for piece in even_pieces(flat_N.numel(), self.world_size) if piece.numel > 0]
        self._issue(_Sum, flat_N, pieces, announce=True)
        return self._issue(_Copy, flat_N, pieces, announce=False)

    def reduce_to_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Sum each piece into its owner."""
        return self._issue(_Sum, flat_N, pieces, announce=True)

    def gather_from_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Copy each piece from its owner."""
        return self._issue(_Copy, flat_N, pieces, announce=True)

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave what is in flight unfinished; waits for nothing. See [Note: epochs] and `Backend.abandon`."""
        if not (failed or works):
            return
        if failed:  # first, so that peers which see this rank leave find the cause
            self._failures.record(self._left_epoch if self._has_joined else epoch_of(self._next))
        with _lock:
            self._keep(works)
            if self._has_joined:
                self._failure = None
            elif self._failure is None:
                self._begin_epoch(epoch_of(self._next) + 1)

    @property
    def _has_joined(self) -> bool:
        """Whether a peer left, and this rank is in its epoch already."""
        return isinstance(self._failure, PeerLeft)

    def wait_until(self, is_over: Callable[[], bool], number: int) -> None:
        """Go on with the exchanges of all groups until `is_over`, which is about the exchange `number`."""
        start_s = time.monotonic()
        for look in itertools.count():
            with _lock:
                if self._look(is_over, number):
                    return
                self._advance_others()
            if look < _NUM_LOOKS:
                continue
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                with _lock:
                    raise self._fail(self._late(number))
            time.sleep(min(max(waited_s * _PAUSE_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S))

    def _issue(
        self, kind: "type[_Exchange]", flat_N: torch.Tensor, pieces: Sequence[Piece], *, announce: bool
    ) -> "_Exchange":
        """Append a collective; waits while the one whose slot on the board it takes is not over everywhere."""
        issued: list[_Exchange] = []

        def has_issued() -> bool:
            if _abandoned:
                _drop_unread()
            self._advance_unless_left()
            if not self._has_free_slot():
                return False
            exchange = kind(self, self._next, flat_N, pieces)
            self._next += 1
            if announce:
                exchange.announce()
            self._open.append(exchange)
            issued.append(exchange)
            return self._advance_unless_left()

        self.wait_until(has_issued, self._next)
        return issued[0]

    def _has_free_slot(self) -> bool:
        number = self._next - NUM_SLOTS
        return number < self._first or (
            self.done >= number and all(peer.is_done(number) for peer in self.peers.values())
        )

    def _look(self, look: Callable[[], bool], number: int) -> bool:
        """What `look` answers, after it advanced. Called under the lock; what fails here fails the queue."""
        if self._failure is not None:
            raise self._failure
        if number < self._first:
            raise CommError("this collective was abandoned after a failure; its buffer holds no result")
        try:
            return look()
        except PeerLeft as error:
            self._join_epoch_of(error)
            raise
        except CommError as error:
            self._fail(error)
            raise
        except BaseException as error:
            self._fail(
                CommError(
                    f"a collective was interrupted: {first_line(error)}; destroy the process group and initialize it "
                    "again"
                )
            )
            raise

    def _advance_unless_left(self) -> bool:
        """Advance; True. A peer that left is for a wait to raise: this rank may be about to fail by itself, like its
        peer, and then its own exception is what the user expects."""
        with contextlib.suppress(PeerLeft):
            self.advance()
        return True

    def advance(self) -> None:
        """Do the collectives whose turn it is and whose peers are ready; waits for none."""
        while self._open and self._open[0].run():
            self.done = self._open.popleft().number
            self.board.set_done(self.done)

    def _advance_others(self) -> None:
        for queue in list(_queues):
            if queue is not self and queue._open and queue._failure is None:
                with contextlib.suppress(CommError):  # that queue keeps it, for its own callers
                    queue._look(queue._advance_unless_left, queue._next)

    def _begin_epoch(self, epoch: int) -> None:
        self._open.clear()
        left, self.done = self.done, epoch << EPOCH_BITS
        self._first = self._next = self.done + 1
        self.board.leave(left, self.done)

    def _join_epoch_of(self, error: PeerLeft) -> None:
        """Let the other peers know, too. Calls raise `error` until this rank has dropped its buffers."""
        self._failure, self._left_epoch = error, epoch_of(self._next)
        self._keep([])
        if error.done < _NOTHING_MORE:
            self._begin_epoch(epoch_of(error.done))
        else:
            self._fail(CommError(str(error)))

    def _keep(self, works: Sequence[Work]) -> None:
        """Keep buffers that peers may be reading, and drop those that they cannot."""
        _drop_unread()
        kept = [*works, *self._open]
        if kept:
            _abandoned.append(_Abandoned(self._next, list(self.peers.values()), kept))

    def _fail(self, failure: CommError) -> CommError:
        """From now on every call raises `failure`, and peers that need this rank raise, too."""
        self._keep([])
        self._failure = failure
        self._open.clear()
        self.board.leave(self.done, _NOTHING_MORE)
        return failure

    def _late(self, number: int) -> CommError:
        behind = [peer.rank for peer in self.peers.values() if not peer.is_done(number)]
        return CommError(
            f"rank {torch_dist.get_rank()} waited {self._timeout_s:g} s, the group's timeout, in an exchange to whose "
            f"end ranks {behind} have not come. See what they are doing; if they are only slow, give "
            "init_distributed a longer timeout"
        )


def _drop_unread() -> None:
    """Drop the buffers of abandoned collectives that no peer reads any more."""
    _abandoned[:] = [old for old in _abandoned if not all(peer.is_beyond(old.number) for peer in old.peers)]


class _Exchange(ABC):
    """One exchange of a buffer: done when this rank has read, over when the readers of `flat_N` are done as well."""

    kind: str
    sources: list[int]  # ranks of the group that it reads from, in order
    readers: list[int]  # ranks of the group that read from it

    def __init__(self, queue: DirectQueue, number: int, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.number = number
        self._queue = queue
        self._flat_N = flat_N
        self._pieces = pieces
        self._what = What.of(self.kind, flat_N, pieces).encode()
        self._addresses: dict[int, int] = {}
        self._is_announced = False

    def announce(self) -> None:
        """Tell the readers where the buffer is."""
        self._queue.board.announce(self.number, self._flat_N.data_ptr(), self._what)
        self._is_announced = True

    def run(self) -> bool:
        """Read what is to be read, once all sources have announced theirs; whether that was so."""
        if not self._is_announced:  # its turn has come: the sum before it is in the buffer
            self.announce()
        for rank in self.sources:
            if rank not in self._addresses:
                announced = self._queue.peers[rank].announced(self.number)
                if announced is None:
                    self._has_read(rank)  # raises if the peer has left
                    return False
                self._addresses[rank], what = announced
                if what != self._what:
                    raise self._mismatch(rank, what)
        self._read_all()
        return True

    def wait(self) -> None:
        """Return when `flat_N` may be used and written."""
        self._queue.wait_until(self._is_over, self.number)

    def _is_over(self) -> bool:
        self._queue.advance()
        return self._queue.done >= self.number and all(map(self._has_read, self.readers))

    def _has_read(self, rank: int) -> bool:
        peer = self._queue.peers[rank]
        try:
            return peer.is_done(self.number)
        except PeerLeft:  # because we two do not do the same?
            announced = peer.announced(self.number)
            if announced is not None and announced[1] != self._what:
                raise self._mismatch(rank, announced[1]) from None
            raise

    @abstractmethod
    def _read_all(self) -> None:
        """Read what this rank needs, and put it into the buffer."""

    def _read(self, rank: int, start: int, into: torch.Tensor) -> None:
        """The elements of that rank's buffer from `start` on."""
        self._queue.peers[rank].read(self._addresses[rank] + start * into.element_size(), into)

    def _mismatch(self, rank: int, found: tuple[int, int]) -> CommError:
        ours, theirs = What.decode(self._what), What.decode(found)
        return CommError(
            f"rank {torch_dist.get_rank()} makes {ours} where rank {self._queue.peers[rank].rank} makes {theirs}; all "
            "ranks of a group issue the same collectives, with the same pieces, in the same order. Have they the same "
            "model, and the same parameters that require a gradient?"
        )


class _Sum(_Exchange):
    """Each owner reads its pieces from everyone and adds them up in the order of ranks."""

    kind = "sum"

    def __init__(self, queue: DirectQueue, number: int, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(queue, number, flat_N, pieces)
        owners = {piece.owner for piece in pieces}
        self.sources = list(queue.peers) if queue.rank in owners else []
        self.readers = [rank for rank in queue.peers if rank in owners]

    def _read_all(self) -> None:
        queue = self._queue
        own = [piece for piece in self._pieces if piece.owner == queue.rank]
        block = min(max((piece.numel for piece in own), default=0), _READ_NUMEL)
        buffer, staged = queue.staging.take(block * len(self.sources), self._flat_N.dtype, self._flat_N.device)
        slots = staged.split(block) if block else ()
        try:
            for piece in own:
                for start in range(piece.start, piece.stop, block):
                    part = Piece(start, min(start + block, piece.stop), piece.owner)
                    others = [slot[: part.numel] for slot in slots]
                    for rank, other in zip(self.sources, others, strict=True):
                        self._read(rank, start, other)
                    add_in_rank_order(view(self._flat_N, part), others, queue.rank)
        finally:
            queue.staging.give_back(buffer)


class _Copy(_Exchange):
    """Everyone reads each piece from its owner."""

    kind = "copy"

    def __init__(self, queue: DirectQueue, number: int, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(queue, number, flat_N, pieces)
        owners = {piece.owner for piece in pieces}
        self.sources = [rank for rank in queue.peers if rank in owners]
        self.readers = list(queue.peers) if queue.rank in owners else []

    def _read_all(self) -> None:
        for piece in self._pieces:
            if piece.owner != self._queue.rank:
                self._read(piece.owner, piece.start, view(self._flat_N, piece))


def _timeout_of(group: ProcessGroup) -> timedelta:
    """After what time a collective of `group` gives up; torch's default where this torch does not tell."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", torch_dist.distributed_c10d.default_pg_timeout)
    return timeout
