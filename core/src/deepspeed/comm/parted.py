"""Detect ranks that wait for each other in different calls, while they wait, and raise on all of them.

Suppose one rank calls `save_checkpoint` under `if rank == 0:`, and another rank continues with a step. Neither can
finish: the first waits for the second in the job's store (`values.py`), the second for the first in a collective. A
rank that waits in the store notes there, after one second, its call and the numbers of collectives and messages that
it has started. A rank that waits elsewhere reads these notes after two seconds. If a peer has not started the awaited
collective, and waits in a call that this rank has not made, the peer will never start that collective. So nothing is
guessed from elapsed time. The rank that finds this ends the peer's call, in one operation of the store; both raise
`RanksParted`.

A rank that waits in a collective or a message notes that, too, when it looks. So two ranks that wait in collectives of
different groups, such as the groups of two engines, find each other. The rank that finds the other raises, and the
other rank raises as after any failure.

A rank that does neither is not in these notes. A wait of ten seconds inside a user's call, such as
`GatheredParameters`, logs the missing ranks (`in_call`); steps do not, since ranks may well wait that long there.

In a large group all ranks wait for one slow rank, and all of them look. So a rank first checks whether any rank waits
elsewhere, then reads the notes of a few random ranks; and only a few ranks log who is missing.

A rank that waits in a library cannot look, so `looking` lets a thread look, which then makes the wait raise.
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
#: how long a rank waits before it logs which ranks are missing
WARNING_S = 10.0
#: first character of the end of a call that was ended because ranks parted; other ends are ranks
PARTED = "!"
_NUM_NOTES = "deepspeed/parted/notes"  # number of ranks that wait now; if 0, nobody looks further
#: number of peers whose notes a rank reads per look; also the ranks at either end of a group that log missing ranks
FEW = 8
_lot = random.SystemRandom()  # forked ranks draw different peers
T = TypeVar("T")


class RanksParted(CommError):
    """Ranks wait for each other in different calls. Every one of them raises it."""


class PartedByFailure(RanksParted, PeerFailed):
    """Another rank has failed before, and then entered a call in which it waits for this rank."""


def ranks_parted(text: str) -> RanksParted:
    """Return the error for ranks that wait for each other in different calls; `text` describes the calls.

    If a rank has failed before and this rank has not counted that failure, the error is a `PartedByFailure`.
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
    """`Wait` describes what a rank waits for in a collective or a message."""

    what: object
    """The collective or message, whose text is for error messages and is made only where the wait is long."""
    name: str
    """The name under which the ranks that are to start it count."""
    number: int
    """The number that the ranks have to start under that name before the wait can end."""
    ranks: Sequence[int]
    """The ranks that take part, as the job counts them."""


_counted: WeakSet[Counted] = WeakSet()
#: calls that this rank has ended; a slow peer may not have removed its note yet when this rank waits again
_ended: set[str] = set()


def count(each: Counted) -> None:
    """Include the counts of `each` in the notes of this rank, as long as `each` lives."""
    _counted.add(each)


def count_no_more(each: Counted) -> None:
    """Exclude the counts of `each` from now on, even if other objects still refer to it."""
    _counted.discard(each)


class Note(NamedTuple):
    """`Note` is what a waiting rank puts into the store."""

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
    """Put a note into the store: this rank waits in `call`."""
    note = Note(call, kind, end, ranks, _all_started(), number, is_alone)
    store.set(_key(torch_dist.get_rank()), json.dumps(note))
    store.add(_num_of(kind), 1)
    store.add(_NUM_NOTES, 1)


def take_note_back(store: Store, kind: str) -> None:
    """Clear this rank's note. The key is never deleted: another rank may be about to read it, and would block."""
    store.set(_key(torch_dist.get_rank()), "")
    store.add(_NUM_NOTES, -1)
    store.add(_num_of(kind), -1)


def _all_started() -> dict[str, int]:
    return {name: number for each in list(_counted) for name, number in each.num_started().items()}


def few_of(peers: Sequence[T]) -> Sequence[T]:
    """Return the peers to look at now: a random few of a large group, since all its ranks query the store."""
    return peers if len(peers) <= FEW else _lot.sample(peers, FEW)


def says_who_is_missing(ranks: Sequence[int]) -> bool:
    """Whether this rank logs which of `ranks` are missing, which takes a query for all of them."""
    return len(ranks) <= 2 * FEW or torch_dist.get_rank() in (*ranks[:FEW], *ranks[-FEW:])


