"""Copies between the device and the host, in a queue of their own beside the computation.

Made by `HostPlacement` and `HostShards`. On a synchronized device there is no queue: a copy is done when its call
returns, and marks have nothing to wait for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import DeepSpeedAccelerator


class Mark:
    """A place in the lane's queue."""

    __slots__ = ("_accelerator", "_event", "_orders")

    def __init__(self, accelerator: DeepSpeedAccelerator, event: Any, orders: bool) -> None:
        self._accelerator = accelerator
        self._event = event
        self._orders = orders

    def wait(self) -> None:
        """What is queued on the current stream from now on comes after the mark. The host does not wait."""
        if self._orders:
            self._accelerator.current_stream().wait_event(self._event)

    def poll(self) -> bool:
        """Whether everything before the mark is done."""
        return self._event is None or bool(self._event.query())

    def wait_on_host(self) -> None:
        """Return when everything before the mark is done."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """One stream for copies.

    Args:
        accelerator: the one whose memory is copied from and to. Where it `resolves_data_dependency` the device itself
            orders uses of a tensor, and only the host waits for marks.
    """

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        self._accelerator = accelerator
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._orders = self._stream is not None and not accelerator.resolves_data_dependency()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, work is queued on the lane, after all that the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        if self._orders:
            self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """A mark after all that the lane has been given so far."""
        if self._stream is None:
            return Mark(self._accelerator, None, False)
        event = self._accelerator.Event()
        event.record(self._stream)
        return Mark(self._accelerator, event, self._orders)
