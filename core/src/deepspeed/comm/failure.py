"""The first failure in a group, kept in the job's store, so that a rank which fails after it can name the cause.

Used by `watch.py`, `issued.py` and `direct.py` of ds-ext-cpu; `give_up.py` tells all groups of a rank. Ranks that meet
to make a group have no record of it yet; so a failure is told there, too, by its number (`tell`).

[Note: a rank that leaves] A rank that fails waits for nobody: its exception must reach the user while the peers may be
in a collective of their own. It records the exception in the store, lets its peers know in the way of its transport,
and keeps the buffers of its collectives alive, since peers may still read them and the library may still write them.

[Note: a rank that has ended] A rank that waits for one of them in the job's store raises, and says so. A rank notes its
own end as the interpreter exits, and the `deepspeed` launcher notes the end of each process that it started
(`launcher/node_agent.py`), which also sees one that ends without Python. Nobody waits here. Where ranks wait in a
library, or read each other's memory, a connection or the process itself is gone, and the notes say whose.

[Note: interrupts] A signal may raise, such as Ctrl-C, while ranks make a call together: between any two instructions,
also between two collectives that the peers expect. They would wait, and a later call of this rank would be matched with
what they wait for. So during such a call signals are held, and handled where an exception reaches the peers
(`let_through`), or at the end of the call.

    with held():                    # checkpointer.py, values.py
        with let_through():
            result = step()         # KeyboardInterrupt here, as always
        gather(...)                 # held
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch.distributed as torch_dist
from torch.distributed import PrefixStore, ProcessGroup, Store

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


num_told = 0  #: failures after which this rank has left its groups
_logged = (0, "")  # after how many, and what was logged last


def tell() -> None:
    """This rank leaves its groups; called while the exception is handled. A consequence is not told again: ranks would
    hear of each other without end."""
    go_to(num_told + 1)
    if handled_consequence() is None:
        cause = _sentence(_reason(sys.exc_info()[1]))
        _ask(lambda store: store.compare_set(_told(num_told), "", cause))


def _is_new(cause: str) -> bool:
    """Whether this is the first group that this rank leaves because of `cause`, since it failed last."""
    global _logged
    former, _logged = _logged, (num_told, cause)
    return former != _logged


def go_to(number: int) -> None:
    """This rank counts so many failures now, as others do."""
    global num_told
    num_told = number


def unheard() -> PeerFailed | None:
    """Return the error for a rank that waits for another one, after a failure that this rank has not heard of.

    The other rank may have left because of that failure. Return None if no such failure is noted.
    """
    key = _told(num_told + 1)
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
        #: the same on all ranks of the group
        self.name = f"deepspeed/failure/{name}/{_num_records[name]}"
        _num_records[name] += 1

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
        return _ask(lambda store: store.compare_set(f"{self.name}/{epoch}", "", cause))

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
        key = f"{self.name}/{epoch}"
        return _ask(lambda store: store.get(key) if store.check([key]) else b"")

    def note(self, key: str, text: str) -> None:
        """Put a text into the store, for `noted` on other ranks."""

        def put(store: Store) -> bytes:
            store.set(f"{self.name}/{key}", text)
            return b""

        _ask(put)

    def noted(self, key: str, wait_s: float) -> str:
        """Return the text that another rank put under `key`, or puts there within `wait_s` seconds; "" otherwise."""
        key = f"{self.name}/{key}"
        if wait_s == 0.0:
            return _ask(lambda store: store.get(key) if store.check([key]) else b"")
        return _ask(lambda store: store.wait([key], timedelta(seconds=wait_s)) or store.get(key))


#: whose end is noted as the interpreter exits
_worlds: WeakSet[ProcessGroup] = WeakSet()


def note_end(store: Store, rank: int) -> None:
    """Note that a rank has ended. Called by itself or by the launcher; a second note of it does no harm."""
    try:
        _base(store).append(_key(), f"{rank} ")  # type: ignore[attr-defined]  # torch's stub lacks it
    except (RuntimeError, ValueError) as error:  # the store is gone: who had it was to end last
        logger.debug("the end of rank %d cannot be noted: %s", rank, first_line(error))


def note_own_end_at_exit() -> None:
    """Called when the world group was made, here or by the script. Once is enough."""
    world = torch_dist.group.WORLD
    if world is None or world in _worlds:
        return
    _worlds.add(world)
    store, rank, process = torch_dist.distributed_c10d._get_default_store(), torch_dist.get_rank(), os.getpid()

    def note() -> None:
        if os.getpid() == process:  # else a fork ends
            note_end(store, rank)

    atexit.register(note)


def ended_of(ranks: Iterable[int]) -> list[int]:
    """Return those of `ranks` that have ended, as the job counts them."""
    ended = _ended()
    return [rank for rank in ranks if rank in ended]


def ended_clause(group: ProcessGroup) -> str:
    """ "rank 1 has ended", for messages; empty where no rank of `group` has."""
    return clause_of(ended_of(torch_dist.get_process_group_ranks(group)))


def clause_of(ranks: Iterable[int]) -> str:
    """ "rank 1 has ended", or "rank 1, 2 have ended"; empty for none."""
    named = list(ranks)
    verb = "has" if len(named) == 1 else "have"
    return f"rank {', '.join(map(str, named))} {verb} ended" if named else ""


def _ended() -> frozenset[int]:
    try:
        store = _base(torch_dist.distributed_c10d._get_default_store())
        noted = store.get(_key()).decode() if store.check([_key()]) else ""
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))
        return frozenset()
    return frozenset(map(int, noted.split()))


def _key() -> str:
    """Ranks that torchrun starts again have the same store."""
    return f"deepspeed/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _base(store: Store) -> Store:
    """The store that the launcher has, too: torch and its agents put prefixes before the keys of a world."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# A signal that comes so long after one that is held is handled at once: the user insists. Launchers and terminals send
