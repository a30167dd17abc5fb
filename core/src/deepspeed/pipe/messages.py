"""The messages of one stage: an inbox for activations, one for gradients, and what is being sent.

Where the library moves messages while the host computes, the next receive is posted as soon as the one before it has
come, so that it arrives during the computation. Where streams do both, receives are posted where the schedule has them,
which is then one in the order of messages (`timeline.py`): other stages wait for it.

What is sent is a value, a tensor or a tuple of tensors, and a header that describes it. A header is an int64 tensor of
`HEADER_NUMEL`: whether the value is a tuple, the number of tensors, and for each tensor dtype, whether it requires a
gradient, number of dimensions, dimensions.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.backend import Work, host_or_device
from deepspeed.comm.point_to_point import PointToPoint
from deepspeed.errors import ConfigError, counted

HEADER_NUMEL = 256

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class TensorSpec:
    """A `TensorSpec` describes a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a tensor of this spec, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ValueSpec:
    """A `ValueSpec` describes a tensor, or a tuple of tensors, without values."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @property
    def gradients(self) -> "ValueSpec":
        """The spec that the gradients have: a tuple of the tensors that require a gradient."""
        return ValueSpec(tuple(tensor for tensor in self.tensors if tensor.needs_grad), is_tuple=True)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value that a layer takes: `tensors` as a tuple, or the only one of them."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def header(self) -> Tensor:
        """Return the header on the host; ConfigError if there is no room for all shapes."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for tensor in self.tensors:
            numbers += [_DTYPES.index(tensor.dtype), int(tensor.needs_grad), len(tensor.shape), *tensor.shape]
        if len(numbers) > HEADER_NUMEL:
            raise ConfigError(
                f"PipelineModule: a stage sends {counted(len(self.tensors), 'tensor')}, whose shapes are "
                f"{counted(len(numbers), 'number')}; there is room for {HEADER_NUMEL}, so concatenate some of them"
            )
        header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device="cpu")
        header[: len(numbers)] = torch.tensor(numbers)
        return header

    def __str__(self) -> str:
        shown = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in self.tensors]
        return f"({', '.join(shown)})" if self.is_tuple else shown[0]


def read_header(header: Tensor) -> ValueSpec:
    """Return the spec from which `ValueSpec.header` made the header."""
    numbers = iter(header.tolist())
    is_tuple, num_tensors = bool(next(numbers)), next(numbers)
    tensors = []
    for _ in range(num_tensors):
        dtype, needs_grad, num_dims = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        tensors.append(TensorSpec(tuple(next(numbers) for _ in range(num_dims)), dtype, needs_grad))
    return ValueSpec(tuple(tensors), is_tuple)


def spec_of(value: Any, where: str) -> ValueSpec:
    """The spec of what a stage is to send.

    Args:
        where: names the stage, for the error.

    Raises:
        ConfigError: it is neither a tensor nor a tuple of tensors.
    """
    tensors = tensors_of(value)
    for each in tensors:
        if not isinstance(each, Tensor) or each.dtype not in _DTYPES:
            raise ConfigError(
                f"PipelineModule: the last layer of {where} returned {_kind(value)}; between stages go a tensor or a "
                "tuple of tensors, so return these"
            )
    specs = (TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
    return ValueSpec(tuple(specs), isinstance(value, tuple))


def tensors_of(value: Any) -> tuple[Any, ...]:
    """The elements of a tuple, or the value alone."""
    return value if isinstance(value, tuple) else (value,)


def _kind(value: Any) -> str:
    return (
        f"a tuple of {', '.join(type(each).__name__ for each in value)}"
        if isinstance(value, tuple)
        else type(value).__name__
    )


_ACTIVATIONS, _GRADIENTS, _HEADERS = 1, 2, 3

Received = tuple[ValueSpec, list[Tensor]]


class _Receiver:
    """Values on their way from a stage, in their order.

    Args:
        peers: the ranks of the pipeline, by stage.
        source: the sender.
        device: where values go.
    """

    def __init__(self, peers: PointToPoint, source: int, device: torch.device, tag: int) -> None:
        self._peers, self._source, self._device, self._tag = peers, source, device, tag
        self._posted: deque[tuple[Received, list[Work]]] = deque()

    @property
    def is_posted(self) -> bool:
        return bool(self._posted)

    def post(self, spec: ValueSpec) -> None:
        tensors = [each.empty(self._device) for each in spec.tensors]
        filled = (tensor for tensor in tensors if tensor.numel())
        works = [self._peers.receive(tensor, self._source, tag=self._tag) for tensor in filled]
        self._posted.append(((spec, tensors), works))

    def wait(self) -> Received:
        received, works = self._posted.popleft()
        for work in works:
            work.wait()
        return received

    def forget(self) -> None:
        self._posted.clear()


class ActivationInbox:
    """The inputs of a stage's parts. The first message for each part has a header, or all have."""

    def __init__(self, peers: PointToPoint, source: int, device: torch.device) -> None:
        self._peers, self._source = peers, source
        self._header_device = host_or_device(peers.group)
        self._receiver = _Receiver(peers, source, device, _ACTIVATIONS)
        self._expected: deque[int] = deque()
        self._known: dict[int, ValueSpec] = {}
        self._all_have_headers = False

    def begin(self, chunks: Sequence[int], *, all_have_headers: bool) -> None:
        """A batch begins.

        Args:
            chunks: the part that each message is for, in order.
            all_have_headers: shapes may change from message to message.
        """
        self._receiver.forget()
        self._expected = deque(chunks)
        self._known = {}
        self._all_have_headers = all_have_headers

    def post(self) -> None:
        """Begin to receive the next message, where that is possible now."""
        if not self._peers.completes_on_host:
            self._post_described()
        elif self._expected and not self._receiver.is_posted:
            if (spec := self._known.get(self._expected[0])) is not None:
                self._expected.popleft()
                self._receiver.post(spec)

    def take(self) -> Received:
        """The next message, when it has come."""
        if not self._receiver.is_posted:
            self._post_described()
        received = self._receiver.wait()
        if self._peers.completes_on_host:
            self.post()
        return received

    def _post_described(self) -> None:
        chunk = self._expected.popleft()
        spec = self._known.get(chunk)
        if spec is None:
            header = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self._header_device)
            self._peers.receive(header, self._source, tag=_HEADERS).wait()
            spec = read_header(header)
            if not self._all_have_headers:
                self._known[chunk] = spec
        self._receiver.post(spec)


