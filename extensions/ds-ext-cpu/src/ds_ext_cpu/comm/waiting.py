"""`wait_until` waits for peers: it reads their boards, and advances all collectives that peers may wait for.

Used by `direct.py` (collectives) and `direct_messages.py` (messages between two ranks).

[Note: threads] A wait advances the queues of all groups, in whatever thread it runs: autograd may run hooks in its own
thread. One lock guards all queues. A thread holds it for one look at the boards, never while it pauses, so a thread
that waits for peers does not prevent another thread from issuing what those peers wait for. A failure in the queue of
another group is raised to the callers of that group, not to the thread that found it.
"""

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from deepspeed.comm import parted
from deepspeed.errors import CommError, stated

#: number of looks at the boards before a wait pauses; pauses grow with the time waited, between a minimum and a maximum
_NUM_LOOKS = 50
_PAUSE_SHARE = 0.005
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
#: environment variable for another share; if set, the wait pauses after the first look
_VARIABLE = "DS_COMM_PAUSE"


class Queue(Protocol):
    """The collectives or messages of one group that are in flight."""

    def go_on(self) -> None:
        """Advance without waiting. A failure is kept for the callers of this queue."""


#: queues in use; a wait in one group advances all of them
queues: "weakref.WeakSet[Queue]" = weakref.WeakSet()
#: guards all queues, their `Peer` objects and their staging buffers: [Note: threads]
lock = threading.RLock()


def wait_until(
    queue: Queue,
    is_over: Callable[[], bool],
    timeout_s: float,
    late: Callable[[], CommError],
    never: Callable[[], CommError | None],
    wait: parted.Wait,
) -> None:
    """Advance all queues until `is_over()`, which advances `queue`, is True.

    Args:
        wait: a note for peers, which a long wait puts into the store.

    Raises:
        CommError: the error of `is_over`, the error from `late` after `timeout_s` seconds, or the error from `never` in
            a long wait, if peers will not come (`deepspeed.comm.parted`).
    """
    if threading.current_thread() is not threading.main_thread():
        parted.Noting.thread_waits()
    num_looks, share = pauses()
    start_s = time.monotonic()
    looked_s = start_s + parted.FIRST_LOOK_S / 2
    noting: parted.Noting | None = None  # few waits are long enough for a note
    try:
        for look in itertools.count():
            with lock:
                if is_over():
                    return
                for other in list(queues):
                    if other is not queue:
                        other.go_on()
            if look < num_looks:
                continue
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                with lock:
                    raise late()
            if start_s + waited_s > looked_s + parted.FIRST_LOOK_S / 2:
                looked_s = start_s + waited_s
                if noting is None:
                    noting = parted.Noting(wait, start_s)
                noting.note()
                if (error := never()) is not None:
                    raise error
            time.sleep(min(max(waited_s * share, _MIN_PAUSE_S), _MAX_PAUSE_S))
    finally:
        if noting is not None:
            noting.end()


def pauses() -> tuple[int, float]:
    """Return the number of looks before the first pause, and the length of a pause as a share of the time waited.

    `boards.meet` also calls this, so an error is raised before peers wait.

    Raises:
        CommError: `DS_COMM_PAUSE` is not a number from 0 to 1.
    """
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return _NUM_LOOKS, _PAUSE_SHARE
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise CommError(
            f"{stated(_VARIABLE)}: a number from 0 to 1 is expected, the share of a wait by which a rank may be late"
        )
    return 0, share
