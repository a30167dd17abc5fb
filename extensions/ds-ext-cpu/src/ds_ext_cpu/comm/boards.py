"""Boards, on which ranks that read each other's memory announce their buffers and the collectives that they have done.

Used by `direct.py`. A board is a small memory block that one rank writes and its peers read; `meet` exchanges the
addresses. A rank writes 64 bits at a time. On x86-64, peers see the writes in order: see `peer_memory.is_supported`.
"""

import ctypes
import functools
import hashlib
import os
import platform
import secrets
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from deepspeed.comm.failure import PeerFailed
from deepspeed.errors import CommError, stated
from deepspeed.log import logger
from torch.distributed import ProcessGroup

from ds_ext_cpu.comm.peer_memory import is_supported, read_memory
from ds_ext_cpu.comm.waiting import pauses

#: maximum number of collectives of one group that a rank has announced and a peer has not done yet
NUM_SLOTS = 256
#: number of past epochs with an entry on the board; a slow peer may still look for the end of an older step
NUM_LEFT = 1024
#: bits of a collective's number that count within an epoch: [Note: epochs] in direct.py
EPOCH_BITS = 32

#: Boards outlive their groups: a peer may read a board after this rank's group is gone, to see what was done.
_boards: list["Board"] = []
_HEAD_WORDS, _LEFT_WORDS, _SLOT_WORDS = 2, 2, 5
#: size of the text that describes a collective; longer texts are cut
_TEXT_BYTES = 256
#: `done` of a rank that cannot continue: a number in an epoch that no peer can join
NOTHING_MORE = 2**62
_VARIABLE = "DS_COMM_DIRECT"
#: content of the slot that announces a nonce instead of a collective
_NONCE = (0, 0)


class What:
    """The description of a collective, which must be equal on all ranks.

    A board holds the digest, which peers compare, and the address of the text, which peers read to report a difference.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        self._buffer = ctypes.create_string_buffer(text.encode()[: _TEXT_BYTES - 1], _TEXT_BYTES)
        self.address = ctypes.addressof(self._buffer)


@functools.lru_cache(maxsize=4096)
def what(kind: str, numel: int, dtype: torch.dtype, detail: str = "") -> What:
    """Describe a collective of `kind` on `numel` elements. Cached, because every step has the same collectives."""
    text = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}"
    return What(f"{text} ({detail})" if detail else text)


def epoch_of(number: int) -> int:
    """Return the epoch of a collective: [Note: epochs] in direct.py."""
    return number >> EPOCH_BITS


def _left(epoch: int) -> int:
    """Return the index of the first board word of the entry of a past epoch."""
    return _HEAD_WORDS + _LEFT_WORDS * (epoch % NUM_LEFT)


def _slot(number: int) -> int:
    """Return the index of the first board word of a collective's slot."""
    return _HEAD_WORDS + _LEFT_WORDS * NUM_LEFT + _SLOT_WORDS * (number % NUM_SLOTS)


class Board:
    """The board of this rank. Its 64-bit words: done, check; per past epoch: done, check; per slot: number, address of
    the buffer, digest and address of the `What`, check.

    A check is computed from the words before it. It shows a reader that these words belong together.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * (_slot(NUM_SLOTS - 1) + _SLOT_WORDS))()
        self.set_done(0)
        _boards.append(self)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def announce(self, number: int, address: int, what: tuple[int, int]) -> None:
        """Announce the buffer of a collective, which peers can read now. `what`: digest and address of its text."""
        slot, (digest, text) = _slot(number), what
        self._words[slot : slot + _SLOT_WORDS] = [number, address, digest, text, number ^ address ^ digest ^ text]

    def set_done(self, number: int) -> None:
        """Record that this rank has read all that it needs for the collectives up to `number`."""
        self._words[0:_HEAD_WORDS] = [number, ~number]

    def leave(self, done: int, number: int) -> None:
        """Leave the epoch of `done`, the last collective done in it, and set `done` to `number`, in another epoch."""
        at = _left(epoch_of(done))
        self._words[at : at + _LEFT_WORDS] = [done, ~done]  # before `set_done`: peers that see the new epoch read it
        self.set_done(number)


class PeerGone(CommError):
    """The process of a rank has ended."""


class PeerLeft(PeerFailed):
    """A rank left its collectives unfinished, or cannot continue. `done` is the value on the rank's board."""

    def __init__(self, rank: int, done: int) -> None:
        super().__init__(f"rank {rank} left a collective of this group unfinished; its own output says why")
        self.done = done

    def name_cause(self, cause: str) -> None:
        """Add the first failure to the message: the rank may have left because another rank failed. "" if unknown."""
        self.cause = cause
        if cause:
            self.args = (f"{self} ({cause})",)


