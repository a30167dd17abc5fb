"""Signals that raise, such as Ctrl-C, while ranks make a call together.

An exception that a signal handler raises may come between any two instructions, also between two collectives that the
peers expect: they would wait, and a later call of this rank would be matched with what they wait for. So during such a
call signals are held, and handled where an exception reaches the peers (`let_through`), or at the end of the call.

    with held():                    # agreement.py, arrivals.py
        with let_through():
            result = step()         # KeyboardInterrupt here, as always
        gather(...)                 # held
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
