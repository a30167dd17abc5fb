"""The first failure in a group, kept in the job's store, so that a rank which fails after it can name the cause.

Used by `watch.py`, `issued.py` and `direct.py` of ds-ext-cpu.

[Note: a rank that leaves] A rank that fails waits for nobody: its exception must reach the user while the peers may be
in a collective of their own. It records the exception in the store, lets its peers know in the way of its transport,
and keeps the buffers of its collectives alive, since peers may still read them and the library may still write them.
"""

import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

#: records made in this process by group name; ranks make them in the same order, so the count is part of the key
_num_records: Counter[str] = Counter()


class PeerFailed(CommError):
    """A rank cannot go on because another one failed: a consequence, which is never recorded as a cause."""


class FailureRecord:
    """Who failed first in `group`, and why, per epoch: ranks that go on after a failure begin the next one."""

    def __init__(self, group: ProcessGroup) -> None:
        # group.group_name raises for a group that a plugin wrote in Python
        name = torch_dist.distributed_c10d._get_process_group_name(group)
        self._prefix = f"deepspeed/failure/{name}/{_num_records[name]}"
        self._logged = ""
        _num_records[name] += 1

    def record(self, epoch: int) -> None:
        """Record the exception that is being handled. If a peer failed before, log that failure, which is the cause."""
        error = sys.exc_info()[1]
        reason = f"{type(error).__name__}: {first_line(error)}" if error else "an exception that was caught"
        mine = f"rank {torch_dist.get_rank()} failed with {reason}"
        if isinstance(error, PeerFailed):
            first = self.first(epoch)
        else:
            first = self._ask(lambda store: store.compare_set(f"{self._prefix}/{epoch}", "", mine))
        if first and first not in (mine, self._logged):
            self._logged = first
            logger.error("%s; the failure of this rank follows from that", first)

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
        return self._ask(lambda store: store.wait([key], timedelta(seconds=wait_s)) or store.get(key))

    @staticmethod
    def _ask(question: Callable[[Store], bytes]) -> str:
        """The store's answer; "" where the process that has the store is gone."""
        try:
            return question(torch_dist.distributed_c10d._get_default_store()).decode(errors="replace")
        except (RuntimeError, ValueError) as error:
            logger.debug("the store of the job does not answer: %s", first_line(error))
            return ""
