"""Ranks that wait for each other in different calls: found while they wait, and raised on all of them.

One rank calls `save_checkpoint`, under `if rank == 0:`, and another one goes on with a step. Neither can finish: the
first waits for the second in the job's store (`values.py`), the second for the first in a collective. After a second,
who waits in the store notes there in which call, and how many collectives and messages it has started. Who waits
elsewhere looks at these notes after two seconds: a rank that has not started what it is waited for in, and waits in a
call that this rank has not made, will never start it. So nothing is guessed from the time. Who finds that ends the call
of the other, in one operation of the store, and both raise `RanksParted`.

Who waits in a collective or a message notes that, too, when it looks. So two ranks that wait in collectives of
different groups, such as those of two engines, find each other. The one that does raises, and the other one with it, as
after any failure.

A rank that does neither, and stays away, is not in these notes. Inside a call that users make, such as
`GatheredParameters`, a wait of ten seconds is told with the ranks that are not in it (`in_call`); in a step ranks may
well wait so long.

In a large group all ranks wait for one that is slow, and all of them look. So a rank asks first whether anybody waits
elsewhere than it does, then reads the notes of a few ranks, drawn by lot; and few say who is missing.

A wait in a library cannot look; `looking` has a thread do it, which then makes the wait raise.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch.distributed as torch_dist
from torch.distributed import Store

from deepspeed.comm.failure import PeerFailed, unheard
from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

#: how long a rank waits before it notes its call, and before it looks at the notes of others
NOTED_S, FIRST_LOOK_S = 1.0, 2.0
#: how long it waits before it says who is missing
WARNING_S = 10.0
#: begins the end of a call that was ended so; other ends are names of ranks
PARTED = "!"
_NUM_NOTES = "deepspeed/parted/notes"  # of ranks that wait now; where it is 0 nobody looks further
#: peers whose notes a rank reads in one look; and ranks that say who is missing, at either end of a group
FEW = 8
_lot = random.SystemRandom()  # a rank that was forked draws others
T = TypeVar("T")


class RanksParted(CommError):
    """Ranks wait for each other in different calls. Every one of them raises it."""


class PartedByFailure(RanksParted, PeerFailed):
    """One of them has failed before, and went on to a call in which it waits for this rank."""


def ranks_parted(text: str) -> RanksParted:
    """Return the error for a rank that waits for others which are in another call, as `text` says.

    Where a rank has failed before and this rank has not heard of that, the error is a `PartedByFailure`.
    """
    heard = unheard()
    if heard is None or RanksParted.__name__ in heard.cause:  # the rank that found this has raised it already
        return RanksParted(text)
    return PartedByFailure(f"{heard}. Then {text}", heard.cause)


class Counted(Protocol):
    """Something that starts collectives or messages."""

    def num_started(self) -> Mapping[str, int]:
        """Return the number of collectives or messages started so far, by a name that all ranks know."""


class Wait(NamedTuple):
    """A `Wait` describes what a rank waits for in a collective or a message."""

    what: object
    """The collective or message, whose text is for error messages and is made only where the wait is long."""
    name: str
    """The name under which the ranks that are to start it count."""
    number: int
    """The number that the ranks have to start under that name before the wait can end."""
    ranks: Sequence[int]
    """The ranks that take part, as the job counts them."""


_counted: WeakSet[Counted] = WeakSet()
#: the calls that this rank has ended; a slow rank may not have taken its note back when this one waits again
_ended: set[str] = set()


def count(each: Counted) -> None:
    """Put what `each` has started into the notes of this rank, as long as `each` lives."""
    _counted.add(each)


def count_no_more(each: Counted) -> None:
    """It has ended, and others may refer to it still."""
    _counted.discard(each)


class Note(NamedTuple):
    """A `Note` is put into the store by a rank that waits for others."""

    call: str
    """The call in which the rank waits, for error messages."""
    kind: str
    """The kind, which is equal for ranks that make the same call."""
    end: str
    """The key by which the call can be ended; "" for a collective or message."""
    ranks: Sequence[int]
    """The ranks that make the call, as the job counts them."""
    num_started: Mapping[str, int]
    number: int = 0
    """The number of `kind` to be started before the wait for a collective or message can end; 0 for a call."""
    is_alone: bool = True
    """Whether no other thread of the rank may start what it has not started; else the note is for messages only."""


def put_note(
    store: Store, call: str, kind: str, end: str, ranks: Sequence[int], number: int = 0, *, is_alone: bool = True
) -> None:
    """Note that this rank waits."""
    note = Note(call, kind, end, ranks, _all_started(), number, is_alone)
    store.set(_key(torch_dist.get_rank()), json.dumps(note))
    store.add(_num_of(kind), 1)
    store.add(_NUM_NOTES, 1)


def take_note_back(store: Store, kind: str) -> None:
    """This rank waits no more. Never deleted: another rank may be about to read it, and would wait for it."""
    store.set(_key(torch_dist.get_rank()), "")
    store.add(_NUM_NOTES, -1)
    store.add(_num_of(kind), -1)


def _all_started() -> dict[str, int]:
    return {name: number for each in list(_counted) for name, number in each.num_started().items()}


def few_of(peers: Sequence[T]) -> Sequence[T]:
    """Return those of `peers` that this rank looks at now: few of a large group, as all its ranks ask the store."""
    return peers if len(peers) <= FEW else _lot.sample(peers, FEW)


def says_who_is_missing(ranks: Sequence[int]) -> bool:
    """Whether this one of `ranks` does, for which it asks for all of them."""
    return len(ranks) <= 2 * FEW or torch_dist.get_rank() in (*ranks[:FEW], *ranks[-FEW:])


def values_in(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The values of those of `keys` that the store has; in few questions where it has nearly all."""
    if not keys:
        return {}
    if store.check(list(keys)):
        return dict(zip(keys, store.multi_get(list(keys)), strict=True))
    half = len(keys) // 2
    return values_in(store, keys[:half]) | values_in(store, keys[half:]) if half else {}


