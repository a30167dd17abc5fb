"""`Watch` watches gloo's collectives in one group: errors name the rank that failed first, and a rank can leave.

[Note: what gloo does not end] When a peer closes a connection, gloo ends the waits for that peer, except for a message
that is in transfer at that time: `Pair::signalException` (gloo/transport/tcp/pair.cc) signals the buffers that are
still to be sent or received, but not partly transferred buffers. On both ranks of that connection, a gloo thread then
waits until the group's timeout. So a rank that waits in a collective checks whether a rank has left the group, and then
gives up. A group that is left with works in flight is never freed, since freeing would wait for its threads.

`Issued`: ranks compare the collectives that they issued in a group whose library matches collectives only by their
order. gloo pairs the n-th collective of a rank with the n-th of its peers, whatever they are for. If ranks take
different paths through a model, they get wrong numbers where the sizes agree, and wait for each other where they do
not. So

- every all-reduce of a few fp64 numbers also carries a checksum of the collectives issued before it; each step and each
  evaluation at stage 3 has such an all-reduce. If the checksums differ, all ranks raise before weights are updated;
- when a collective fails, the ranks that were in one put their issued collectives into the job's store, and the error
  names the first two that differ;
- a rank that waits long also stores its issued collectives there, so two ranks that wait for each other in different
  collectives both find the difference, and do not wait until the group's timeout.
"""

import contextlib
import ctypes
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm import failure, parted
from deepspeed.comm.backend import Work, ends_within, is_over, timeout_of
from deepspeed.comm.failure import FailureRecord, PeerFailed, ended_clause
from deepspeed.comm.own_group import own_group
from deepspeed.comm.values import Arrivals, dtype_name
from deepspeed.errors import CommError, counted, first_line

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


#: tag of messages that no rank sends
_UNUSED_TAG = 1 << 22
#: time between two checks of a waiting rank; after `_NUM_LOOKS` checks that find a rank gone, nothing more will come
_PAUSE = timedelta(seconds=1)
_NUM_LOOKS = 3


