"""Ranks that wait for each other in different calls: found while they wait, and raised on all of them.

One rank calls `save_checkpoint`, under `if rank == 0:`, and another one goes on with a step. Neither can finish: the
first waits for the second in the job's store (`arrivals.py`), the second for the first in a collective. After a second,
who waits in the store notes there in which call, and how many collectives and messages it has started. Who waits
elsewhere looks at these notes after two seconds: a rank that has not started what it is waited for in, and waits in a
call that this rank has not made, will never start it. So nothing is guessed from the time. Who finds that ends the call
of the other, in one operation of the store, and both raise `RanksParted`.

A wait in a library cannot look; `looking` has a thread do it, which then makes the wait raise.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

#: how long a rank waits before it notes its call, and before it looks at the notes of others
NOTED_S, FIRST_LOOK_S = 1.0, 2.0
#: begins the end of a call that was ended so; other ends are names of ranks
PARTED = "!"
_NUM_NOTES = "deepspeed/parted/notes"  # of ranks that wait now; where it is 0 nobody looks further


class RanksParted(CommError):
    """Ranks wait for each other in different calls. Every one of them raises it."""


class Counted(Protocol):
    """Something that starts collectives or messages."""

    def num_started(self) -> Mapping[str, int]:
        """How many, by a name that all ranks know."""


_counted: WeakSet[Counted] = WeakSet()
#: the calls that this rank has ended; a slow rank may not have taken its note back when this one waits again
_ended: set[str] = set()


def count(each: Counted) -> None:
    """What `each` has started goes into the notes of this rank, as long as it lives."""
    _counted.add(each)


class Note(NamedTuple):
    """What a rank that waits for others in the store puts there."""

    call: str
    """In which call, for messages."""
    kind: str
    """Equal for those who make the same call."""
    end: str
    """The key by which the call can be ended."""
    ranks: Sequence[int]
    """Who makes it, as the job counts them."""
    num_started: Mapping[str, int]


def put_note(store: Store, call: str, kind: str, end: str, group: ProcessGroup) -> None:
    """Note that this rank waits."""
    started = {name: number for each in list(_counted) for name, number in each.num_started().items()}
    note = Note(call, kind, end, torch_dist.get_process_group_ranks(group), started)
    store.set(_key(torch_dist.get_rank()), json.dumps(note))
    store.add(_NUM_NOTES, 1)


def take_note_back(store: Store) -> None:
    """This rank waits no more. Never deleted: another rank may be about to read it, and would wait for it."""
    store.set(_key(torch_dist.get_rank()), "")
    store.add(_NUM_NOTES, -1)


def find(
    group: ProcessGroup, waits_in: str, never_comes: Callable[[int, Note], bool], *, calls: bool = False
) -> RanksParted | None:
    """What a rank is to raise that waits for ranks of `group`; None while they may still come.

    Args:
        waits_in: what this rank waits in, for messages.
        never_comes: whether a rank with such a note will never come to that.
        calls: `waits_in` names a call.
    """
    own = torch_dist.get_rank()
    try:
        store = torch_dist.distributed_c10d._get_default_store()
        for rank, note in _notes(store, group):
            if note.end in _ended or own not in note.ranks or not never_comes(rank, note):
                continue
            found = f"rank {rank} called {note.call}, and rank {own} {'called' if calls else 'waits in'} {waits_in}"
            end = PARTED + f"{found}: they wait for each other. {advice(note.call)}"
            if store.compare_set(note.end, "", end).decode() == end:
                _ended.add(note.end)
                return RanksParted(end.removeprefix(PARTED))
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))
    return None


def advice(call: str) -> str:
    """What to do where not all ranks make a call."""
    return (
        f"Every rank must call {call} at the same point of the program: not only one of them, under `if rank == 0:`. "
        "Nor may another call part them, such as a step, or generate() and a forward of ZeRO-3, on some ranks only."
    )


def _notes(store: Store, group: ProcessGroup) -> Iterator[tuple[int, Note]]:
    if store.add(_NUM_NOTES, 0) == 0:
        return
    for rank in torch_dist.get_process_group_ranks(group):
        if rank != torch_dist.get_rank() and store.check([_key(rank)]) and (text := store.get(_key(rank))):
            yield rank, Note(*json.loads(text))


def _key(rank: int) -> str:
    return f"deepspeed/parted/{rank}"


#: by thread, since when it waits in a library, and how to look
_looks: dict[int, tuple[float, Callable[[], None]]] = {}
_lookout: list[threading.Thread] = []


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Around a wait in a library: where it is long, `look` is called now and then, by another thread."""
    if not _lookout:
        _lookout.append(threading.Thread(target=_look_out, name="deepspeed lookout", daemon=True))
        _lookout[0].start()
    own = threading.get_ident()
    _looks[own] = time.monotonic(), look
    try:
        yield
    finally:
        del _looks[own]


def _look_out() -> None:
    while True:
        time.sleep(FIRST_LOOK_S / 2)
        _look_after_waits(time.monotonic())


def _look_after_waits(now_s: float) -> None:
    for since_s, look in list(_looks.values()):
        if now_s - since_s > FIRST_LOOK_S:
            try:
                look()
            except RuntimeError as error:  # the store of the job is gone; other waits are still looked after
                logger.debug("a wait was not looked after: %s", first_line(error))
