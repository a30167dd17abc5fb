"""Boards: how ranks that read each other's memory tell each other where to read, and up to where they have read.

Used by `direct.py`. A board is a little memory that one rank writes and its peers read; `meet` tells them where it is.
A rank writes 64 bits at a time, and on x86-64 others see its writes in their order: `peer_memory.is_supported`.
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

#: collectives of one group that a rank may have announced and a peer not yet done
NUM_SLOTS = 256
#: epochs that a rank has left, of which its board says what was done; a slow peer may look for the end of an older step
NUM_LEFT = 1024
#: numbers of collectives in one epoch: [Note: epochs] in direct.py
EPOCH_BITS = 32

#: Boards outlive their groups: a peer may look at one after the group has gone here, to know that all is done.
_boards: list["Board"] = []
_HEAD_WORDS, _LEFT_WORDS, _SLOT_WORDS = 2, 2, 5
#: of the text that says what a collective is; a longer one is cut
_TEXT_BYTES = 256
#: what a rank that cannot go on says it has done: an epoch that no peer can join
NOTHING_MORE = 2**62
#: what the slot of a nonce announces, of which no collective is made
_VARIABLE = "DS_COMM_DIRECT"
_NONCE = (0, 0)


class What:
    """What a collective does; it must be the same on all ranks.

    A board holds the digest, to compare, and the address of the text, which a peer reads to name the difference.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        self._buffer = ctypes.create_string_buffer(text.encode()[: _TEXT_BYTES - 1], _TEXT_BYTES)
        self.address = ctypes.addressof(self._buffer)


@functools.lru_cache(maxsize=4096)
def what(kind: str, numel: int, dtype: torch.dtype, detail: str = "") -> What:
    """A collective of `kind` on `numel` elements; the same in every step, so it is made once."""
    text = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}"
    return What(f"{text} ({detail})" if detail else text)


def epoch_of(number: int) -> int:
    """The epoch of a collective: [Note: epochs] in direct.py."""
    return number >> EPOCH_BITS


def _left(epoch: int) -> int:
    """The index of the first word on a board that says what was done of an epoch."""
    return _HEAD_WORDS + _LEFT_WORDS * (epoch % NUM_LEFT)


def _slot(number: int) -> int:
    """The index of the first word of a collective's slot on a board."""
    return _HEAD_WORDS + _LEFT_WORDS * NUM_LEFT + _SLOT_WORDS * (number % NUM_SLOTS)


