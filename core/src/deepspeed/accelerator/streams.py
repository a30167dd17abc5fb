"""StreamMixin: queues of work on the device, marks in them, and recorded graphs of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed.accelerator.device import TorchModule
from deepspeed.errors import StateError


class StreamMixin(TorchModule):
    """Streams, events and graphs. On a synchronized device they exist and do nothing."""

    # ----- streams and events ----------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class: `get_accelerator().Stream()` makes one on the current device."""
        return self._attribute("Stream")

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is queued on `stream`; `None` leaves the current one.

        Default: `torch.xyz.stream`, else the stream itself, which then is a context as `torch.Stream` is.
        """
        if stream is None:
            return nullcontext()
        if not self._has("stream") and hasattr(stream, "__enter__"):
            own_context: AbstractContextManager[Any] = stream
            return own_context
        context: AbstractContextManager[Any] = self._ask("stream", stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on now, of `device_index` or the current device."""
        return self._ask("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on when nothing else was said."""
        return self._ask("default_stream", device_index)

    @property
    def Event(self) -> Any:
        """The event class, made with `enable_timing=True` where `elapsed_time` (milliseconds) is wanted."""
        return self._attribute("Event")

    def is_current_stream_capturing(self) -> bool:
        """True while the current stream is recorded into a graph. Default: what torch says, where it can say it."""
        return bool(self._ask("is_current_stream_capturing")) if self._has("is_current_stream_capturing") else False

    # ----- graphs ----------------------------------------------------------------------------------------------------

    def is_graph_supported(self) -> bool:
        """True when work can be recorded and replayed, as inference may do. Default: `create_graph` makes one."""
        return self.create_graph() is not None

    def create_graph(self) -> Any:
        """An empty graph to capture into, or None when this device records no graphs: then run eagerly.

        torch calls the class after the device, in capitals: `torch.xyz.XYZGraph`.
        """
        graph_class = getattr(self._module(), f"{self._name.upper()}Graph", None)
        return graph_class() if graph_class is not None else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context that records work into `graph`; with `graph=None` the work simply runs.

        Args:
            graph: from `create_graph`.
            pool: memory pool shared with another graph, in the device's own terms.
            stream: the stream to capture on; default: one of torch's own.
        """
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._ask("graph", graph, pool=pool, stream=stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Run the recorded work again, on the same memory.

        With `graph=None`, from a device whose `create_graph` returns None, nothing happens: `capture_to_graph(None)`
        recorded nothing.

        Raises:
            StateError: `graph` is None, and this device records graphs.
        """
        if graph is not None:
            graph.replay()
        elif self.is_graph_supported():
            raise StateError(
                f"replay_graph got None, and {self._name!r} records graphs; pass the graph that create_graph() gave"
            )
