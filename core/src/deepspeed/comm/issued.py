"""Ranks compare the collectives that they issued in a group whose library matches collectives only by their order.

gloo pairs the n-th collective of a rank with the n-th of its peers, whatever they are for. If ranks take different
paths through a model, they get wrong numbers where the sizes agree, and wait for each other where they do not. So

- every all-reduce of a few fp64 numbers also carries a checksum of the collectives issued before it; each step and each
  evaluation at stage 3 has such an all-reduce. If the checksums differ, all ranks raise before weights are updated;
- when a collective fails, the ranks that were in one put their issued collectives into the job's store, and the error
  names the first two that differ;
- a rank that waits long also stores its issued collectives there, so two ranks that wait for each other in different
  collectives both find the difference, and do not wait until the group's timeout.

Used by `torch_group.py` and `watch.py`.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist

from deepspeed.comm import parted
from deepspeed.comm.failure import FailureRecord
from deepspeed.config.precision import dtype_name
from deepspeed.errors import CommError, counted

#: an all-reduce of at most this many fp64 numbers carries the checksum
CARRIER_NUMEL = 1 << 16
_NUM_KEPT = 1 << 11
# W ranks: the sum of W squares is exact in fp64 up to 2**13 ranks.
_CHECKSUM_BITS = 20
# How long a rank waits for its peers' lists: the peers fail, too, as soon as this rank's connections close.
GRACE_S = 10.0


class Collective(NamedTuple):
    """`Collective` identifies one collective; it is equal on all ranks that issue the same collective."""

    kind: str
    numel: int
    dtype: torch.dtype
    tag: str

    def __str__(self) -> str:
        text = f"{self.kind} of {self.numel} {dtype_name(self.dtype)}" if self.numel else self.kind
        return f"{text} ({self.tag})" if self.tag else text


class Issued:
    """The collectives of this rank in one group over gloo, in the order of issue.

    Args:
        rank: the rank of this process within the group.
        world_size: the number of ranks of the group.
        failures: the group's record in the store.
        epoch: the group's epoch; each epoch counts its collectives separately.
    """

    def __init__(self, rank: int, world_size: int, failures: FailureRecord, epoch: int = 0) -> None:
        self._rank = rank
        self._world_size = world_size
        self._failures = failures
        self._epoch = epoch
        self._collectives: deque[Collective] = deque(maxlen=_NUM_KEPT)
        self._checksums: deque[int] = deque(maxlen=_NUM_KEPT)  # the checksum after each collective
        self._number = 0
        self._checksum = 0
        self._num_compared = 0
        self._num_shown = 0
        self.name = f"{failures.name}/{epoch}"
        parted.count(self)

    def end(self) -> None:
        """End the epoch: this order is no longer part of the notes of `parted.py`."""
        parted.count_no_more(self)

    @property
    def number(self) -> int:
        """The number of collectives that this rank has issued."""
        return self._number

    def num_started(self) -> dict[str, int]:
        """Return the number of issued collectives, under this object's name, for `parted.py`."""
        return {self.name: self._number}

    def add(self, collective: Collective) -> None:
        """Record that this rank issues `collective`."""
        self._collectives.append(collective)
        self._number += 1
        kind, numel, dtype, tag = collective
        self._checksum = zlib.crc32(f"{kind}{numel}{dtype}{tag}".encode(), self._checksum)
        self._checksums.append(self._checksum)

    def with_checksum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the fp64 values to all-reduce, with the checksum c of the issued collectives and c**2 appended."""
        checksum = self._checksum >> (32 - _CHECKSUM_BITS)
        return torch.cat([values_N, values_N.new_tensor([checksum, checksum**2])])

    def check(self, total: float, total_squares: float) -> None:
        """Compare the checksums of all ranks by their sum and the sum of their squares.

        By the Cauchy-Schwarz inequality, (sum c)**2 <= W sum c**2, with equality exactly if all c are equal.

        Raises:
            CommError: on every rank, if the checksums differ.
        """
        if total * total != self._world_size * total_squares:
            raise CommError(self.difference() or f"the ranks have issued different collectives; {_ADVICE}")

    def difference(self, grace_s: float = GRACE_S) -> str:
        """Describe where the ranks differ; "" if unknown. All ranks that fail together call it.

        Args:
            grace_s: how long to wait for the peers' lists of issued collectives.
        """
        deadline_s = time.monotonic() + grace_s
        key = f"issued/{self._epoch}/{self._num_compared}"
        self._num_compared += 1
        self._show(key)
        for rank in self._few_peers():
            theirs = self._shown(f"{key}/{rank}", max(deadline_s - time.monotonic(), 0.0), is_longer=True)
            if theirs and (found := _first_difference(self._told(), theirs)):
                return found
        return ""

    def crossing(self) -> str:
        """Describe where a long-waiting peer has issued a different collective than this rank; "" if no such peer is
        known. Called now and then while this rank waits long."""
        key = f"issued/{self._epoch}/waits"
        if self._num_shown != self._number:
            self._num_shown = self._number
            self._show(key)
        for rank in self._few_peers():
            theirs = self._shown(f"{key}/{rank}", 0.0)
            if theirs and (found := _first_pair_that_differs(self._told(), theirs)):
                return found
        return ""

    def _few_peers(self) -> Sequence[int]:
        return parted.few_of([rank for rank in range(self._world_size) if rank != self._rank])

    def _show(self, key: str) -> None:
        """Put this rank's issued collectives into the store, and their checksum, which is enough for most readers."""
        self._failures.note(f"{key}/{self._rank}/all", json.dumps(self._told()))
        self._failures.note(f"{key}/{self._rank}", f"{self._number} {self._checksum}")

    def _shown(self, key: str, wait_s: float, *, is_longer: bool = False) -> dict[str, Any]:
        """Return what a peer has stored under `key`; empty if nothing is there or the peer issued the same collectives.

        Unless `is_longer`, the result is also empty if the peer issued the same collectives so far, but fewer.
        """
        said = self._failures.noted(key, wait_s)
        if not said:
            return {}
        number, checksum = map(int, said.split())
        at = number - 1 - (self._number - len(self._checksums))
        begins_alike = 0 <= at < len(self._checksums) and self._checksums[at] == checksum
        if begins_alike and not (is_longer and number < self._number):
            return {}
        noted = self._failures.noted(f"{key}/all", 0.0)
        return dict(json.loads(noted)) if noted else {}

    def _told(self) -> dict[str, Any]:
        """Return the last `_NUM_KEPT` collectives that this rank has issued, as text for its peers."""
        first = self._number - len(self._collectives)
        return {"rank": torch_dist.get_rank(), "first": first, "issued": [str(each) for each in self._collectives]}


def _first_pair_that_differs(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    first = max(mine["first"], theirs["first"])
    pairs = zip(*(islice(each["issued"], first - each["first"], None) for each in (mine, theirs)), strict=False)
    for own, other in pairs:
        if own != other:
            return f"rank {mine['rank']} makes {own} where rank {theirs['rank']} makes {other}; {_ADVICE}"
    return ""


def _first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if found := _first_pair_that_differs(mine, theirs):
        return found
    counts = [each["first"] + len(each["issued"]) for each in (mine, theirs)]
    if counts[0] == counts[1]:
        return ""
    return (
        f"rank {mine['rank']} has issued {counted(counts[0], 'collective')}, the last of them {mine['issued'][-1]}, "
        f"and rank {theirs['rank']} {counts[1]}, the last of them {theirs['issued'][-1]}; {_ADVICE}"
    )


_ADVICE = (
    "all ranks of a group issue the same collectives, with the same sizes and tags, in the same order. Have they the "
    "same model, and the same parameters that require a gradient?"
)