class Peer:
    """The memory and the board of another rank.

    Args:
        rank: global rank, for messages.
    """

    def __init__(self, rank: int, process: int, board: int) -> None:
        self.rank = rank
        self._process = process
        self._board = board
        self._words = (ctypes.c_int64 * _SLOT_WORDS)()
        self._done = 0

    def read(self, address: int, into: torch.Tensor) -> None:
        """Fill `into` from the peer's memory at `address`."""
        self._read(address, into.data_ptr(), into.numel() * into.element_size())

    def announced(self, number: int) -> tuple[int, tuple[int, int]] | None:
        """Return the address of the peer's buffer for a collective, and the digest and text address of its `What`.

        None if the peer has not announced the collective yet, or has reused its slot.
        """
        self._read(self._board + 8 * _slot(number), ctypes.addressof(self._words), 8 * _SLOT_WORDS)
        found, address, digest, text, check = self._words
        is_whole = check == found ^ address ^ digest ^ text
        return (address, (digest, text)) if found == number and is_whole else None

    def announces(self, number: int) -> tuple[int, tuple[int, int]] | None:
        """Return the same as `announced`; for a rank that will read from the peer.

        Raises:
            PeerLeft: the peer will not announce the collective any more. The peer may also have announced it, finished
                and left; then a collective of its next epoch may have reused the slot.
        """
        found = self.announced(number)
        if found is None and self.is_beyond(number):
            found = self.announced(number)  # the peer may have announced it before it left
            if found is None:
                raise PeerLeft(self.rank, self._done)
        return found

    def text(self, address: int) -> str:
        """Return the description of a collective, from the announced text address."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._read(address, ctypes.addressof(buffer), _TEXT_BYTES)
        return buffer.value.decode(errors="replace")

    def words(self, address: int, count: int) -> list[int]:
        """Return `count` 64-bit words of the peer's memory at `address`."""
        words = (ctypes.c_int64 * count)()
        self._read(address, ctypes.addressof(words), 8 * count)
        return list(words)

    def is_done(self, number: int) -> bool:
        """Return whether the peer has read all that it needs for the collectives up to `number`.

        True if the peer's process has ended. If the process crashed, the next read from the peer raises.

        Raises:
            PeerLeft: the peer has not read it, and is in a later epoch.
        """
        epoch = epoch_of(number)
        try:
            self._look_for(number)
            if epoch_of(self._done) <= epoch:
                return self._done >= number
            left = self._word_at(_left(epoch))
        except PeerGone:
            return True
        if left is not None and epoch_of(left) == epoch and left >= number:
            return True
        raise PeerLeft(self.rank, self._done)

    def is_beyond(self, number: int) -> bool:
        """Return whether the peer has ended or left the epoch of `number`, so it reads no more buffers of it."""
        try:
            self._look_for((epoch_of(number) + 1) << EPOCH_BITS)
        except PeerGone:
            return True
        return epoch_of(self._done) > epoch_of(number)

    def _look_for(self, number: int) -> None:
        """Update `_done` from the peer's board, unless `_done` has reached `number` already."""
        if self._done < number:
            done = self._word_at(0)
            self._done = self._done if done is None else done

    def _word_at(self, index: int) -> int | None:
        """Return a word of the peer's board that is followed by its check; None while the peer is writing it."""
        self._read(self._board + 8 * index, ctypes.addressof(self._words), 16)
        word, check, *_ = self._words
        return word if check == ~word else None

    def _read(self, source: int, target: int, num_bytes: int) -> None:
        try:
            read_memory(self._process, source, target, num_bytes)
        except ProcessLookupError:
            raise PeerGone(
                f"rank {self.rank} (process {self._process}) ended before a collective or message with it was "
                "over; its own output says why, or it had fewer batches than this rank"
            ) from None
        except OSError as error:
            raise CommError(
                f"{num_bytes} bytes at {source:#x} in the memory of rank {self.rank} (process {self._process}) cannot "
                f"be read: {error.strerror}. If its buffer was still there, set DS_COMM_DIRECT=0, with which the "
                "collectives go through messages"
            ) from error