def find(
    ranks: Sequence[int], waits_in: str, never_comes: Callable[[int, Note], bool], *, kind: str | None = None
) -> RanksParted | None:
    """Return the error for a rank that waits for others of `ranks` in a collective or a message, see `parting`; None
    while they may still come."""
    text = parting(ranks, waits_in, never_comes, kind=kind)
    return ranks_parted(text) if text else None


def parting(
    ranks: Sequence[int],
    waits_in: str,
    never_comes: Callable[[int, Note], bool],
    *,
    calls: bool = False,
    kind: str | None = None,
) -> str:
    """Say why those of `ranks` that this rank waits for will never come, for `ranks_parted`; "" while they may.

    Args:
        ranks: as the job counts them.
        waits_in: what this rank waits in, for messages.
        never_comes: whether a rank with such a note will never come to that.
        calls: `waits_in` names a call.
        kind: the kind of the notes of ranks that wait in the same.
    """
    own = torch_dist.get_rank()
    with _unless_store_is_gone():
        store = torch_dist.distributed_c10d._get_default_store()
        started = _all_started()
        for rank, note in _few_notes(store, ranks, kind):
            if note.end in _ended or own not in note.ranks or not note.is_alone or not never_comes(rank, note):
                continue
            if calls and not note.end:  # that rank finds this one
                continue
            # a name that this rank does not count is that of a group which it has left, or not made yet
            if not note.end and started.get(note.kind, note.number) >= note.number:
                continue
            where = f"{'called' if note.end else 'waits in'} {note.call}"
            found = f"rank {rank} {where}, and rank {own} {'called' if calls else 'waits in'} {waits_in}"
            if not note.end:
                return f"{found}: they wait for each other. {_SAME_ORDER}"
            end = PARTED + f"{found}: they wait for each other. {advice(note.call)}"
            if store.compare_set(note.end, "", end).decode() == end:
                _ended.add(note.end)
                return end.removeprefix(PARTED)
    return ""


