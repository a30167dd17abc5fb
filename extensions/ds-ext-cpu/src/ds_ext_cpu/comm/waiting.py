"""How a rank waits for its peers: it looks at their boards, and goes on with everything that others may wait for.

Used by `direct.py` (collectives) and `direct_messages.py` (messages between two ranks).

[Note: threads] A wait advances the queues of all groups, in whatever thread it runs: autograd may run hooks in a thread
of its own. One lock serves all queues. It is held for one look at the boards, never while a thread pauses: a thread
that waits for peers does not keep another one from issuing what those peers wait for. A failure in the queue of another
group is raised to the callers of that group, not to the thread that saw it.
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

#: looks at the boards before a wait gives the processor away; the pauses then grow with the time waited, to a limit
_NUM_LOOKS = 50
_PAUSE_SHARE = 0.005
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
#: gives another share, and then the first look is followed by a pause
_VARIABLE = "DS_COMM_PAUSE"


class Queue(Protocol):
    """What one group has in flight."""

    def go_on(self) -> None:
        """Do what can be done without waiting; what fails is kept for the callers of this queue."""


#: queues in use; a wait in one group goes on with all
queues: "weakref.WeakSet[Queue]" = weakref.WeakSet()
#: guards all queues, what they know of their peers, and their staging: [Note: threads]
lock = threading.RLock()


def wait_until(
    queue: Queue,
    is_over: Callable[[], bool],
    timeout_s: float,
    late: Callable[[], CommError],
    never: Callable[[], CommError | None],
    wait: parted.Wait,
) -> None:
    """Go on with all queues until `is_over`, which advances `queue`.

    Args:
        wait: for peers to see, in a long one.

    Raises:
        CommError: what `is_over` raises, or `late` gives after `timeout_s` seconds, or `never` in a long wait: peers
            will not come (`deepspeed.comm.parted`).
    """
    noting = parted.Noting(wait)
    try:
        _wait_until(queue, is_over, timeout_s, late, never, noting)
    finally:
        noting.end()


def _wait_until(
    queue: Queue,
    is_over: Callable[[], bool],
    timeout_s: float,
    late: Callable[[], CommError],
    never: Callable[[], CommError | None],
    noting: parted.Noting,
) -> None:
    num_looks, share = pauses()
    start_s = time.monotonic()
    looked_s = start_s + parted.FIRST_LOOK_S / 2
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
            noting.note()
            if (error := never()) is not None:
                raise error
        time.sleep(min(max(waited_s * share, _MIN_PAUSE_S), _MAX_PAUSE_S))


def pauses() -> tuple[int, float]:
    """Return the looks before the first pause, and the share of the time waited that a pause takes.

    `boards.meet` calls it too, so that an error comes before peers wait.

    Raises:
        CommError: `DS_COMM_PAUSE` is no number from 0 to 1.
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
