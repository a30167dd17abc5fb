"""`Stage` runs the schedule of one stage. The engine provides the computations (`engine/pipeline.py`).

[Note: the last backward] The work after the last backward waits for peers: the sums of gradients, and the norm over all
stages. An earlier stage may wait for the gradients that this backward has made, so these are sent first: the last
backward of a step gets `ends=True`, and `reduce` is called after the send has started.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.comm.give_up import give_up
from deepspeed.comm.point_to_point import PointToPoint
from deepspeed.errors import ConfigError
from deepspeed.pipe.batch import Batch
from deepspeed.pipe.messages import ActivationInbox, GradientInbox, Outbox, ValueSpec, spec_of, tensors_of
from deepspeed.pipe.schedule import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from deepspeed.pipe.split_backward import DeferredWeights

_BACKWARDS = (BackwardPass, BackwardInput, BackwardWeight)


class Compute(Protocol):
    """`Compute` provides the layers, losses and updates of a stage."""

    def forward(self, inputs: Any, chunk: int) -> Any:
        """Run the stage's part number `chunk`."""

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss of a micro-batch; for a model without loss function, `outputs` itself."""

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None, *, ends: bool) -> None:
        """Compute the gradients of the leaves; see [Note: the last backward].

        Args:
            tensors: outputs that require gradients; or a loss.
            gradients: the gradients of the outputs, scaled and divided; None for a loss.
            ends: this is the last backward of the step.
        """

    def backward_weights(self, roots: Sequence[Tensor], *, ends: bool) -> None:
        """Compute the gradients that a backward has deferred (`DeferredWeights.roots`); `ends` as in `backward`."""

    def reduce(self) -> None:
        """Reduce the accumulated gradients over the ranks."""

    def step(self) -> None:
        """Update the weights."""


@dataclass
class _Buffer:
    """`_Buffer` keeps the data of one micro-batch for one part of the stage."""

    inputs: Any = None
    labels: Any = None
    received: list[Tensor] = field(default_factory=list)  # leaves that get the gradients of inputs
    spec: ValueSpec | None = None  # the spec of the outputs
    outputs: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)  # gradients of the received inputs
    deferred: DeferredWeights | None = None


@dataclass
class Results:
    """`Results` holds the losses and outputs of a batch's micro-batches on the last stage; both are empty on others."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class Stage:
    """`Stage` runs the instructions of a schedule: it computes with `compute`, and sends and receives by `peers`.

    Args:
        compute: the computations of the stage.
        peers: the ranks of the pipeline, by stage.
        stage_id: number of this rank's stage.
        num_stages: number of stages of the pipeline.
        num_chunks: parts per stage.
        device: the device of the stage.
    """

    def __init__(
        self,
        compute: Compute,
        peers: PointToPoint,
        *,
        stage_id: int,
        num_stages: int,
        num_chunks: int,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._peers = peers
        self._stage_id, self._num_stages, self._num_chunks = stage_id, num_stages, num_chunks
        self._device = device
        before, after = (stage_id - 1) % num_stages, (stage_id + 1) % num_stages
        self._before, self._after = before, after
        self._activations = ActivationInbox(peers, before, device)
        self._gradients = GradientInbox(peers, after, device)
        self._outbox = Outbox(peers)
        self._handlers: Mapping[type[PipeInstruction], Callable[[Any], None]] = {
            LoadMicroBatch: self._load,
            ForwardPass: self._forward,
            BackwardPass: self._backward,
            BackwardInput: self._backward,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send_activation,
            RecvActivation: lambda _: self._activations.post(),
            SendGrad: self._send_gradient,
            RecvGrad: lambda _: self._gradients.post(),
            ReduceTiedGrads: lambda _: None,  # `compute.reduce` does this, too; see zero/unit_groups.py
            ReduceGrads: lambda _: compute.reduce(),
            OptimizerStep: lambda _: compute.step(),
        }

    def run(
        self, schedule: PipeSchedule, batch: Batch, *, keeps_outputs: bool = False, keeps_loss: bool = True
    ) -> Results:
        """Run a schedule.

        Args:
            schedule: the schedule of this stage.
            batch: the micro-batches.
            keeps_outputs: return the outputs of the last part.
            keeps_loss: compute losses.

        Raises:
            CommError: a peer failed.
            ConfigError: an instruction is unknown, or a stage returned a value that cannot be sent.
        """
        self._instructions = [instruction for step in schedule for instruction in step]
        self._buffers = [[_Buffer() for _ in range(schedule.num_pipe_buffers())] for _ in range(self._num_chunks)]
        self._batch, self._results = batch, Results()
        self._keeps_outputs, self._keeps_loss = keeps_outputs, keeps_loss
        self._loaded = [0] * self._num_chunks
        self._splits = any(isinstance(each, BackwardWeight) for each in self._instructions)
        self._sent: dict[int, ValueSpec] = {}
        chunks = [each.chunk for each in self._instructions if isinstance(each, RecvActivation)]
        last = max((at for at, each in enumerate(self._instructions) if isinstance(each, _BACKWARDS)), default=-1)
        self._activations.begin(chunks, all_have_headers=batch.shapes_vary)
        self._gradients.begin([each.chunk for each in self._instructions if isinstance(each, RecvGrad)])
        if self._num_stages > 1:
            self._peers.connect()
        try:
            for at, instruction in enumerate(self._instructions):
                self._ends = at == last
                self._handler(instruction)(instruction)
            self._outbox.finish()
        except BaseException:
            give_up()
            self._outbox.forget()
            raise
        finally:
            self._buffers = []
        return self._results

    def _handler(self, instruction: PipeInstruction) -> Callable[[Any], None]:
        for kind in type(instruction).__mro__:
            if kind in self._handlers:
                return self._handlers[kind]
        known = ", ".join(kind.__name__ for kind in self._handlers)
        raise ConfigError(f"schedule: found the instruction {instruction!r}; a stage knows {known}")

    # ---- instructions -------------------------------------------------------------------------------------------

    def _buffer(self, instruction: BufferOpInstruction) -> _Buffer:
        return self._buffers[instruction.chunk][instruction.buffer_id]

    def _is_first(self, chunk: int) -> bool:
        return chunk * self._num_stages + self._stage_id == 0

    def _is_last(self, chunk: int) -> bool:
        return chunk * self._num_stages + self._stage_id == self._num_stages * self._num_chunks - 1

    def _load(self, instruction: LoadMicroBatch) -> None:
        buffer, chunk = self._buffer(instruction), instruction.chunk
        inputs, labels = self._batch.micro_batches[self._loaded[chunk]]
        self._loaded[chunk] += 1
        if self._is_first(chunk):
            buffer.inputs = self._on_device(inputs)
        if self._is_last(chunk) and self._keeps_loss:
            buffer.labels = self._on_device(labels)

    def _forward(self, instruction: ForwardPass) -> None:
        buffer, chunk = self._buffer(instruction), instruction.chunk
        inputs, buffer.inputs, buffer.received = buffer.inputs, None, []
        if not self._is_first(chunk):
            spec, tensors = self._activations.take()
            if torch.is_grad_enabled():
                needs_grad = [at for at, each in enumerate(spec.tensors) if each.needs_grad]
                buffer.received = [_Arrival.leaf(tensors[at]) for at in needs_grad]
                for at, leaf in zip(needs_grad, buffer.received, strict=True):
                    tensors[at] = _Arrival.apply(leaf, tensors[at])
            inputs = spec.value(tensors)
        if self._splits:
            buffer.deferred = DeferredWeights()
            with buffer.deferred.in_forward():
                self._run_layers(buffer, inputs, chunk)
        else:
            self._run_layers(buffer, inputs, chunk)

    def _run_layers(self, buffer: _Buffer, inputs: Any, chunk: int) -> None:
        outputs = self._compute.forward(inputs, chunk)
        if not self._is_last(chunk):
            buffer.spec = spec_of(outputs, f"stage {self._stage_id}")
            buffer.outputs = tensors_of(outputs)
            return
        if self._keeps_loss:
            buffer.loss = self._compute.loss(outputs, buffer.labels)
            buffer.labels = None
            self._results.losses.append(buffer.loss.detach())
        if self._keeps_outputs:
            self._results.outputs.append(outputs)

    def _backward(self, instruction: BackwardPass | BackwardInput) -> None:
        buffer, chunk = self._buffer(instruction), instruction.chunk
        ends = self._ends
        if self._is_last(chunk):
            assert buffer.loss is not None
            roots, gradients = [buffer.loss], None
        else:
            roots = [tensor for tensor in buffer.outputs if tensor.requires_grad]
            gradients = self._gradients.take()
        if isinstance(instruction, BackwardInput):
            assert buffer.deferred is not None
            with buffer.deferred.in_backward():
                self._compute.backward(roots, gradients, ends=ends)
        else:
            self._compute.backward(roots, gradients, ends=ends)
        buffer.gradients = [_gradient(leaf) for leaf in buffer.received]
        buffer.received, buffer.outputs, buffer.loss = [], (), None

    def _backward_weight(self, instruction: BackwardWeight) -> None:
        buffer = self._buffer(instruction)
        assert buffer.deferred is not None
        self._compute.backward_weights(buffer.deferred.roots(), ends=self._ends)

    def _send_activation(self, instruction: SendActivation) -> None:
        buffer, chunk = self._buffer(instruction), instruction.chunk
        spec = buffer.spec
        assert spec is not None
        with_header = self._batch.shapes_vary or chunk not in self._sent
        if not with_header and spec != self._sent[chunk]:
            raise ConfigError(
                f"PipelineModule: stage {self._stage_id} sends {spec} after {self._sent[chunk]} in one batch, whose "
                "inputs all have the same shapes; pass dynamic_shape=True"
            )
        self._sent[chunk] = spec
        self._outbox.send_activations(spec, buffer.outputs, self._after, with_header=with_header)
        if torch.is_grad_enabled():
            self._gradients.expect(chunk, spec.gradients)
        else:
            buffer.outputs = ()

    def _send_gradient(self, instruction: SendGrad) -> None:
        buffer = self._buffer(instruction)
        self._outbox.send_gradients(buffer.gradients, self._before)
        buffer.gradients = []

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        if isinstance(value, tuple | list):
            return tuple(map(self._on_device, value))
        return value


class _Arrival(torch.autograd.Function):
    """Make a received tensor the output of an operation, so a layer may overwrite it like a tensor of its own stage."""

    @staticmethod
    def leaf(tensor: Tensor) -> Tensor:
        """Return the leaf that gets the gradient of `tensor`. It has the shape of `tensor` but stores one element."""
        return tensor.new_zeros(()).expand(tensor.shape).requires_grad_()

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a received input, or zeros if the layers did not use the input."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if leaf.grad is None else leaf.grad