@contextmanager
def _unless_store_is_gone() -> Iterator[None]:
    """The rank that has the store may have ended, and others go on without it: notes are for messages only."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))


def advice(call: str) -> str:
    """Say what a user is to do where not all ranks make a call."""
    if " " in call:  # no function
        return _SAME_ORDER
    named = f"{call} ({_ALSO_BY[call]})" if call in _ALSO_BY else call
    return (
        f"Every rank must call {named} at the same point of the program: not only one of them, under `if rank == 0:`. "
        "Nor may another call part them, such as a step, or generate() and a forward of ZeRO-3, on some ranks only."
    )


#: by what calls users make another one, without its name in their program
_ALSO_BY = {"zero.Init": "transformers' from_pretrained() does, at stage 3"}
_SAME_ORDER = "All ranks make the same calls in the same order, also where these have collectives of different groups."


def _few_notes(store: Store, ranks: Sequence[int], kind: str | None) -> Iterator[tuple[int, Note]]:
    """None where all who wait, wait in `kind`."""
    num_notes = store.add(_NUM_NOTES, 0)
    if num_notes == 0 or (kind is not None and num_notes == store.add(_num_of(kind), 0)):
        return
    for rank in few_of([rank for rank in ranks if rank != torch_dist.get_rank()]):
        if store.check([_key(rank)]) and (text := store.get(_key(rank))):
            yield rank, Note(*json.loads(text))


def _all_notes(store: Store, ranks: Sequence[int]) -> Iterator[tuple[int, Note]]:
    own = torch_dist.get_rank()
    texts = values_in(store, [_key(rank) for rank in ranks if rank != own])
    for rank in ranks:
        if text := texts.get(_key(rank)):
            yield rank, Note(*json.loads(text))


def _num_of(kind: str) -> str:
    return f"{_NUM_NOTES}/{kind}"


def _key(rank: int) -> str:
    return f"deepspeed/parted/{rank}"


class _Calls(threading.local):
    """The calls of `in_call` that a thread is in, the outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


_calls = _Calls()


@contextmanager
def in_call(name: str) -> Iterator[None]:
    """Inside are collectives of the call `name`, of which a long wait tells; of nested ones, the outermost."""
    _calls.names.append(name)
    try:
        yield
    finally:
        _calls.names.pop()


class Noting:
    """One wait for a collective or a message, which is noted when it is long.

    Where another thread than the main one has waited for such, it may start what peers wait for: a note then says no
    more than who is there, and is that of the main thread, or of one that is in a call.
    """

    _lock = threading.Lock()
    _noted: "Noting | None" = None
    _threads_wait = False

    def __init__(self, wait: Wait) -> None:
        self._wait, self._is_over, self._has_warned = wait, False, False
        self._began_s = time.monotonic()
        self._call = _calls.names[0] if _calls.names else ""
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            Noting._threads_wait = True

    def note(self) -> None:
        """Called by any thread, also where the wait has just ended."""
        with self._lock:
            is_alone = not self._threads_wait
            if Noting._noted is None and not self._is_over and (is_alone or self._is_main or self._call):
                what, name, number, ranks = self._wait
                with _unless_store_is_gone():
                    store = torch_dist.distributed_c10d._get_default_store()
                    put_note(store, str(what), name, "", ranks, number, is_alone=is_alone)
                    Noting._noted = self
            is_long = time.monotonic() - self._began_s > WARNING_S
            if Noting._noted is self and is_long and not self._has_warned and self._call:
                self._has_warned = True
                with _unless_store_is_gone():
                    self._warn(self._call)

    def _warn(self, call: str) -> None:
        what, name, number, ranks = self._wait
        if not says_who_is_missing(ranks):
            return
        notes = _all_notes(torch_dist.distributed_c10d._get_default_store(), ranks)
        there = {rank for rank, note in notes if note.num_started.get(name, 0) >= number}
        if missing := sorted(set(ranks) - there - {torch_dist.get_rank()}):
            named = ", ".join(map(str, missing))
            logger.warning("%s waits in %s: rank %s is not in it. %s", call, what, named, advice(call))

    def end(self) -> None:
        """The wait is over."""
        self._is_over = True
        with self._lock:
            if Noting._noted is self:
                Noting._noted = None
                with _unless_store_is_gone():
                    take_note_back(torch_dist.distributed_c10d._get_default_store(), self._wait.name)


#: by thread, since when it waits in a library, and how to look
_looks: dict[int, tuple[float, Callable[[], None]]] = {}
_lookout: list[threading.Thread] = []


@contextmanager
def looking(wait: Wait, look: Callable[[], None]) -> Iterator[None]:
    """Let another thread call `look` now and then while this thread waits long in a library, inside this context.

    A signal handler may wait inside another wait, as one does that saves a checkpoint.
    """
    if not _lookout:
        _lookout.append(threading.Thread(target=_look_out, name="deepspeed lookout", daemon=True))
        _lookout[0].start()
    own, noting = threading.get_ident(), Noting(wait)

    def note_and_look() -> None:
        noting.note()
        look()

    outer = _looks.get(own)
    _looks[own] = time.monotonic(), note_and_look
    try:
        yield
    finally:
        if outer is None:
            del _looks[own]
        else:
            _looks[own] = outer
        noting.end()


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
