"""Collectives of ranks that read each other's memory: what each rank reads from which peer, and where it stores it.

`direct.py` creates these collectives, and runs them in the order of issue.

Shape legend: N numel of a flat buffer, W ranks of the group.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_dist
from deepspeed.comm.transports import add_in_rank_order
from deepspeed.errors import CommError, counted

from ds_ext_cpu.comm.boards import PeerGone, PeerLeft, What

if TYPE_CHECKING:
    from ds_ext_cpu.comm.direct import DirectQueue

#: number of elements that are read and added at a time; they fit into a core's cache
READ_NUMEL = 1 << 17


class Reading(ABC):
    """A collective. It is done when this rank has read, and over when the ranks that read from this rank are done, too.

    Args:
        queue: the queue of the group.
        number: its number in the order of issue.
        announced_N: the buffer that peers read.
        what: its description.
        sources: ranks of the group that this rank reads from, in order.
        readers: ranks of the group that read from this rank.
    """

    def __init__(
        self,
        queue: "DirectQueue",
        number: int,
        announced_N: torch.Tensor,
        what: What,
        sources: Sequence[int],
        readers: Sequence[int],
    ) -> None:
        self.number = number
        self.is_announced = False
        self._queue = queue
        self._announced_N = announced_N
        self._what = what
        self._sources = sources
        self._unchecked = set(readers) - set(sources)  # readers that may run another collective
        self._readers = readers
        self._addresses: dict[int, int] = {}

    def announce(self) -> None:
        """Announce the address of the buffer on the board."""
        self._queue.board.announce(self.number, self._address(), (self._what.digest, self._what.address))
        self.is_announced = True

    def _address(self) -> int:
        return self._announced_N.data_ptr()

    def run(self) -> bool:
        """Read the data if all sources have announced their buffers. Returns whether they had."""
        if not self.is_announced:  # all earlier collectives are done: the buffer holds the sum
            if not self._queue.has_free_slot(self.number):
                return False
            self.announce()
        for rank in self._sources:
            if rank not in self._addresses:
                announced = self._queue.peers[rank].announces(self.number)
                if announced is None:
                    return False
                self._addresses[rank], what = announced
                self._check(rank, what)
        self._read_all()
        return True

    def poll(self) -> bool:
        """Advance, and return whether `announced_N` and the results may be used."""
        return self._queue.poll(self._is_over, self.number)

    def wait(self) -> None:
        """Wait until `announced_N` and the results may be used."""
        self._queue.wait_until(self._is_over, self.number, self._what.text)

    def _is_over(self) -> bool:
        self._queue.advance()
        return self._queue.done >= self.number and all(map(self._has_read, self._readers))

    def _has_read(self, rank: int) -> bool:
        peer = self._queue.peers[rank]
        try:
            is_done = peer.is_done(self.number)
        except PeerLeft:  # perhaps because the two ranks run different collectives
            if announced := peer.announced(self.number):
                self._check(rank, announced[1])
            raise
        if is_done and rank in self._unchecked:
            self._unchecked.discard(rank)
            self._check_reader(rank)
        return is_done

    def _check_reader(self, rank: int) -> None:
        """Check that a rank that has read runs the same collective. A rank that has ended since then is not checked."""
        try:
            announced = self._queue.peers[rank].announced(self.number)
        except PeerGone:
            return
        if announced is not None:
            self._check(rank, announced[1])

    @abstractmethod
    def _read_all(self) -> None:
        """Read all data that this rank needs, and store the results."""

    def _read(self, rank: int, start: int, into: torch.Tensor) -> None:
        """Fill `into` with the elements of a rank's buffer from `start` on."""
        self._queue.peers[rank].read(self._addresses[rank] + start * into.element_size(), into)

    def _check(self, rank: int, found: tuple[int, int]) -> None:
        digest, text = found
        if digest == self._what.digest:
            return
        peer = self._queue.peers[rank]
        raise CommError(
            f"rank {torch_dist.get_rank()} makes {self._what.text} where rank {peer.rank} makes {peer.text(text)}; "
            "all ranks of a group issue the same collectives, with the same sizes and tags, in the same order. Have "
            "they the same model, and the same parameters that require a gradient?"
        )


class Sum(Reading):
    """Sums parts of the buffers of all ranks, in the order of ranks.

    Args:
        parts: for each part, its start in the buffers, and the tensor for its sum, in this rank's buffer or in other
            memory.
    """

    def __init__(self, *args: object, parts: Sequence[tuple[int, torch.Tensor]], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._parts = parts

    def _read_all(self) -> None:
        staging = self._queue.staging
        block = min(max((target.numel() for _, target in self._parts), default=0), READ_NUMEL)
        buffer, staged = staging.take(block * len(self._sources), self._announced_N.dtype, self._announced_N.device)
        slots = staged.split(block) if block else ()
        try:
            for start, target in self._parts:
                for offset in range(0, target.numel(), block):
                    self._sum(start + offset, target[offset : offset + block], slots)
        finally:
            staging.give_back(buffer)

    def _sum(self, start: int, target: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        own = self._announced_N[start : start + target.numel()]
        if own.data_ptr() != target.data_ptr():
            target.copy_(own)
        others = [slot[: target.numel()] for slot in slots]
        for rank, other in zip(self._sources, others, strict=True):
            self._read(rank, start, other)
        add_in_rank_order(target, others, self._queue.rank)


class Copy(Reading):
    """Copies parts of the buffers of other ranks.

    Args:
        parts: for each part, the rank, the start in that rank's buffer, and the target tensor.
    """

    def __init__(self, *args: object, parts: Sequence[tuple[int, int, torch.Tensor]], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._parts = parts

    def _read_all(self) -> None:
        for rank, start, target in self._parts:
            self._read(rank, start, target)


class Swap(Reading):
    """Copies, from each rank's input, the part for this rank.

    Each rank announces a table: the address of its input, the offsets of the W parts, and the end of the last part.

    Args:
        outputs: the target tensors for the parts from each rank, by rank.
        inputs: the parts for each rank, by rank.
    """

    def __init__(
        self, *args: object, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._outputs = outputs
        offsets = accumulate((part.numel() for part in inputs), initial=0)
        self._table = (ctypes.c_int64 * (len(outputs) + 2))(self._announced_N.data_ptr(), *offsets)

    def _address(self) -> int:
        return ctypes.addressof(self._table)

    def _read_all(self) -> None:
        me = self._queue.rank
        for rank in self._sources:
            peer, output = self._queue.peers[rank], self._outputs[rank]
            buffer, *offsets = peer.words(self._addresses[rank], len(self._table))
            start, numel = offsets[me], offsets[me + 1] - offsets[me]
            if numel != output.numel():
                raise CommError(
                    f"rank {torch_dist.get_rank()} expects {counted(output.numel(), 'element')} from rank {peer.rank} "
                    f"in {self._what.text}, which sends it {numel}; output_numels and input_numels of two ranks must "
                    "agree"
                )
            peer.read(buffer + start * output.element_size(), output)