class GradientInbox:
    """The gradients of what a stage has sent. They come in the order of the backwards, where the parts of a stage take
    turns otherwise than in the forwards; those of one part come in the order in which its values were sent."""

    def __init__(self, peers: PointToPoint, source: int, device: torch.device) -> None:
        self._peers = peers
        self._receiver = _Receiver(peers, source, device, _GRADIENTS)
        self._order: deque[int] = deque()
        self._expected: defaultdict[int, deque[ValueSpec]] = defaultdict(deque)

    def begin(self, chunks: Sequence[int]) -> None:
        """A batch begins.

        Args:
            chunks: the part whose gradients each message has, in order.
        """
        self._receiver.forget()
        self._order = deque(chunks)
        self._expected.clear()

    def expect(self, chunk: int, spec: ValueSpec) -> None:
        """One more message will come for a part."""
        self._expected[chunk].append(spec)
        if self._peers.completes_on_host:
            self.post()

    def post(self) -> None:
        """Begin to receive the next message, where that is possible now."""
        if not self._peers.completes_on_host or (self._is_next_known() and not self._receiver.is_posted):
            self._receiver.post(self._expected[self._order.popleft()].popleft())

    def take(self) -> list[Tensor]:
        """The next message, when it has come."""
        _, tensors = self._receiver.wait()
        if self._peers.completes_on_host:
            self.post()
        return tensors

    def _is_next_known(self) -> bool:
        return bool(self._order and self._expected[self._order[0]])


class Outbox:
    """An outbox sends tensors to other stages, and keeps each until it has left."""

    def __init__(self, peers: PointToPoint) -> None:
        self._peers = peers
        self._header_device = host_or_device(peers.group)
        self._in_flight: deque[tuple[Tensor, Work]] = deque()

    def send_activations(self, spec: ValueSpec, tensors: Sequence[Tensor], to: int, *, with_header: bool) -> None:
        """Start to send the inputs of the part after this one."""
        if with_header:
            self._send([spec.header().to(self._header_device)], to, _HEADERS)
        self._send([_kept(tensor) for tensor in tensors], to, _ACTIVATIONS)

    def send_gradients(self, tensors: Sequence[Tensor], to: int) -> None:
        """Start to send gradients to the part before this one."""
        self._send(tensors, to, _GRADIENTS)

    def finish(self) -> None:
        """Wait until every tensor has left."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()

    def forget(self) -> None:
        """Drop all tensors, after `give_up` has ended their messages."""
        self._in_flight.clear()

    def _send(self, tensors: Sequence[Tensor], to: int, tag: int) -> None:
        while self._in_flight and self._in_flight[0][1].poll():
            self._in_flight.popleft()[1].wait()
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.detach().contiguous()
                self._in_flight.append((sent, self._peers.send(sent, to, tag=tag)))


def _kept(tensor: Tensor) -> Tensor:
    """Return a tensor that the next micro-batch does not overwrite before the peer has read it: a tensor without
    gradients is copied, as it may be memory that the layer uses for every micro-batch, such as a mask in a buffer."""
    return tensor if tensor.requires_grad else tensor.clone()
