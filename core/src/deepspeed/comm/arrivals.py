"""`Arrivals`: a call that every rank of a group makes, at which a rank that does not come is named.

A collective cannot do that: a library waits until its time limit, half an hour by default, and then names its own call.
Here each rank enters its name in the job's store and waits there for the others. Nothing is in flight in the group
meanwhile, so after a failure the ranks go on. Called at the begin of `save_checkpoint` and `load_checkpoint`.

The ranks meet in rounds. One operation of the store ends a round, for all of them: of the rank that comes last, or of
one that has waited until its limit, is interrupted, or sees that another one has ended, or waits for this one elsewhere
(`parted.py`: then all that are in it raise). After the latter, ranks that wait or come later meet in the next round. A
rank that is interrupted when all have come goes on with them, and is interrupted later (`interrupts.py`).
"""

import time
from collections import Counter

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.comm import parted
from deepspeed.comm.ended import clause_of, ended_members
from deepspeed.comm.interrupts import any_held, handle_held, held
from deepspeed.errors import CommError
from deepspeed.log import logger

_WARNING_S = 10.0
_LONGEST_PAUSE_S = 0.5  # between two questions to the store
_ALL = "all"  # the end of a round in which all ranks came; else the rank that gave up
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
        self._num_ended: Counter[str] = Counter()  # rounds of a call whose end this rank has seen
        self._num_deleted: Counter[str] = Counter()
        _num_made[name] += 1

    def wait_for_all(self, call: str) -> None:
        """Wait until every rank has called this with the same `call`, which is how messages name it.

        Raises:
            CommError: a rank did not come within `limit_s`; it is named. The group can be used as before.
            RanksParted: a rank is in another call, in which it waits for this one. The caller has failed in a step.
        """
        with held():
            self._wait_for_all(call)

    def _wait_for_all(self, call: str) -> None:
        store: Store = torch_dist.distributed_c10d._get_default_store()
        wait = _Wait(store, self._group, f"{self._prefix}/{call}", call, self._num_ended[call])
        while (ended_by := wait.meet(self.limit_s)) != _ALL:
            self._num_ended[call] += 1
            if ended_by.startswith(parted.PARTED):
                if not wait.came_late:
                    raise parted.RanksParted(ended_by.removeprefix(parted.PARTED))
                wait.begin_next()
                continue
            if ended_by == str(self._group.rank()):
                handle_held()  # raises, or only notes the signal: then this rank waits on, in the next round
                if wait.absent:
                    waited = f"and waited for {self.limit_s:g} s: {wait.absent}"
                    if wait.ended:
                        waited = f"and {wait.ended} without it"
                    raise CommError(f"rank {torch_dist.get_rank()} called {call} {waited}. {parted.advice(call)}")
            wait.begin_next(ended_by)
        if self._group.rank() == 0:
            for number in range(self._num_deleted[call], self._num_ended[call]):  # every rank has seen their end
                store.delete_key(wait.key(number, "count"))
                store.delete_key(wait.key(number, "end"))
            self._num_deleted[call] = self._num_ended[call]
        self._num_ended[call] += 1


class _Wait:
    """One rank in one call.

    Args:
        prefix: of the call's keys.
        number: of its first round.
    """

    def __init__(self, store: Store, group: ProcessGroup, prefix: str, call: str, number: int) -> None:
        self._store, self._group, self._prefix, self._call = store, group, prefix, call
        self._first = self._number = number
        self._gave_up: set[int] = set()
        self._began_s, self._has_warned, self._is_noted = time.monotonic(), False, False
        self.came_late = False
        """Whether the round had ended when this rank came to it."""
        self.absent = ""
        """Of a round that this rank gave up for good: the ranks that were not in it, as a clause."""
        self.ended = ""
        """Of such a round: those that will never be in it, as a clause."""

    def meet(self, limit_s: float) -> str:
        """Come to the round. Returns how it ended."""
        self.came_late = True
        if self._store.add(self.key(self._number, "count"), 1) == self._group.size():
            return self._end(_ALL)
        self._store.set(self.key("last round of", str(self._group.rank())), str(self._number))
        try:
            return self._wait(limit_s)
        finally:
            if self._is_noted:
                self._is_noted = False
                parted.take_note_back(self._store)

    def _wait(self, limit_s: float) -> str:
        end, rank = self.key(self._number, "end"), str(self._group.rank())
        while not self._store.check([end]):
            self.came_late = False
            waited_s = time.monotonic() - self._began_s
            if waited_s > _WARNING_S and not self._has_warned:
                self._has_warned = True
                logger.warning("%s waits: %s. %s", self._call, self._find_absent(), parted.advice(self._call))
            if waited_s > limit_s or self._find_ended():
                self.absent = self._find_absent()  # before others can go to the next round
                return self._end(rank)
            if any_held():
                return self._end(rank)
            if waited_s > parted.NOTED_S and not self._is_noted:
                parted.put_note(self._store, self._call, self._prefix, end, self._group)
                self._is_noted = True
            if waited_s > parted.FIRST_LOOK_S and (found := self._find_parted()) is not None:
                return self._end(parted.PARTED + str(found))
            time.sleep(min(max(waited_s / 10, 0.001), _LONGEST_PAUSE_S))
        return self._store.get(end).decode()

    def begin_next(self, gave_up: str = "") -> None:
        """Go to the next round, after this one was ended, by a rank that gave up or as ranks had parted."""
        if gave_up and int(gave_up) != self._group.rank():
            self._gave_up.add(int(gave_up))
        self._number += 1

    def _find_ended(self) -> str:
        """The ranks that have ended and are not in the round, as a clause."""
        if ended := ended_members(self._group):
            ranks = {
                torch_dist.get_global_rank(self._group, each): last for each, last in enumerate(self._last_rounds())
            }
            self.ended = clause_of(rank for rank in ended if ranks[rank] < self._number)
        return self.ended

    def _find_parted(self) -> parted.RanksParted | None:
        """Whether a rank waits for this one in another call of this kind."""
        return parted.find(self._group, self._call, lambda _, note: note.kind != self._prefix, calls=True)

    def _last_rounds(self) -> list[int]:
        """By rank of the group, the last round that it came to."""
        keys = [self.key("last round of", rank) for rank in range(self._group.size())]
        return [int(self._store.get(key)) if self._store.check([key]) else -1 for key in keys]

    def _find_absent(self) -> str:
        """The ranks that are not in the round, as the job counts them, as a clause."""
        rounds = self._last_rounds()
        left = {rank for rank in self._gave_up if rounds[rank] < self._number}
        # a rank that has not seen the end of the former round yet is named only where no other is absent
        begin = self._first if left else self._number
        missing = {rank for rank, number in enumerate(rounds) if number < begin}
        found = [f"rank {self._named(missing)} has not called it"] if missing else []
        found += [f"rank {self._named(left)} has called it and given up"] if left else []
        return ", ".join(found)

    def key(self, *names: object) -> str:
        return "/".join(map(str, (self._prefix, *names)))

    def _end(self, by: str) -> str:
        """End the round, if no other rank has. Returns how it ended."""
        return self._store.compare_set(self.key(self._number, "end"), "", by).decode()

    def _named(self, ranks: set[int]) -> str:
        return ", ".join(str(torch_dist.get_global_rank(self._group, rank)) for rank in sorted(ranks))