class Watch:
    """`Watch` starts the collectives of this rank in one group over gloo, and explains why they fail.

    Args:
        group: a process group that includes this process.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group  # the group that runs the works; `close` closes its connections
        self._of = group
        self.ranks = torch_dist.get_process_group_ranks(group)
        self._failures = FailureRecord(group)
        self._arrivals = Arrivals(
            self.ranks,
            self._failures.name,
            timeout_of(group).total_seconds(),
            lambda: self._failures.refusal(self._epoch, has_met=self._has_met),
        )
        self._has_met = False  # True: all ranks know this group, and leave it after a failure
        self._epoch = 0
        self._begin_epoch()
        self._failure: CommError | None = None  # set if this group cannot connect again
        self._kept: list[object] = []  # works and groups kept alive: gloo may still write the buffers of works

    def _begin_epoch(self) -> None:
        if self._epoch > 0:
            self.issued.end()
        self.issued: Issued = Issued(self._of.rank(), self._of.size(), self._failures, self._epoch)
        self._is_compared = False
        self._parted: CommError | None = None

    def connect(self) -> ProcessGroup:
        """Return the group in which works run: a separate group if the library needs one, a new one after a failure.
        All ranks call it together."""
        self.group = own_group(self._of, self.meet)
        return self.group

    def meet(self) -> str:
        """Wait until all ranks of the group have come to this epoch to connect. Returns a name for the new group.

        Raises:
            PeerFailed: a rank failed before all had come.
            CommError: a rank has ended, waits for this rank in another call, or did not come within the timeout.
        """
        if not self._has_met and (num_told := failure.num_told) > self._epoch:
            # ranks that know of a failure wait in a later epoch until the other ranks have failed, too
            self.join_epoch(num_told)
        after = f" after failure {self._epoch}" if self._epoch else ""
        number = self._arrivals.wait_for_all(f"the first collective of {len(self.ranks)} ranks{after}")
        self._has_met = True
        return f"{self._failures.name}/{self._epoch}/{number}"

    def start(self, call: Callable[[], Work], collective: Collective) -> Work:
        """Start a gloo collective in this group; its errors name the collective and the rank that failed first."""
        if self._failure is not None:
            raise self._failure
        self.issued.add(collective)
        try:
            return _Watched(self, call(), collective)
        except RuntimeError as error:
            raise self.explained(error, collective) from error

    def explained(self, error: RuntimeError, collective: Collective) -> CommError:
        """Return the error to raise for a failed collective: it names the first failed rank, or how ranks differ."""
        if isinstance(error, CommError):
            return error
        if self._parted is not None:
            return self._parted
        asked = f"rank {torch_dist.get_rank()} cannot finish {collective}"
        if cause := self._failures.first(self._epoch):
            if crossing := self.issued.crossing():  # the failed peer found it first, and closed the connections
                return CommError(crossing)
            return PeerFailed(f"{asked}: {cause}. The output of the rank that failed first says why", cause)
        if ended := ended_clause(self._of):
            return CommError(
                f"{asked}: {ended}; its own output says why, or it left out a call that this rank makes, or had fewer "
                f"batches ({first_line(error)})"
            )
        return CommError(f"{asked}: {first_line(error)}. {self._difference(error)}")

    def is_left(self, epoch: int) -> bool:
        """Whether a rank has left the group in `epoch`."""
        return self._parted is not None or bool(self._failures.first(epoch))

    def cause(self) -> str:
        """Describe which rank left the group first in this epoch, and why; "" if none did."""
        return self._failures.first(self._epoch)

    def looker(
        self, waits_in: object, never_comes: Callable[[int, parted.Note], bool], kind: str | None = None
    ) -> Callable[[], None]:
        """Return a function for another thread to call while this rank waits, see `parted.looking`; if the function
        finds an error, the wait raises that error."""
        # meanwhile the wait may fail, and this rank may begin the next epoch
        group, epoch, issued = self.group, self._epoch, self.issued

        def look() -> None:
            if self.is_left(epoch):
                return
            error: CommError | None = parted.find(self.ranks, str(waits_in), never_comes, kind=kind)
            if error is None and (crossing := issued.crossing()):
                error = CommError(crossing)
            if error is not None:
                self._failures.claim(epoch, error)  # before peers see the closed connections
                if self._epoch == epoch:
                    self._parted = error
                self._close(group)

        return look

    def _difference(self, error: RuntimeError) -> str:
        """Describe how the ranks differ; from the second call in an epoch on, only point to the other rank's output."""
        if not self._is_compared:
            self._is_compared = True
            is_late = "timed out" in str(error).lower()  # else a peer has ended or closed its connections
            if found := self.issued.difference(GRACE_S if is_late else GRACE_S / 5):
                return found
        return "The output of the rank that failed first says why"

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` unfinished; see `GroupBackend.abandon`.

        After a failure, no rank knows whether its peers issued the same collectives, so the connections are closed.
        `connect` makes new connections, unless they are the ones that torch made for the group.
        """
        over_gloo = [work for work in works if isinstance(work, _Watched)]
        for work in works:
            if not isinstance(work, _Watched):
                work.wait()  # on a device, the stream waits
        self._kept += over_gloo
        if not failed:
            return
        if not all(work.is_over() for work in over_gloo):
            self.never_free()
        self._failures.record(self._epoch)
        self.join_epoch(self._epoch + 1, leaves_works=bool(over_gloo))

    def never_free(self) -> None:
        """Keep the group alive as long as the process, since one of its threads may wait until the timeout."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    def epoch(self) -> tuple[str, int]:
        """Return the name and the number of the present epoch, for `give_up.py`."""
        return self._failures.name, self._epoch

    def join_epoch(self, epoch: int, *, leaves_works: bool = False) -> None:
        """Close the connections of the current epoch, and begin `epoch`."""
        self._epoch = epoch
        if self.group is not self._of:
            self.close()
            self._kept.append(self.group)
            self.group = self._of
        elif leaves_works:
            self.close()
            self._failure = CommError(
                f"rank {torch_dist.get_rank()} left collectives of this group unfinished after a failure, and closed "
                "its connections; destroy the process group and initialize it again, or start the job again"
            )
        self._begin_epoch()

    def close(self) -> None:
        """Close the connections of this rank in the group: peers that wait for this rank there raise.

        gloo has no call for this (`abort` and `shutdown` of its process groups do nothing), but gloo closes the
        connections of a group when a receive times out.
        """
        self._close(self.group)

    @staticmethod
    def _close(group: ProcessGroup) -> None:
        rank, nothing = group.rank(), torch.empty(1, device="cpu")
        for peer in range(group.size()):
            if peer != rank:
                with contextlib.suppress(RuntimeError):  # the time limit
                    work = torch_dist.irecv(nothing, group=group, tag=_UNUSED_TAG, group_src=peer)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


class _Watched:
    """A collective of gloo in flight."""

    def __init__(self, watch: Watch, work: Work, collective: Collective) -> None:
        self._watch = watch
        self._work = work
        self._collective = collective
        self._name, self._number, self._epoch = watch.issued.name, watch.issued.number, watch.epoch()[1]

    def poll(self) -> bool:
        """Poll; a failure names the rank that failed first."""
        try:
            return self._work.poll()
        except RuntimeError as error:
            raise self._watch.explained(error, self._collective) from error

    def wait(self) -> None:
        """Wait; a failure names the rank that failed first."""
        try:
            wait = parted.Wait(self._collective, self._name, self._number, self._watch.ranks)
            with parted.looking(wait, self._watch.looker(self._collective, self._never_comes, self._name)):
                num_looks = 0
                while num_looks < _NUM_LOOKS and not ends_within(self._work, _PAUSE):
                    num_looks = num_looks + 1 if self._watch.is_left(self._epoch) else 0
                if num_looks == _NUM_LOOKS:
                    self._watch.never_free()
                    raise RuntimeError("the connection was closed in the middle of a message")
                self._work.wait()
        except RuntimeError as error:
            raise self._watch.explained(error, self._collective) from error

    def is_over(self) -> bool:
        """Whether gloo has finished the work, with or without an error."""
        return is_over(self._work)

    def _never_comes(self, rank: int, note: parted.Note) -> bool:
        return note.num_started.get(self._name, 0) < self._number