# the same signal, a moment apart.
_INSISTENCE_S = 2.0

_former: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the program's handlers, while signals are held
_noted: list[tuple[int, float]] = []  # signals that are held, and since when
_is_open = False  # inside `let_through`


@contextmanager
def held() -> Iterator[None]:
    """Inside, signals with a handler of Python's wait; when the outermost context ends they are handled.

    In other threads than the main one, which alone handles signals, nothing happens.
    """
    global _is_open
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_outermost, was_open = not _former, _is_open
    if is_outermost:
        _install()
    _is_open = False
    try:
        yield
    finally:
        _is_open = was_open
        if is_outermost:
            _uninstall()
        if is_outermost or was_open:
            handle_held()


@contextmanager
def let_through() -> Iterator[None]:
    """Inside `held`: signals are handled here, also those that came before."""
    global _is_open
    if not _former or threading.current_thread() is not threading.main_thread():
        yield
        return
    was_open, _is_open = _is_open, True
    try:
        handle_held()
        yield
    finally:
        _is_open = was_open


def any_held() -> bool:
    """Whether a signal waits."""
    return bool(_noted) and threading.current_thread() is threading.main_thread()


def handle_held() -> None:
    """Handle the signals that wait; raises what their handlers do."""
    while any_held():
        number, _ = _noted.pop(0)
        handler = _former.get(number)
        if handler is None:
            signal.raise_signal(number)
        else:
            handler(number, None)


def _install() -> None:
    for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
        handler = signal.getsignal(number)
        if callable(handler):  # else the signal is not Python's
            _former[number] = handler
            signal.signal(number, _note)


def _uninstall() -> None:
    for number, handler in list(_former.items()):
        if signal.getsignal(number) is _note:  # else the program has set another one meanwhile
            signal.signal(number, handler)
    _former.clear()


def _note(number: int, frame: FrameType | None) -> None:
    insists = any(time.monotonic() - since_s > _INSISTENCE_S for _, since_s in _noted)
    if not (_is_open or insists):
        _noted.append((number, time.monotonic()))
        return
    _noted.clear()
    _former[number](number, frame)