def values_in(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those `keys` that the store has, with few queries if it has nearly all of them."""
    if not keys:
        return {}
    if store.check(list(keys)):
        return dict(zip(keys, store.multi_get(list(keys)), strict=True))
    half = len(keys) // 2
    return values_in(store, keys[:half]) | values_in(store, keys[half:]) if half else {}


def find(
    ranks: Sequence[int], waits_in: str, never_comes: Callable[[int, Note], bool], *, kind: str | None = None
) -> RanksParted | None:
    """Return the error for a rank that waits for other `ranks` in a collective or a message; None while they may still
    come. See `parting`."""
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
    """Return the text for `ranks_parted` if a rank that this rank waits for will never come; "" while all may come.

    Args:
        ranks: global ranks.
        waits_in: what this rank waits in, for messages.
        never_comes: takes a rank and its note; whether that rank will never come to what this rank waits in.
        calls: `waits_in` names a call.
        kind: the `Note.kind` of ranks that wait in the same call or collective as this rank.
    """
    own = torch_dist.get_rank()
    with _unless_store_is_gone():
        store = torch_dist.distributed_c10d._get_default_store()
        started = _all_started()
        for rank, note in _few_notes(store, ranks, kind):
            if note.end in _ended or own not in note.ranks or not note.is_alone or not never_comes(rank, note):
                continue
            if calls and not note.end:  # that rank finds this rank's note
                continue
            # a name that this rank does not count belongs to a group that it has left, or not made yet
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
    """Ignore errors of the store: its host rank may have ended, and notes only improve messages."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))


def advice(call: str) -> str:
    """Return advice for a user whose ranks do not all make the call `call`."""
    if " " in call:  # not the name of a function
        return _SAME_ORDER
    named = f"{call} ({_ALSO_BY[call]})" if call in _ALSO_BY else call
    return (
        f"Every rank must call {named} at the same point of the program: not only one of them, under `if rank == 0:`. "
        "Nor may another call part them, such as a step, or generate() and a forward of ZeRO-3, on some ranks only."
    )


#: calls that a user's program makes only through another call, and that other call
_ALSO_BY = {"zero.Init": "transformers' from_pretrained() does, at stage 3"}
_SAME_ORDER = "All ranks make the same calls in the same order, also where these have collectives of different groups."


def _few_notes(store: Store, ranks: Sequence[int], kind: str | None) -> Iterator[tuple[int, Note]]:
    """Yield the notes of a few of `ranks`, or nothing if every waiting rank waits in `kind`."""
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
    """The `in_call` names that are active in a thread, the outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


_calls = _Calls()


@contextmanager
def in_call(name: str) -> Iterator[None]:
    """Attribute long waits of collectives in this context to the call `name`; nested calls use the outermost name."""
    _calls.names.append(name)
    try:
        yield
    finally:
        _calls.names.pop()


class Noting:
    """One wait for a collective or a message. A long wait puts a note into the store.

    Once a thread other than the main one has waited, that thread may start what peers wait for. From then on notes
    only show which ranks are present, and only the main thread or a thread inside `in_call` puts them.

    Args:
        wait: describes the wait.
        began_s: the time of `time.monotonic()` when the wait began; None: now.
    """

    _lock = threading.Lock()
    _noted: "Noting | None" = None
    _threads_wait = False

    def __init__(self, wait: Wait, began_s: float | None = None) -> None:
        self._wait, self._is_over, self._has_warned = wait, False, False
        self._began_s = time.monotonic() if began_s is None else began_s
        self._call = _calls.names[0] if _calls.names else ""
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            self.thread_waits()

    @classmethod
    def thread_waits(cls) -> None:
        """Note that a thread other than the main one waits, for however short a time."""
        cls._threads_wait = True

    def note(self) -> None:
        """Put the note, and log missing ranks after `WARNING_S`. Any thread may call it, even just after the wait."""
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
        """End the wait, and clear its note."""
        self._is_over = True
        with self._lock:
            if Noting._noted is self:
                Noting._noted = None
                with _unless_store_is_gone():
                    take_note_back(torch_dist.distributed_c10d._get_default_store(), self._wait.name)


#: by thread id, the time when the thread began to wait in a library, and its function that looks
_looks: dict[int, tuple[float, Callable[[], None]]] = {}
_lookout: list[threading.Thread] = []


@contextmanager
def looking(wait: Wait, look: Callable[[], None]) -> Iterator[None]:
    """Let another thread call `look` now and then while this thread waits long in a library inside this context.

    Waits may nest: a signal handler that saves a checkpoint may wait inside another wait.
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
            except RuntimeError as error:  # the store of the job is gone; keep looking after other waits
                logger.debug("a wait was not looked after: %s", first_line(error))
