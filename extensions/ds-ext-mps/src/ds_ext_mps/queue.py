"""The queue of Metal work as a stream, and its events, with the interface of other devices' streams and events.

`torch.mps` has one queue and no class for it. All streams are this queue, so no stream waits for another.
"""

from typing import Any

import torch
from deepspeed.accelerator.plain import HostStream


class MPSEvent(torch.mps.Event):
    """An event in the queue. `record` and `wait` accept a stream, as other devices' events do, and ignore it."""

    def record(self, stream: Any = None) -> None:
        super().record()

    def wait(self, stream: Any = None) -> None:
        super().wait()


class MPSQueue(HostStream):
    """The queue with the interface of a stream; `wait_stream` and `wait_event` do nothing."""

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def query(self) -> bool:
        return bool(self.record_event().query())

    def record_event(self, event: Any = None) -> Any:
        event = event or MPSEvent()
        event.record()
        return event
