"""The first failure in a group, kept in the job's store, so that a rank which fails after it can name the cause.

Used by `watch.py`, `issued.py` and `direct.py` of ds-ext-cpu; `give_up.py` tells all groups of a rank.

[Note: a rank that leaves] A rank that fails waits for nobody: its exception must reach the user while the peers may be
in a collective of their own. It records the exception in the store, lets its peers know in the way of its transport,
and keeps the buffers of its collectives alive, since peers may still read them and the library may still write them.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.comm.ended import ended_clause
from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

#: records made in this process by group name; ranks make them in the same order, so the count is part of the key
_num_records: Counter[str] = Counter()


_LONGEST_PAUSE_S = 0.05  # between two questions to the store


class PeerFailed(CommError):
    """A rank cannot go on because another one failed: a consequence, which is never recorded as a cause.

    Args:
        message: for the user.
        cause: the rank that failed first, and why, where that is known; what is recorded in the groups that this rank
            leaves in turn, of which that one may not be a member.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


def handled_errors() -> Iterator[BaseException]:
    """The exception that is being handled, and those that it came from."""
    error, seen = sys.exc_info()[1], set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def handled_consequence() -> PeerFailed | None:
    """The failure of a peer that the exception which is being handled came from."""
    return next((error for error in handled_errors() if isinstance(error, PeerFailed)), None)


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if error else "an exception that was caught"


def _sentence(reason: str) -> str:
    return f"rank {torch_dist.get_rank()} failed with {reason}"


class FailureRecord:
    """Who failed first in `group`, and why, per epoch: ranks that go on after a failure begin the next one."""

    def __init__(self, group: ProcessGroup) -> None:
        # group.group_name raises for a group that a plugin wrote in Python
        name = torch_dist.distributed_c10d._get_process_group_name(group)
        self._group = group
        self._prefix = f"deepspeed/failure/{name}/{_num_records[name]}"
        self._logged = ""
        _num_records[name] += 1

    @property
    def name(self) -> str:
        """Of this record, on all ranks of the group."""
        return self._prefix

    def record(self, epoch: int) -> None:
        """Record the exception that is being handled. If a peer failed before, log that failure, which is the cause."""
        error = sys.exc_info()[1]
        reason = _reason(error)
        mine = _sentence(reason)
        consequence = handled_consequence()
        if consequence is not None:
            first = self._claim(epoch, consequence.cause) if consequence.cause else self.first(epoch)
        else:
            first = self._claim(epoch, mine)
        if first in ("", mine, self._logged):
            return
        self._logged = first
        if consequence is not None or isinstance(error, CommError):
            logger.error("%s; the failure of this rank follows from that", first)
        elif not first.endswith(f" {reason}"):  # else all ranks fail alike
            logger.error("%s; after that, and by itself, this rank failed with %s", first, reason)

    def claim(self, epoch: int, error: BaseException) -> None:
        """Record an exception that this rank is about to raise."""
        self._claim(epoch, _sentence(_reason(error)))

    def _claim(self, epoch: int, cause: str) -> str:
        """Record a cause, unless there is one. Returns the one that is recorded."""
        return self._ask(lambda store: store.compare_set(f"{self._prefix}/{epoch}", "", cause))

    def next_epoch(self, epoch: int) -> int:
        """The epoch in which this rank goes on after a failure in `epoch` that it has recorded.

        A rank that fails because its peers did goes to where they are, and one that fails by itself to the next epoch,
        as its peers do that have failed as often.
        """
        epoch += 1
        while handled_consequence() is not None and self.first(epoch):
            epoch += 1
        return epoch

    def meet(self, epoch: int, timeout_s: float) -> str:
        """Return when all ranks of the group have come to this epoch, with a name for what they make together.

        Raises:
            PeerFailed: a rank failed before all had come.
            CommError: a rank has ended, or they did not come within `timeout_s`.
        """
        store = torch_dist.distributed_c10d._get_default_store()
        key = f"{self._prefix}/{epoch}/met"
        start_s = time.monotonic()
        store.add(key, 1)
        while store.add(key, 0) < self._group.size():
            if ended := ended_clause(self._group):
                raise CommError(f"rank {torch_dist.get_rank()} cannot go on after a failure: {ended}")
            if cause := self.first(epoch):
                raise PeerFailed(f"rank {torch_dist.get_rank()} cannot go on: {cause}", cause)
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                raise CommError(
                    f"rank {torch_dist.get_rank()} waited {timeout_s:g} s for all ranks of its group, which go on "
                    "together after a failure; see what the others are doing"
                )
            time.sleep(min(max(waited_s / 10, 0.001), _LONGEST_PAUSE_S))
        return f"{self._prefix}/{epoch}"

    def first(self, epoch: int) -> str:
        """The first failure of this epoch in words; "" where none is known."""
        key = f"{self._prefix}/{epoch}"
        return self._ask(lambda store: store.get(key) if store.check([key]) else b"")

    def note(self, key: str, text: str) -> None:
        """Put a text into the store, for `noted` on other ranks."""

        def put(store: Store) -> bytes:
            store.set(f"{self._prefix}/{key}", text)
            return b""

        self._ask(put)

    def noted(self, key: str, wait_s: float) -> str:
        """What another rank has put there, or puts there within `wait_s` seconds; "" otherwise."""
        key = f"{self._prefix}/{key}"
        if wait_s == 0.0:
            return self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        return self._ask(lambda store: store.wait([key], timedelta(seconds=wait_s)) or store.get(key))

    @staticmethod
    def _ask(question: Callable[[Store], bytes]) -> str:
        """The store's answer; "" where the process that has the store is gone."""
        try:
            return question(torch_dist.distributed_c10d._get_default_store()).decode(errors="replace")
        except (RuntimeError, ValueError) as error:
            logger.debug("the store of the job does not answer: %s", first_line(error))
            return ""
