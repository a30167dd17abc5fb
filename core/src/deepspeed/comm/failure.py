"""The first failure in a group, kept in the job's store, so that a rank which fails after it can name the cause.

Used by `watch.py`, `issued.py` and `direct.py` of ds-ext-cpu; `give_up.py` tells all groups of a rank. Ranks that meet
to make a group have no record of it yet; so a failure is told there, too, by its number (`tell`).

[Note: a rank that leaves] A rank that fails waits for nobody: its exception must reach the user while the peers may be
in a collective of their own. It records the exception in the store, lets its peers know in the way of its transport,
and keeps the buffers of its collectives alive, since peers may still read them and the library may still write them.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

#: records made in this process by group name; ranks make them in the same order, so the count is part of the key
_num_records: Counter[str] = Counter()


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


_num_told = 0  # failures after which this rank has left its groups
_logged = (0, "")  # after how many, and what was logged last


def num_told() -> int:
    """Return after how many failures this rank has left its groups."""
    return _num_told


def tell() -> None:
    """This rank leaves its groups; called while the exception is handled. A consequence is not told again: ranks would
    hear of each other without end."""
    go_to(_num_told + 1)
    if handled_consequence() is None:
        cause = _sentence(_reason(sys.exc_info()[1]))
        _ask(lambda store: store.compare_set(_told(_num_told), "", cause))


def _is_new(cause: str) -> bool:
    """Whether this is the first group that this rank leaves because of `cause`, since it failed last."""
    global _logged
    former, _logged = _logged, (_num_told, cause)
    return former != _logged


def go_to(number: int) -> None:
    """This rank counts so many failures now, as others do."""
    global _num_told
    _num_told = number


def unheard() -> PeerFailed | None:
    """Return the error for a rank that waits for another one, after a failure that this rank has not heard of.

    The other rank may have left because of that failure. Return None if no such failure is noted.
    """
    key = _told(_num_told + 1)
    cause = _ask(lambda store: store.get(key) if store.check([key]) else b"")
    return _consequence(cause) if cause else None


def note_broken(name: str, text: str) -> None:
    """States of `name`, the same on all ranks, are not of one step any more, as `text` says of this rank."""
    text = f"rank {torch_dist.get_rank()}: {text}" if torch_dist.is_initialized() else text
    _ask(lambda store: store.compare_set(_broken(name), "", text))


def broken(name: str) -> str:
    """Return what `note_broken` first noted of `name`; "" if no rank has noted anything."""
    return _ask(lambda store: store.get(_broken(name)) if store.check([_broken(name)]) else b"")


def _broken(name: str) -> str:
    return f"deepspeed/broken/{name}"


def _told(number: int) -> str:
    return f"deepspeed/told/{number}"


def _consequence(cause: str) -> PeerFailed:
    return PeerFailed(f"rank {torch_dist.get_rank()} cannot go on: {cause}", cause)


def _ask(question: Callable[[Store], bytes]) -> str:
    """The store's answer; "" where the process that has the store is gone."""
    try:
        return question(torch_dist.distributed_c10d._get_default_store()).decode(errors="replace")
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))
        return ""


class FailureRecord:
    """A `FailureRecord` keeps, per epoch, which rank failed first in `group`, and why.

    [Note: one epoch per failed step] A rank that goes on after a failure begins the next epoch, whether it failed by
    itself or because a peer did, and however often that has failed meanwhile. A peer that has failed in two steps in a
    row so has this rank raise in two, and both are in the same step when they are in the same epoch.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # group.group_name raises for a group that a plugin wrote in Python
        name = torch_dist.distributed_c10d._get_process_group_name(group)
        self._prefix = f"deepspeed/failure/{name}/{_num_records[name]}"
        _num_records[name] += 1

    @property
    def name(self) -> str:
        """The name of this record, which is the same on all ranks of the group."""
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
        if first in ("", mine) or not _is_new(first):
            return
        if consequence is not None or isinstance(error, CommError):
            logger.error("%s; the failure of this rank follows from that", first)
        elif not first.endswith(f" {reason}"):  # else all ranks fail alike
            logger.error("%s; after that, and by itself, this rank failed with %s", first, reason)

    def claim(self, epoch: int, error: BaseException) -> None:
        """Record an exception that this rank is about to raise, or what that came from."""
        cause = error.cause if isinstance(error, PeerFailed) else ""
        self._claim(epoch, cause or _sentence(_reason(error)))

    def _claim(self, epoch: int, cause: str) -> str:
        """Record a cause, unless there is one. Returns the one that is recorded."""
        return _ask(lambda store: store.compare_set(f"{self._prefix}/{epoch}", "", cause))

    def refusal(self, epoch: int, *, has_met: bool) -> PeerFailed | None:
        """Return the error for a rank that waits for others to come to this epoch; None while they may still come.

        Args:
            has_met: the ranks have been in an earlier epoch together, so that each of them has the record.
        """
        cause = self.first(epoch)
        if cause:
            return _consequence(cause)
        return None if has_met else unheard()

    def first(self, epoch: int) -> str:
        """The first failure of this epoch in words; "" where none is known."""
        key = f"{self._prefix}/{epoch}"
        return _ask(lambda store: store.get(key) if store.check([key]) else b"")

    def note(self, key: str, text: str) -> None:
        """Put a text into the store, for `noted` on other ranks."""

        def put(store: Store) -> bytes:
            store.set(f"{self._prefix}/{key}", text)
            return b""

        _ask(put)

    def noted(self, key: str, wait_s: float) -> str:
        """Return the text that another rank put under `key`, or puts there within `wait_s` seconds; "" otherwise."""
        key = f"{self._prefix}/{key}"
        if wait_s == 0.0:
            return _ask(lambda store: store.get(key) if store.check([key]) else b"")
        return _ask(lambda store: store.wait([key], timedelta(seconds=wait_s)) or store.get(key))
