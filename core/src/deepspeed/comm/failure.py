"""Record the first failure in a group in the job's store, so that a rank that fails later can name the cause.

Used by `watch.py` and `direct.py` of ds-ext-cpu; `give_up.py` leaves all groups of a rank. Ranks that meet
to make a group have no record for it yet, so `tell` also stores each failure of the job under its number.

[Note: a rank that leaves] A rank that fails does not block: its exception must reach the user although its peers may be
in another collective. The rank records the exception in the store, signals its peers through its transport, and keeps
the buffers of its collectives alive, since peers may still read them and the library may still write them.

[Note: a rank that has ended] A rank that waits in the job's store for an ended rank raises and names the ended rank. A
rank notes its own end as the interpreter exits. The `deepspeed` launcher (`launcher/node_agent.py`) notes the end of
each process that it started, so it also notes a process that was killed. Noting does not block. Where ranks wait in a
library, or read each other's memory, a connection or a process is gone, and the notes name the rank that ended.

[Note: interrupts] The handler of a signal such as Ctrl-C may raise between any two instructions of a call that ranks
make together, also between two collectives that the peers expect. The peers would wait in the second collective, and
the library would match it with a later call of this rank. So during such a call signals are held. They are handled
where an exception reaches the peers (`let_through`), or at the end of the call.

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

#: number of records made in this process, by group name; ranks make them in the same order, so keys contain it
_num_records: Counter[str] = Counter()


class PeerFailed(CommError):
    """A rank cannot continue because another rank failed. This is a consequence and is never recorded as a cause.

    Args:
        message: the text for the user.
        cause: the rank that failed first and why, if known. This rank records `cause` in each group that it leaves,
            since the rank that failed first may not be a member of that group.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


def handled_errors() -> Iterator[BaseException]:
    """Yield the exception that is being handled, then the chain of its causes and contexts."""
    error, seen = sys.exc_info()[1], set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def handled_consequence() -> PeerFailed | None:
    """Return the first `PeerFailed` in the chain of the exception that is being handled, or None."""
    return next((error for error in handled_errors() if isinstance(error, PeerFailed)), None)


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if error else "an exception that was caught"


def _sentence(reason: str) -> str:
    return f"rank {torch_dist.get_rank()} failed with {reason}"


num_told = 0  #: number of failures after which this rank has left its groups
_logged = (0, "")  # `num_told` and the cause at the last log line


def tell() -> None:
    """Count and store a failure for which this rank leaves its groups; called while the exception is handled. A
    `PeerFailed` is counted but not stored: otherwise ranks would react to each other forever."""
    go_to(num_told + 1)
    if handled_consequence() is None:
        cause = _sentence(_reason(sys.exc_info()[1]))
        _ask(lambda store: store.compare_set(_told(num_told), "", cause))


def _is_new(cause: str) -> bool:
    """Whether `cause` has not been logged for this failure yet: a rank leaves several groups for one failure."""
    global _logged
    former, _logged = _logged, (num_told, cause)
    return former != _logged


def go_to(number: int) -> None:
    """Set this rank's count of failures, to match the count of other ranks."""
    global num_told
    num_told = number


def unheard() -> PeerFailed | None:
    """Return the error for a failure in the store that this rank has not counted yet; None if there is none.

    Ranks call it while they wait for another rank, which may have left its groups because of that failure.
    """
    key = _told(num_told + 1)
    cause = _ask(lambda store: store.get(key) if store.check([key]) else b"")
    return _consequence(cause) if cause else None


def note_broken(name: str, text: str) -> None:
    """Note that the states of `name` differ in step between ranks. `name` is equal on all ranks; `text` says why."""
    text = f"rank {torch_dist.get_rank()}: {text}" if torch_dist.is_initialized() else text
    _ask(lambda store: store.compare_set(_broken(name), "", text))


def broken(name: str) -> str:
    """Return the first text that `note_broken` stored for `name`; "" if no rank has stored one."""
    return _ask(lambda store: store.get(_broken(name)) if store.check([_broken(name)]) else b"")


def _broken(name: str) -> str:
    return f"deepspeed/broken/{name}"


def _told(number: int) -> str:
    return f"deepspeed/told/{number}"


def _consequence(cause: str) -> PeerFailed:
    return PeerFailed(f"rank {torch_dist.get_rank()} cannot go on: {cause}", cause)


def _ask(question: Callable[[Store], bytes]) -> str:
    """Query the job's store; return "" if the process that hosts the store is gone."""
    try:
        return question(torch_dist.distributed_c10d._get_default_store()).decode(errors="replace")
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))
        return ""


