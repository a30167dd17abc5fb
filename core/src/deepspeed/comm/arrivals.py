"""`Arrivals`: a call that every rank of a group makes, at which a rank that does not come is named.

A collective cannot do that: a library waits until its time limit, half an hour by default, and then names its own call.
Here each rank enters its name in the job's store and waits there for the others. Nothing is in flight in the group
meanwhile, so after a failure the ranks go on. Called at the begin of `save_checkpoint` and `load_checkpoint`.
"""

import time
from collections import Counter

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.errors import CommError
from deepspeed.log import logger

_WARNING_S = 10.0
_LONGEST_PAUSE_S = 0.5  # between two questions to the store
#: objects made in this process by group name; ranks make them in the same order, so the count is part of the key
_num_made: Counter[str] = Counter()


class Arrivals:
    """The calls that all ranks of `group` make together.

    Args:
        group: more than one rank.
        limit_s: how long a rank waits for the others; after 10 s it warns.
    """

    def __init__(self, group: ProcessGroup, limit_s: float) -> None:
        name = torch_dist.distributed_c10d._get_process_group_name(group)
        self.limit_s = limit_s
        self._group = group
        self._prefix = f"deepspeed/arrivals/{name}/{_num_made[name]}"
        self._num_met: Counter[str] = Counter()
        _num_made[name] += 1

    def wait_for_all(self, call: str) -> None:
        """Wait until every rank has called this with the same `call`, which is how messages name it.

        Raises:
            CommError: a rank did not come within `limit_s`; it is named. The group can be used as before.
        """
        store: Store = torch_dist.distributed_c10d._get_default_store()
        prefix, number = f"{self._prefix}/{call}", self._num_met[call]
        own, all_came = f"{prefix}/{self._group.rank()}", f"{prefix}/all/{number}"
        store.set(own, str(number))
        count, expected = f"{prefix}/count", (number + 1) * self._group.size()
        if store.add(count, 1) == expected:
            store.set(all_came, "")
        elif not self._wait(store, all_came, call):
            missing = self._missing(store, call)
            if store.add(count, -1) == expected - 1:
                store.add(count, 1)  # the last rank has just come
            else:
                store.delete_key(own)
                raise CommError(
                    f"rank {torch_dist.get_rank()} called {call}, and within {self.limit_s:g} s rank "
                    f"{', '.join(map(str, missing))} did not. {_advice(call)}"
                )
        self._num_met[call] += 1
        if self._group.rank() == 0 and number:
            store.delete_key(f"{prefix}/all/{number - 1}")  # every rank has read it

    def _wait(self, store: Store, key: str, call: str) -> bool:
        """Whether `key` is there before the limit."""
        began_s, has_warned = time.monotonic(), False
        while not store.check([key]):
            waited_s = time.monotonic() - began_s
            if waited_s > self.limit_s:
                return False
            if waited_s > _WARNING_S and not has_warned:
                has_warned = True
                missing = ", ".join(map(str, self._missing(store, call)))
                logger.warning("%s waits for rank %s, which has not called it. %s", call, missing, _advice(call))
            time.sleep(min(max(waited_s / 10, 0.001), _LONGEST_PAUSE_S))
        return True

    def _missing(self, store: Store, call: str) -> list[int]:
        """The ranks, as the job counts them, that have not come yet."""
        number = str(self._num_met[call]).encode()

        def has_come(rank: int) -> bool:
            key = f"{self._prefix}/{call}/{rank}"
            return store.check([key]) and store.get(key) == number

        absent = [rank for rank in range(self._group.size()) if not has_come(rank)]
        return [torch_dist.get_global_rank(self._group, rank) for rank in absent]


def _advice(call: str) -> str:
    return f"Every rank must call {call} at the same point of the program: not only one of them, under `if rank == 0:`."
