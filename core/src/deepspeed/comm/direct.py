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

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.boards import NUM_SLOTS, Meeting, What, meet
from deepspeed.comm.pieces import even_pieces, view
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.summing import add_in_rank_order
from deepspeed.errors import CommError, first_line

#: elements that are read and added at a time: what a core's cache holds
_READ_NUMEL = 1 << 17
#: what a rank that cannot go on says it has done: it reads from nobody any more
_NOTHING_MORE = 2**62
#: looks at the boards before a wait gives the processor away; the pauses then grow with the time waited, to a limit
_NUM_LOOKS = 50
_PAUSE_SHARE = 0.02
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3

#: queues in use; a wait in one group goes on with the exchanges of all
_queues: "weakref.WeakSet[DirectQueue]" = weakref.WeakSet()


def connect(group: ProcessGroup, staging: StagingPool) -> "DirectQueue | None":
    """The queue of `group`; None where not every rank can read every other's memory. Called by all ranks together."""
    meeting = meet(group)
    return None if meeting is None else DirectQueue(group, staging, meeting)


class DirectQueue:
    """The exchanges of one group, in the order of issue, which is the same on all ranks.

    An exchange that failed cannot be made again, since part of a sum may be in its buffer. So from then on every call
    raises the first failure, at once.
    """

    def __init__(self, group: ProcessGroup, staging: StagingPool, meeting: Meeting) -> None:
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.staging = staging
        self.board, self.peers, self._first = meeting
        self._timeout_s = _timeout_of(group).total_seconds()
        self._next = self._first
        self.done = self._first - 1  # the last exchange for which this rank has read
        self._open: deque[_Exchange] = deque()
        self._failure: CommError | None = None
        _queues.add(self)

    def reduce(self, flat_N: torch.Tensor) -> Work:
        """Sum into every rank: each sums one piece, and reads the others' when they are summed."""
        pieces = [piece for piece in even_pieces(flat_N.numel(), self.world_size) if piece.numel > 0]
        self._issue(_Sum(self, flat_N, pieces), announce=True)
        return self._issue(_Copy(self, flat_N, pieces), announce=False)

    def reduce_to_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Sum each piece into its owner."""
        return self._issue(_Sum(self, flat_N, pieces), announce=True)

    def gather_from_owners(self, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> Work:
        """Copy each piece from its owner."""
        return self._issue(_Copy(self, flat_N, pieces), announce=True)

    def finish(self) -> None:
        """Return when every exchange that was issued is over, here and for the peers; at once after a failure."""
        if self._failure is None:
            self._wait_for_all(self._next - 1)

    def next_number(self) -> int:
        """One per exchange; waits while the one whose slot on the board it takes is not over everywhere."""
        number = self._next
        self._next += 1
        self._wait_for_all(number - NUM_SLOTS)
        return number

    def wait_until(self, is_over: Callable[[], bool], number: int) -> None:
        """Go on with the exchanges of all groups until `is_over`, which is about the exchange `number`."""
        start_s = time.monotonic()
        for look in itertools.count():
            self._advance()
            if is_over():
                return
            for queue in list(_queues):
                if queue is not self and queue._failure is None:
                    queue._advance()
            if look < _NUM_LOOKS:
                continue
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise self._fail(self._late(number))
            time.sleep(min(max(waited_s * _PAUSE_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S))

    def _wait_for_all(self, number: int) -> None:
        if number >= self._first:
            self.wait_until(
                lambda: self.done >= number and all(peer.is_done(number) for peer in self.peers.values()), number
            )

    def _issue(self, exchange: "_Exchange", *, announce: bool) -> "_Exchange":
        if announce:
            exchange.announce()
        self._open.append(exchange)
        self._advance()
        return exchange

    def _advance(self) -> None:
        """Do the exchanges whose turn it is and whose peers are ready; waits for none."""
        if self._failure is not None:
            raise self._failure
        try:
            while self._open and self._open[0].run():
                self.done = self._open.popleft().number
                self.board.set_done(self.done)
        except CommError as error:
            self._fail(error)
            raise
        except BaseException as error:
            self._fail(
                CommError(f"an exchange was broken off: {first_line(error)}; end the process group and join anew")
            )
            raise

    def _fail(self, failure: CommError) -> CommError:
        """From now on every call raises `failure`; the peers need not wait for this rank to read."""
        self._failure = failure
        self._open.clear()
        self.board.set_done(_NOTHING_MORE)
        return failure

    def _late(self, number: int) -> CommError:
        behind = [peer.rank for peer in self.peers.values() if not peer.is_done(number)]
        return CommError(
            f"rank {torch_dist.get_rank()} waited {self._timeout_s:g} s, the group's timeout, in an exchange to whose "
            f"end ranks {behind} have not come. See what they are doing; if they are only slow, give "
            "init_distributed a longer timeout"
        )


class _Exchange(ABC):
    """One exchange of a buffer: done when this rank has read, over when the readers of `flat_N` are done as well."""

    kind: str
    sources: list[int]  # ranks of the group that it reads from, in order
    readers: list[int]  # ranks of the group that read from it

    def __init__(self, queue: DirectQueue, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.number = queue.next_number()
        self._queue = queue
        self._flat_N = flat_N
        self._pieces = pieces
        self._what = What(self.kind, flat_N.numel(), flat_N.dtype).encode()
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
        queue = self._queue
        return queue.done >= self.number and all(queue.peers[rank].is_done(self.number) for rank in self.readers)

    @abstractmethod
    def _read_all(self) -> None:
        """Read what this rank needs, and put it into the buffer."""

    def _read(self, rank: int, start: int, into: torch.Tensor) -> None:
        """The elements of that rank's buffer from `start` on."""
        self._queue.peers[rank].read(self._addresses[rank] + start * into.element_size(), into)

    def _mismatch(self, rank: int, found: int) -> CommError:
        ours, theirs = What.decode(self._what), What.decode(found)
        return CommError(
            f"rank {torch_dist.get_rank()} makes {ours} where rank {self._queue.peers[rank].rank} makes {theirs}; all "
            "ranks of a group make the same exchanges in the same order. Have they the same model, and the same "
            "parameters that require a gradient?"
        )


class _Sum(_Exchange):
    """Each owner reads its pieces from everyone and adds them up in the order of ranks."""

    kind = "sum"

    def __init__(self, queue: DirectQueue, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(queue, flat_N, pieces)
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

    def __init__(self, queue: DirectQueue, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(queue, flat_N, pieces)
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