class Board:
    """What a rank tells its peers. Words of 64 bits: done, check; per epoch that it left, what was done of it, check;
    per slot number, address, digest and address of what it is, check.

    A check, made of the words before it by xor, shows a reader that what it saw was written together.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * (_slot(NUM_SLOTS - 1) + _SLOT_WORDS))()
        self.set_done(0)
        _boards.append(self)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def announce(self, number: int, address: int, what: tuple[int, int]) -> None:
        """The buffer of this collective is ready to be read there. `what`: its digest, and the address of its text."""
        slot, (digest, text) = _slot(number), what
        self._words[slot : slot + _SLOT_WORDS] = [number, address, digest, text, number ^ address ^ digest ^ text]

    def set_done(self, number: int) -> None:
        """Nothing of the peers is needed any more for the collectives up to this one."""
        self._words[0:_HEAD_WORDS] = [number, ~number]

    def leave(self, done: int, number: int) -> None:
        """As `set_done(number)` of another epoch, when the last one was `done` of this one."""
        at = _left(epoch_of(done))
        self._words[at : at + _LEFT_WORDS] = [done, ~done]  # first: a peer looks for it when it sees the other epoch
        self.set_done(number)


class PeerGone(CommError):
    """The process of a rank has ended."""


class PeerLeft(PeerFailed):
    """A rank left its collectives unfinished, or cannot go on. `done` is what its board says."""

    def __init__(self, rank: int, done: int) -> None:
        super().__init__(f"rank {rank} left a collective of this group unfinished; its own output says why")
        self.done = done

    def name_cause(self, cause: str) -> None:
        """Say what failed first: the rank may have left because another one did. "" where that is not known."""
        self.cause = cause
        if cause:
            self.args = (f"{self} ({cause})",)


class Peer:
    """Another rank: its memory, and its board there.

    Args:
        rank: in the whole job, for messages.
    """

    def __init__(self, rank: int, process: int, board: int) -> None:
        self.rank = rank
        self._process = process
        self._board = board
        self._words = (ctypes.c_int64 * _SLOT_WORDS)()
        self._done = 0

    def read(self, address: int, into: torch.Tensor) -> None:
        """Fill `into` with what lies at `address` there."""
        self._read(address, into.data_ptr(), into.numel() * into.element_size())

    def announced(self, number: int) -> tuple[int, tuple[int, int]] | None:
        """The address of its buffer for this collective, and the digest and the text's address of what it is.

        None while it has not announced it, or when its slot was used again.
        """
        self._read(self._board + 8 * _slot(number), ctypes.addressof(self._words), 8 * _SLOT_WORDS)
        found, address, digest, text, check = self._words
        is_whole = check == found ^ address ^ digest ^ text
        return (address, (digest, text)) if found == number and is_whole else None

    def announces(self, number: int) -> tuple[int, tuple[int, int]] | None:
        """As `announced`, for a rank that is to read from it.

        Raises:
            PeerLeft: it will not announce it any more. It may have done so, and read what it needs, and left: then a
                collective of its next epoch may have taken the slot.
        """
        found = self.announced(number)
        if found is None and self.is_beyond(number):
            found = self.announced(number)  # before it left
            if found is None:
                raise PeerLeft(self.rank, self._done)
        return found

    def text(self, address: int) -> str:
        """What a collective is, from the address that was announced with it."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._read(address, ctypes.addressof(buffer), _TEXT_BYTES)
        return buffer.value.decode(errors="replace")

    def words(self, address: int, count: int) -> list[int]:
        """That many words of 64 bits from its memory."""
        words = (ctypes.c_int64 * count)()
        self._read(address, ctypes.addressof(words), 8 * count)
        return list(words)

    def is_done(self, number: int) -> bool:
        """Whether it has read what it needs for the collectives up to this one.

        One whose process has ended needs nothing any more. If it crashed, the next read from it says so.

        Raises:
            PeerLeft: it has not, and is in a later epoch.
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
        """Whether it is in a later epoch, or has ended: it reads nothing any more of the epoch of `number`."""
        try:
            self._look_for((epoch_of(number) + 1) << EPOCH_BITS)
        except PeerGone:
            return True
        return epoch_of(self._done) > epoch_of(number)

    def _look_for(self, number: int) -> None:
        """Read up to where it is done, if it was not done with `number` when we last looked."""
        if self._done < number:
            done = self._word_at(0)
            self._done = self._done if done is None else done

    def _word_at(self, index: int) -> int | None:
        """A word of its board that stands there before its check; None while it is being written."""
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
    """What ranks tell each other when they connect."""

    may_read: int
    process: int
    board: int
    nonce: int  # stands on its board, so that nobody takes another process, or another machine's, for it


class Meeting(NamedTuple):
    """What a rank has of a group whose ranks can read each other."""

    board: Board
    peers: dict[int, Peer]  # by rank in the group
    first_epoch: int


def meet(group: ProcessGroup) -> Meeting | None:
    """Exchange boards, if every rank of `group` can read the memory of every other. Called by all ranks together.

    `DS_COMM_DIRECT=0` on any of them says no.

    Raises:
        CommError: the variable is something else than 0 or 1, or `DS_COMM_PAUSE` is no share.
    """
    pauses()
    wanted = _is_wanted() and is_supported()  # first: an error of it comes before peers wait
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
    """Why this rank cannot read that one's memory; None: it can."""
    try:
        found = peer.announced(facts.nonce)
    except CommError as error:  # the kernel forbids it, or the process is another machine's
        return str(error)
    return None if found == (facts.board, _NONCE) else f"rank {peer.rank} is on another machine"
