"""The queue of Metal work and marks in it, in the shape of other devices' streams and events.

`torch.mps` has one queue and no class for it. All streams are that queue, so that none waits for another.
"""

from typing import Any

import torch
from deepspeed.accelerator.plain import HostStream


class MPSEvent(torch.mps.Event):
    """A mark in the queue; takes the stream that other devices' events take."""

    def record(self, stream: Any = None) -> None:
        super().record()

    def wait(self, stream: Any = None) -> None:
        super().wait()


class MPSQueue(HostStream):
    """The queue, under the name of a stream; `wait_stream` and `wait_event` have nothing to do."""

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def query(self) -> bool:
        return bool(self.record_event().query())

    def record_event(self, event: Any = None) -> Any:
        event = event or MPSEvent()
        event.record()
        return event
