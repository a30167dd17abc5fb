"""The exchanges between ranks of one machine: each reads what it needs from the memory of the others.

One `DirectQueue` per group, from `connect`, asked for by `torch_backend.py`; None where the ranks are not all on one
machine or may not read each other's memory. No byte goes through a socket, and no thread is woken:

    rank 0                                      rank 1, owner of the piece
    announce(n, address of flat_N)
                                                 sees it, reads the piece from there, adds it to its own
                                                 done = n
    sees it: flat_N may be written again

Announcements and `done` stand on a *board*, a little memory that a rank writes and its peers read. A rank looks at the
boards whenever it issues or waits for an exchange, and does its exchanges in the order of issue; so a reader is at most
one exchange behind the one that it has issued last, and a wait ends as soon as the peers have come to that exchange.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

import ctypes
import itertools
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Piece, Work
from deepspeed.comm.peer_memory import is_supported, read_memory
from deepspeed.comm.pieces import even_pieces, view
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.summing import add_in_rank_order
from deepspeed.errors import CommError
from deepspeed.log import logger

#: exchanges of one group that a rank may have announced and a peer not yet done
_NUM_SLOTS = 256
#: elements that are read and added at a time: what a core's cache holds
_BLOCK_NUMEL = 1 << 17
#: looks at the boards before a wait gives the processor away; the pauses then grow with the time waited, to a limit
_NUM_LOOKS = 50
_PAUSE_SHARE = 0.02
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3

#: [Note: boards stay] A peer may look at a board after its group has gone here: it wants to know that all is done.
_boards: list["_Board"] = []


class _Board:
    """What a rank tells its peers. Words of 64 bits: done, ~done, and per slot number, address, number ^ address.

    The third word shows to a reader that it saw the first two as they were written together.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * (2 + 3 * _NUM_SLOTS))()
        self.set_done(0)
        _boards.append(self)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def announce(self, number: int, address: int) -> None:
        """The buffer of this exchange is ready to be read there."""
        slot = 2 + 3 * (number % _NUM_SLOTS)
        self._words[slot : slot + 3] = [number, address, number ^ address]

    def set_done(self, number: int) -> None:
        """Nothing of the peers is needed any more for the exchanges up to this one."""
        self._words[0:2] = [number, ~number]


class _Peer:
    """Another rank: its memory, and its board there."""

    def __init__(self, rank: int, process: int, board: int) -> None:
        self.rank = rank
        self._process = process
        self._board = board
        self._words = (ctypes.c_int64 * 3)()
        self._done = 0

    def read(self, address: int, into: torch.Tensor) -> None:
        """Fill `into` with what lies at `address` there."""
        self._read(address, into.data_ptr(), into.numel() * into.element_size())

    def address_of(self, number: int) -> int | None:
        """Where its buffer of this exchange is; None while it has not announced it."""
        self._read(self._board + 8 * (2 + 3 * (number % _NUM_SLOTS)), ctypes.addressof(self._words), 24)
        found, address, check = self._words
        return address if found == number and check == found ^ address else None

    def is_done(self, number: int) -> bool:
        """Whether it has read what it needs for the exchanges up to this one. One that has ended needs nothing."""
        if self._done < number:
            try:
                read_memory(self._process, self._board, ctypes.addressof(self._words), 16)
            except ProcessLookupError:
                return True
            done, check, _ = self._words
            if check == ~done:
                self._done = done
        return self._done >= number

    def _read(self, source: int, target: int, num_bytes: int) -> None:
        try:
            read_memory(self._process, source, target, num_bytes)
        except ProcessLookupError:
            raise CommError(
                f"rank {self.rank} (process {self._process}) ended before an exchange with it was over; its own output "
                "says why"
            ) from None
        except OSError as error:
            raise CommError(
                f"{num_bytes} bytes at {source:#x} in the memory of rank {self.rank} (process {self._process}) cannot "
                f"be read: {error.strerror}. If its buffer was still there, set DS_COMM_DIRECT=0, with which exchanges "
                "go through messages"
            ) from error


class _Facts(NamedTuple):
    """What ranks tell each other when they connect."""

    may_read: int
    process: int
    board: int
    nonce: int  # stands on its board, so that nobody takes another process, or another machine's, for it


def connect(group: ProcessGroup, staging: StagingPool) -> "DirectQueue | None":
    """The queue of `group`, if every rank of it can read the memory of every other. Called by all ranks together.

    `DS_COMM_DIRECT=0` on any of them says no.
    """
    rank, world_size = torch_dist.get_rank(group), torch_dist.get_world_size(group)
    board, nonce = _Board(), secrets.randbits(60)
    board.announce(nonce, board.address)
    wanted = os.environ.get("DS_COMM_DIRECT", "1") != "0" and is_supported()
    mine = torch.tensor(_Facts(wanted, os.getpid(), board.address, nonce))
    told = [torch.empty_like(mine) for _ in range(world_size)]
    torch_dist.all_gather(told, mine, group=group)
    facts = [_Facts(*row.tolist()) for row in told]
    peers = {r: _Peer(r, facts[r].process, facts[r].board) for r in range(world_size) if r != rank}
    can_read = all(fact.may_read for fact in facts) and all(_sees(peer, facts[r]) for r, peer in peers.items())
    agreed = torch.tensor(int(can_read))
    torch_dist.all_reduce(agreed, op=torch_dist.ReduceOp.MIN, group=group)
    if not agreed:
        logger.debug("ranks of the group cannot all read each other's memory; exchanges go through messages")
        return None
    return DirectQueue(group, staging, board, peers, first=facts[0].nonce + 1)