class FailureRecord:
    """`FailureRecord` stores, per epoch, which rank failed first in `group`, and why.

    [Note: one epoch per failed step] A rank that continues after a failure begins the next epoch, whether the rank
    itself or a peer failed, and however often the peer has failed meanwhile. So if a peer fails in two steps in a row,
    this rank also raises in two steps, and ranks that are in the same epoch are in the same step.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # group.group_name raises for a group that a plugin wrote in Python
        name = torch_dist.distributed_c10d._get_process_group_name(group)
        #: equal on all ranks of the group
        self.name = f"deepspeed/failure/{name}/{_num_records[name]}"
        _num_records[name] += 1

    def record(self, epoch: int) -> None:
        """Record the exception that is being handled. If a peer failed first, log the peer's failure as the cause."""
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
        elif not first.endswith(f" {reason}"):  # else all ranks fail with the same error
            logger.error("%s; after that, and by itself, this rank failed with %s", first, reason)

    def claim(self, epoch: int, error: BaseException) -> None:
        """Record an exception that this rank is about to raise, or its cause if it is a `PeerFailed`."""
        cause = error.cause if isinstance(error, PeerFailed) else ""
        self._claim(epoch, cause or _sentence(_reason(error)))

    def _claim(self, epoch: int, cause: str) -> str:
        """Record `cause` unless the epoch already has a cause. Returns the recorded cause."""
        return _ask(lambda store: store.compare_set(f"{self.name}/{epoch}", "", cause))

    def refusal(self, epoch: int, *, has_met: bool) -> PeerFailed | None:
        """Return the error for a rank that waits for its peers to reach this epoch; None while they may still come.

        Args:
            has_met: the ranks have been in an earlier epoch together, so each of them has the record.
        """
        cause = self.first(epoch)
        if cause:
            return _consequence(cause)
        return None if has_met else unheard()

    def first(self, epoch: int) -> str:
        """Describe the first failure of this epoch; "" if none is recorded."""
        key = f"{self.name}/{epoch}"
        return _ask(lambda store: store.get(key) if store.check([key]) else b"")

    def note(self, key: str, text: str) -> None:
        """Put a text into the store; other ranks read it with `noted`."""

        def put(store: Store) -> bytes:
            store.set(f"{self.name}/{key}", text)
            return b""

        _ask(put)

    def noted(self, key: str, wait_s: float) -> str:
        """Return the text that another rank has stored under `key`, waiting up to `wait_s` seconds; "" if none."""
        key = f"{self.name}/{key}"
        if wait_s == 0.0:
            return _ask(lambda store: store.get(key) if store.check([key]) else b"")
        return _ask(lambda store: store.wait([key], timedelta(seconds=wait_s)) or store.get(key))


#: world groups for which this process notes its end as the interpreter exits
_worlds: WeakSet[ProcessGroup] = WeakSet()


def note_end(store: Store, rank: int) -> None:
    """Note that a rank has ended. The rank itself or the launcher calls it; noting a rank twice is harmless."""
    try:
        _base(store).append(_key(), f"{rank} ")  # type: ignore[attr-defined]  # torch's stub lacks it
    except (RuntimeError, ValueError) as error:  # the store is gone with the process that hosted it
        logger.debug("the end of rank %d cannot be noted: %s", rank, first_line(error))


def note_own_end_at_exit() -> None:
    """Register an exit handler that notes this rank's end. Called after the world group is made; idempotent."""
    world = torch_dist.group.WORLD
    if world is None or world in _worlds:
        return
    _worlds.add(world)
    store, rank, process = torch_dist.distributed_c10d._get_default_store(), torch_dist.get_rank(), os.getpid()

    def note() -> None:
        if os.getpid() == process:  # else a forked child ends
            note_end(store, rank)

    atexit.register(note)


def ended_of(ranks: Iterable[int]) -> list[int]:
    """Return the ended ranks among the global ranks `ranks`."""
    ended = _ended()
    return [rank for rank in ranks if rank in ended]


def ended_clause(group: ProcessGroup) -> str:
    """Return "rank 1 has ended" for messages; "" if no rank of `group` has ended."""
    return clause_of(ended_of(torch_dist.get_process_group_ranks(group)))


def clause_of(ranks: Iterable[int]) -> str:
    """Return "rank 1 has ended" or "rank 1, 2 have ended"; "" for no ranks."""
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
    """Return the store's key for ended ranks. Ranks that torchrun restarts share the store, so each restart has one."""
    return f"deepspeed/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _base(store: Store) -> Store:
    """Return the store without the key prefixes of torch and its agents, as the launcher sees it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# A signal that arrives this long after a held signal is handled at once: the user insists. Launchers and terminals may
# send the same signal twice, a moment apart.
_INSISTENCE_S = 2.0

_former: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the program's handlers, while signals are held
_noted: list[tuple[int, float]] = []  # held signals and when each arrived
_is_open = False  # inside `let_through`


@contextmanager
def held() -> Iterator[None]:
    """Hold signals that have a Python handler; handle them when the outermost context ends.

    Does nothing outside the main thread, since only the main thread handles signals.
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
    """Inside `held`, handle signals in this context, including signals that arrived before it."""
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
    """Whether a signal is held. False outside the main thread."""
    return bool(_noted) and threading.current_thread() is threading.main_thread()


def handle_held() -> None:
    """Handle the held signals. Raises what their handlers raise."""
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
        if callable(handler):  # else no Python function handles the signal
            _former[number] = handler
            signal.signal(number, _note)


def _uninstall() -> None:
    for number, handler in list(_former.items()):
        if signal.getsignal(number) is _note:  # else the program has set another handler meanwhile
            signal.signal(number, handler)
    _former.clear()


def _note(number: int, frame: FrameType | None) -> None:
    insists = any(time.monotonic() - since_s > _INSISTENCE_S for _, since_s in _noted)
    if not (_is_open or insists):
        _noted.append((number, time.monotonic()))
        return
    _noted.clear()
    _former[number](number, frame)
