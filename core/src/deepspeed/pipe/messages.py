"""The messages of one stage: an inbox for activations, an inbox for gradients, and an outbox.

If the library moves messages while the host computes, the next receive is posted as soon as the previous message has
arrived, so messages arrive during the computation. If device streams do both, receives are posted where the schedule
has them; the schedule is then in message order (`timeline.py`), since other stages wait for the receive.

A message is a value (a tensor or a tuple of tensors), and a header that describes the value. A header is an int64
tensor of `HEADER_NUMEL` elements: whether the value is a tuple, the number of tensors, and for each tensor its dtype,
whether it requires a gradient, its number of dims, and its shape.
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
    """`TensorSpec` describes a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate an uninitialized tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ValueSpec:
    """`ValueSpec` describes a tensor, or a tuple of tensors, without values."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @property
    def gradients(self) -> "ValueSpec":
        """The spec of the gradients: a tuple of the tensors that require a gradient."""
        return ValueSpec(tuple(tensor for tensor in self.tensors if tensor.needs_grad), is_tuple=True)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value for a layer: `tensors` as a tuple, or the single tensor."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def header(self) -> Tensor:
        """Return the header on the host. Raises ConfigError if the shapes do not fit in it."""
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
    """Return the spec that `ValueSpec.header` encoded in the header."""
    numbers = iter(header.tolist())
    is_tuple, num_tensors = bool(next(numbers)), next(numbers)
    tensors = []
    for _ in range(num_tensors):
        dtype, needs_grad, num_dims = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
        tensors.append(TensorSpec(tuple(next(numbers) for _ in range(num_dims)), dtype, needs_grad))
    return ValueSpec(tuple(tensors), is_tuple)


def spec_of(value: Any, where: str) -> ValueSpec:
    """Return the spec of a value that a stage sends.

    Args:
        where: the name of the stage, for the error.

    Raises:
        ConfigError: `value` is neither a tensor nor a tuple of tensors of supported dtypes.
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
    """Return the elements of a tuple, or a single value as a tuple of one."""
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
    """The posted receives of values from one stage, in order.

    Args:
        peers: the ranks of the pipeline, by stage.
        source: the sending stage.
        device: the device to receive on.
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
    """`ActivationInbox` receives a stage's inputs. The first message for each part, or every message, has a header."""

    def __init__(self, peers: PointToPoint, source: int, device: torch.device) -> None:
        self._peers, self._source = peers, source
        self._header_device = host_or_device(peers.group)
        self._receiver = _Receiver(peers, source, device, _ACTIVATIONS)
        self._expected: deque[int] = deque()
        self._known: dict[int, ValueSpec] = {}
        self._all_have_headers = False

    def begin(self, chunks: Sequence[int], *, all_have_headers: bool) -> None:
        """Begin a batch.

        Args:
            chunks: the part that each message is for, in order.
            all_have_headers: shapes may change between messages, so every message has a header.
        """
        self._receiver.forget()
        self._expected = deque(chunks)
        self._known = {}
        self._all_have_headers = all_have_headers

    def post(self) -> None:
        """Post the receive of the next message if possible now."""
        if not self._peers.completes_on_host:
            self._post_described()
        elif self._expected and not self._receiver.is_posted:
            if (spec := self._known.get(self._expected[0])) is not None:
                self._expected.popleft()
                self._receiver.post(spec)

    def take(self) -> Received:
        """Wait for the next message and return it."""
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
    """`GradientInbox` receives the gradients of sent values. They come in the order of the backwards, in which
    parts take turns differently than in the forwards. Gradients of one part come in the order of its sends."""

    def __init__(self, peers: PointToPoint, source: int, device: torch.device) -> None:
        self._peers = peers
        self._receiver = _Receiver(peers, source, device, _GRADIENTS)
        self._order: deque[int] = deque()
        self._expected: defaultdict[int, deque[ValueSpec]] = defaultdict(deque)

    def begin(self, chunks: Sequence[int]) -> None:
        """Begin a batch.

        Args:
            chunks: for each message in order, the part that its gradients are for.
        """
        self._receiver.forget()
        self._order = deque(chunks)
        self._expected.clear()

    def expect(self, chunk: int, spec: ValueSpec) -> None:
        """Expect one more message of this spec for a part."""
        self._expected[chunk].append(spec)
        if self._peers.completes_on_host:
            self.post()

    def post(self) -> None:
        """Post the receive of the next message if possible now."""
        if not self._peers.completes_on_host or (self._is_next_known() and not self._receiver.is_posted):
            self._receiver.post(self._expected[self._order.popleft()].popleft())

    def take(self) -> list[Tensor]:
        """Wait for the next message and return it."""
        _, tensors = self._receiver.wait()
        if self._peers.completes_on_host:
            self.post()
        return tensors

    def _is_next_known(self) -> bool:
        return bool(self._order and self._expected[self._order[0]])


class Outbox:
    """`Outbox` sends tensors to other stages, and keeps each tensor alive until its send is complete."""

    def __init__(self, peers: PointToPoint) -> None:
        self._peers = peers
        self._header_device = host_or_device(peers.group)
        self._in_flight: deque[tuple[Tensor, Work]] = deque()

    def send_activations(self, spec: ValueSpec, tensors: Sequence[Tensor], to: int, *, with_header: bool) -> None:
        """Start to send the inputs of the next part."""
        if with_header:
            self._send([spec.header().to(self._header_device)], to, _HEADERS)
        self._send([_kept(tensor) for tensor in tensors], to, _ACTIVATIONS)

    def send_gradients(self, tensors: Sequence[Tensor], to: int) -> None:
        """Start to send gradients to the previous part."""
        self._send(tensors, to, _GRADIENTS)

    def finish(self) -> None:
        """Wait until all sends are complete."""
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
    """Return a tensor that the next micro-batch does not overwrite before the peer has read it. A tensor without
    gradients is copied, since a layer may reuse its memory in every micro-batch, such as a mask in a buffer."""
    return tensor if tensor.requires_grad else tensor.clone()
