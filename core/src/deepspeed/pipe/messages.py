"""The messages of one stage: an inbox for activations, an inbox for gradients, and an outbox.

If the library moves messages while the host computes, the next receive is posted as soon as the previous message has
arrived, so messages arrive during the computation. If device streams do both, receives are posted where the schedule
has them; the schedule is then in message order (`timeline.py`), since other stages wait for the receive.

A message is a value (a tensor or a tuple of tensors), and a header that describes the value. A header is an int64
tensor of `HEADER_NUMEL` elements: whether the value is a tuple, the number of tensors, and for each tensor its dtype,
whether it requires a gradient, its number of dims, and its shape.

`PartitionedTensor` holds a rank's part of a tensor that is divided equally over a group, and can gather the whole:

    part = PartitionedTensor(activation, group)              # each rank keeps 1/W of the elements
    send(part.to_meta()); send(part.data())                  # to the same rank of another group
    whole = PartitionedTensor.from_meta(meta, data, other_group).full()

Pipelines with tensor-parallel stages send activations this way, since all ranks of a stage have equal activations. The
class and its header are those of DeepSpeed's `runtime.utils`.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
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


def even_cuts(numel: int, num_parts: int) -> list[int]:
    """Return the `num_parts` + 1 boundaries of the parts, from 0 to `numel`; the first parts may have one more."""
    length, longer = divmod(numel, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


class PartitionedTensor:
    """This rank's part of a tensor that is equal on all ranks of `group`.

    Args:
        tensor: the whole tensor, of any shape and dtype; with `partition_meta`, this rank's part from `data`.
        group: the ranks that share the tensor.
        partition_meta: the header from `to_meta`.

    Attributes:
        local_data: this rank's elements, 1-D.
        orig_size: the shape of the whole tensor.
        partition: the boundaries of the parts: W + 1 numbers.
        even_split: whether all parts have the same length.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_device: torch.device | str = tensor.device
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            self.partition = even_cuts(tensor.numel(), self.num_parts)
            start, stop = self.partition[self.rank : self.rank + 2]
            self.local_data = tensor.detach().reshape(-1)[start:stop].clone()
        else:
            self.orig_size, self.partition = self._read(partition_meta)
            self.local_data = tensor.detach().reshape(-1)
            wanted = self.partition[self.rank + 1] - self.partition[self.rank]
            if self.local_data.numel() != wanted:
                raise ConfigError(
                    f"PartitionedTensor: found a part of {self.local_data.numel()} elements on rank {self.rank}, but "
                    f"its header says {wanted}; give the part that `data()` returned with the header"
                )
        self.even_split = self.partition[-1] % self.num_parts == 0

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: ProcessGroup, device: torch.device | str | None = None
    ) -> "PartitionedTensor":
        """Build from `to_meta` and `data` of another rank. `full` returns the tensor on `device`; default: the current
        device.

        Raises ConfigError if the header is malformed or for another number of ranks, or the part has another length.
        """
        made = cls(local_part, group, partition_meta=meta)
        made.orig_device = get_accelerator().current_device_name() if device is None else device
        return made

    def to_meta(self) -> Tensor:
        """Return the header, int64 on the part's device: number of dims, shape, number of parts, rank, boundaries."""
        header = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(header, dtype=torch.int64, device=self.local_data.device)

    def data(self) -> Tensor:
        """This rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's part, 1-D."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """Return the whole tensor with one all-gather. A collective.

        Args:
            device: the device of the result; default: the original device.
        """
        longest = -(-self.partition[-1] // self.num_parts)
        own = torch.zeros(longest, dtype=self.local_data.dtype, device=self.local_data.device)
        own[: self.local_data.numel()] = self.local_data
        gathered = own.new_empty(longest * self.num_parts)
        dist.all_gather_into_tensor(gathered, own, group=self.group)
        if not self.even_split:
            rows = gathered.view(self.num_parts, longest)
            lengths = [stop - start for start, stop in zip(self.partition, self.partition[1:], strict=False)]
            gathered = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return gathered.view(self.orig_size).to(self.orig_device if device is None else device)

    def _read(self, meta: Tensor) -> tuple[list[int], list[int]]:
        """Return the shape and the boundaries in a header. Raises ConfigError if the header does not fit."""
        numbers: Sequence[int] = meta.tolist()
        dims = numbers[0] if numbers else -1
        shape, rest = list(numbers[1 : 1 + dims]), list(numbers[1 + dims :])
        if dims < 0 or len(rest) < 2 or len(rest) != rest[0] + 3:
            raise ConfigError(f"PartitionedTensor: found the header {numbers}, which is none of `to_meta`")
        if rest[0] != self.num_parts:
            raise ConfigError(
                f"PartitionedTensor: found a header of {rest[0]} parts in a group of {self.num_parts} ranks; "
                "use a group of as many ranks"
            )
        if rest[1] != self.rank:
            raise ConfigError(
                f"PartitionedTensor: found the header of rank {rest[1]} on rank {self.rank}, whose part is another; "
                "exchange parts between ranks of the same place"
            )
        cuts = rest[2:]
        if cuts != even_cuts(torch.Size(shape).numel(), self.num_parts):
            raise ConfigError(f"PartitionedTensor: found the header {numbers}, whose cuts do not fit its shape {shape}")
        return shape, cuts