def _sees(peer: _Peer, facts: _Facts) -> bool:
    try:
        return peer.address_of(facts.nonce) == facts.board
    except CommError:  # it is on another machine, or the kernel forbids it
        return False


class DirectQueue:
    """The exchanges of one group, in the order of issue, which is the same on all ranks."""

    def __init__(
        self, group: ProcessGroup, staging: StagingPool, board: _Board, peers: dict[int, _Peer], *, first: int
    ) -> None:
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.staging = staging
        self.board = board
        self.peers = peers
        self._timeout_s = _timeout_of(group).total_seconds()
        self._next = self._first = first
        self._open: deque[_Exchange] = deque()

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

    def next_number(self) -> int:
        """One per exchange; waits while a peer has not done with the one whose slot it takes."""
        number = self._next
        self._next += 1
        before = number - _NUM_SLOTS
        if before >= self._first:
            self.wait_until(lambda: all(peer.is_done(before) for peer in self.peers.values()), before)
        return number

    def _issue(self, exchange: "_Exchange", *, announce: bool) -> "_Exchange":
        if announce:
            exchange.announce()
        self._open.append(exchange)
        self.advance()
        return exchange

    def advance(self) -> None:
        """Do the exchanges whose turn it is and whose peers are ready; waits for none."""
        while self._open and self._open[0].run():
            self.board.set_done(self._open.popleft().number)

    def wait_until(self, is_over: Callable[[], bool], number: int) -> None:
        """Advance until `is_over`, which is about the exchange `number`."""
        start_s = time.monotonic()
        for look in itertools.count():
            self.advance()
            if is_over():
                return
            if look < _NUM_LOOKS:
                continue
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise self._late(number)
            time.sleep(min(max(waited_s * _PAUSE_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S))

    def finish(self) -> None:
        """Do every exchange that was issued."""
        while self._open:
            self._open[-1].wait()

    def _late(self, number: int) -> CommError:
        behind = [rank for rank, peer in self.peers.items() if not peer.is_done(number)]
        return CommError(
            f"rank {self.rank} of {self.world_size} waited {self._timeout_s:g} s, the group's timeout, in exchange "
            f"{number - self._first + 1} of this group; ranks {behind} have not come to its end. See what they are "
            "doing; if it is only slow, give a longer timeout to init_distributed"
        )


class _Exchange(ABC):
    """One exchange of a buffer: open until it was run, over when the readers of `flat_N` have done as well."""

    sources: list[int]  # ranks that it reads from, in order
    readers: list[int]  # ranks that read from it

    def __init__(self, queue: DirectQueue, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.number = queue.next_number()
        self._queue = queue
        self._flat_N = flat_N
        self._pieces = pieces
        self._addresses: dict[int, int] = {}
        self._is_announced = self._is_run = False

    def announce(self) -> None:
        """Tell the readers where the buffer is."""
        self._queue.board.announce(self.number, self._flat_N.data_ptr())
        self._is_announced = True

    def run(self) -> bool:
        """Read what is to be read, once all sources have announced theirs; whether that was so."""
        if not self._is_announced:  # its turn has come: the sum before it is in the buffer
            self.announce()
        for rank in self.sources:
            if rank not in self._addresses:
                address = self._queue.peers[rank].address_of(self.number)
                if address is None:
                    return False
                self._addresses[rank] = address
        self._read_all()
        self._is_run = True
        return True

    def wait(self) -> None:
        """Return when `flat_N` may be used and written."""
        self._queue.wait_until(self._is_over, self.number)

    def _is_over(self) -> bool:
        return self._is_run and all(self._queue.peers[rank].is_done(self.number) for rank in self.readers)

    @abstractmethod
    def _read_all(self) -> None:
        """Read what this rank needs, and put it into the buffer."""

    def _read(self, rank: int, start: int, into: torch.Tensor) -> None:
        """The elements of that rank's buffer from `start` on."""
        self._queue.peers[rank].read(self._addresses[rank] + start * into.element_size(), into)


class _Sum(_Exchange):
    """Each owner reads its pieces from everyone and adds them up in the order of ranks."""

    def __init__(self, queue: DirectQueue, flat_N: torch.Tensor, pieces: Sequence[Piece]) -> None:
        super().__init__(queue, flat_N, pieces)
        owners = {piece.owner for piece in pieces}
        self.sources = list(queue.peers) if queue.rank in owners else []
        self.readers = [rank for rank in queue.peers if rank in owners]

    def _read_all(self) -> None:
        queue = self._queue
        own = [piece for piece in self._pieces if piece.owner == queue.rank]
        block = min(max((piece.numel for piece in own), default=0), _BLOCK_NUMEL)
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