class _Facts(NamedTuple):
    """The values that ranks exchange when they connect."""

    may_read: int
    process: int
    board: int
    nonce: int  # also on the board: detects another process, or a process of another machine


class Meeting(NamedTuple):
    """The result of `meet`, for a group of ranks that can read each other's memory."""

    board: Board
    peers: dict[int, Peer]  # by rank in the group
    first_epoch: int


def meet(group: ProcessGroup) -> Meeting | None:
    """Exchange boards if every rank of `group` can read the memory of every other; else return None. Called by all
    ranks together. `DS_COMM_DIRECT=0` on any rank makes the result None.

    Raises:
        CommError: `DS_COMM_DIRECT` is neither 0 nor 1, or `DS_COMM_PAUSE` is not a number from 0 to 1.
    """
    pauses()
    wanted = _is_wanted() and is_supported()  # first: it may raise, and must do so before peers wait
    rank, world_size = torch_dist.get_rank(group), torch_dist.get_world_size(group)
    board, nonce = Board(), secrets.randbits(60)
    board.announce(nonce, board.address, _NONCE)
    mine = torch.tensor(_Facts(wanted, os.getpid(), board.address, nonce), device="cpu")
    told = [torch.empty_like(mine) for _ in range(world_size)]
    torch_dist.all_gather(told, mine, group=group)
    facts = [_Facts(*row.tolist()) for row in told]
    peers = {
        other: Peer(torch_dist.get_global_rank(group, other), facts[other].process, facts[other].board)
        for other in range(world_size)
        if other != rank
    }
    refusals = [f"rank {peer.rank} does not ask for it or cannot" for r, peer in peers.items() if not facts[r].may_read]
    refusals += [] if wanted else [f"{stated(_VARIABLE)} on {platform.machine()}"]
    refusals += filter(None, (_blindness(peer, facts[r]) for r, peer in peers.items() if not refusals))
    agreed = torch.tensor(int(not refusals), device="cpu")
    torch_dist.all_reduce(agreed, op=torch_dist.ReduceOp.MIN, group=group)
    if not agreed:
        reason = refusals[0] if refusals else "another rank cannot"
        logger.debug("ranks do not read each other's memory, but send: %s", reason)
        return None
    return Meeting(board, peers, first_epoch=epoch_of(facts[0].nonce) + 1)


def _is_wanted() -> bool:
    value = os.environ.get(_VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise CommError(
            f"{stated(_VARIABLE)}: 0 (ranks send messages) or 1 (they read each other's memory) is expected"
        )
    return value != "0"


def _blindness(peer: Peer, facts: _Facts) -> str | None:
    """Return why this rank cannot read the peer's memory; None if it can."""
    try:
        found = peer.announced(facts.nonce)
    except CommError as error:  # the kernel forbids it, or the process is on another machine
        return str(error)
    return None if found == (facts.board, _NONCE) else f"rank {peer.rank} is on another machine"
