"""Schedules list the instructions of each pipeline stage for one batch, in order. They hold no tensors.

    for step in TrainSchedule(micro_batches=4, stages=2, stage_id=0):
        for instruction in step: ...

The instructions have DeepSpeed's names. `stage.py` runs them, and `timeline.py` computes their idle share. Training
schedules end as a step of every engine ends: reduce the gradients, update. 1F1B is PipeDream-Flush (arXiv 2006.09503,
section 3.2). The interleaved schedule is from arXiv 2104.04473, section 2.2. The zero-bubble schedule, which avoids
most of the bubble, is ZB-H1 of arXiv 2401.10241, section 2.2.

With M micro-batches on S stages, a forward of time F and a backward of 2 F, each stage is idle for (S - 1) 3 F of
(M + S - 1) 3 F: the share (S - 1) / (M + S - 1). Interleaving v parts divides the idle time by v.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError


class PipeInstruction:
    """One instruction of a schedule. Its arguments become attributes; equal types with equal arguments are equal."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.kwargs == other.kwargs  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.kwargs.items())))


class OptimizerStep(PipeInstruction):
    """Check the gradients and update the weights, after all reductions."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of shared modules over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction that uses a stage's buffer for one micro-batch.

    Args:
        buffer_id: the number of the stage's buffer.
        micro: the number of the micro-batch in its batch.
        chunk: the number of the part within the stage; always 0 except in interleaved schedules.
    """

    buffer_id: int
    micro: int
    chunk: int

    def __init__(self, buffer_id: int, *, micro: int = 0, chunk: int = 0, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, micro=micro, chunk=chunk, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch from the data iterator: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the layers, and compute the loss on the last stage."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of inputs and weights."""


class BackwardInput(BufferOpInstruction):
    """Compute the gradients of the inputs, and of the weights that are not deferred."""


class BackwardWeight(BufferOpInstruction):
    """Compute the gradients of the weights that a `BackwardInput` has deferred."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next part."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous part."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous part."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next part."""


__all__ = [
    "BackwardInput",
    "BackwardPass",
    "BackwardWeight",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "InterleavedInferenceSchedule",
    "InterleavedSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
    "ZeroBubbleSchedule",
]


@absent_members("runtime.pipe.schedule:PipeSchedule")
class PipeSchedule(ABC):
    """A schedule lists the instructions of one stage for one batch. Iterate over it, or call `steps()`.

    Args:
        micro_batches: number of micro-batches in the batch.
        stages: number of stages of the pipeline.
        stage_id: number of the stage, from 0.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        assert micro_batches >= 1
        assert 0 <= stage_id < stages
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the steps in order, each a list of instructions."""

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of micro-batches for which the stage keeps data at a time."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> int:
        """The number of the stage, from 0."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches in the batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage takes inputs from the data iterator."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage computes the loss."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _loads(self) -> bool:
        return self.is_first_stage or self.is_last_stage


class InferenceSchedule(PipeSchedule):
    """Forwards only. A step may be followed by a barrier of all stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Stage s runs micro-batch t - s in step t, and sends the outputs of the previous one."""
        for clock in range(self.micro_batches + self.stages - 1):
            micro = clock - self.stage_id
            sends: list[PipeInstruction] = []
            commands: list[PipeInstruction] = []
            if self._valid_micro_batch(micro - 1) and not self.is_last_stage:
                sends.append(SendActivation(self._buffer_idx(micro - 1), micro=micro - 1))
            if self._valid_micro_batch(micro):
                at = self._buffer_idx(micro)
                if not self.is_first_stage:
                    commands.append(RecvActivation(at, micro=micro))
                # if sends wait for their receives, one of two neighbors must begin with its send
                commands = sends + commands if self.stage_id % 2 == 0 else commands + sends
                if self._loads():
                    commands.append(LoadMicroBatch(at, micro=micro))
                commands.append(ForwardPass(at, micro=micro))
            else:
                commands = sends
            yield commands

    def num_pipe_buffers(self) -> int:
        """Two: one micro-batch is computed while the previous one is sent."""
        return 2

    def _buffer_idx(self, micro: int) -> int:
        return micro % 2


class TrainSchedule(PipeSchedule):
    """1F1B: after S - 1 - s warm-up forwards, stage s alternates one forward and one backward.

    A step may be followed by a barrier of all stages, and a send may wait for its receive.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Stage s runs the forward of micro-batch m at 2 m + s, the backward at 2 m + 2 S - 1 - s."""
        num_clocks = 2 * (self.micro_batches + self.stages - 1)
        for clock in range(num_clocks):
            commands = self._forward(clock) if (clock - self.stage_id) % 2 == 0 else self._backward(clock)
            if clock == num_clocks - 1:
                commands += _end_of_step()
            yield commands

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of forwards without their backward yet, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward(self, clock: int) -> list[PipeInstruction]:
        micro, before = self._forward_at(clock), self._backward_at(clock - 1)
        commands: list[PipeInstruction] = []
        if self._valid_micro_batch(micro) and not self.is_first_stage:
            commands.append(RecvActivation(self._buffer_idx(micro), micro=micro))
        if self._valid_micro_batch(before) and not self.is_first_stage:
            commands.append(SendGrad(self._buffer_idx(before), micro=before))
        if self._valid_micro_batch(micro):
            if self._loads():
                commands.append(LoadMicroBatch(self._buffer_idx(micro), micro=micro))
            commands.append(ForwardPass(self._buffer_idx(micro), micro=micro))
        return commands

    def _backward(self, clock: int) -> list[PipeInstruction]:
        micro, before = self._backward_at(clock), self._forward_at(clock - 1)
        commands: list[PipeInstruction] = []
        if self._valid_micro_batch(before) and not self.is_last_stage:
            commands.append(SendActivation(self._buffer_idx(before), micro=before))
        if self._valid_micro_batch(micro):
            if not self.is_last_stage:
                commands.append(RecvGrad(self._buffer_idx(micro), micro=micro))
            commands.append(BackwardPass(self._buffer_idx(micro), micro=micro))
        return commands

    def _forward_at(self, clock: int) -> int:
        return (clock - self.stage_id) // 2

    def _backward_at(self, clock: int) -> int:
        return (clock + self.stage_id + 1) // 2 - self.stages

    def _buffer_idx(self, micro: int) -> int:
        return micro % self.num_pipe_buffers()


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation on a pipeline of one stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield steps of one forward and one backward."""
        for micro in range(self.micro_batches):
            commands: list[PipeInstruction] = [
                LoadMicroBatch(0, micro=micro),
                ForwardPass(0, micro=micro),
                BackwardPass(0, micro=micro),
            ]
            # no ReduceTiedGrads: with one stage there are no copies of shared modules
            ends = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [*commands, *ends]

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1


class _Pass(NamedTuple):
    """One computation of a stage."""

    kind: type[BufferOpInstruction]
    micro: int
    chunk: int = 0


class _OrderedSchedule(PipeSchedule):
    """A schedule defined by an order of passes; each pass follows its receive and precedes its send."""

    num_chunks = 1

    @abstractmethod
    def _passes(self) -> Sequence[_Pass]:
        """Return the passes in order. A micro-batch holds a buffer from its forward to its last backward."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one pass per step, with its communication."""
        passes = list(self._passes())
        buffers = _assign_buffers(passes)
        for at, (kind, micro, chunk) in zip(buffers, passes, strict=True):
            part = chunk * self.stages + self.stage_id
            is_first, is_last = part == 0, part == self.num_chunks * self.stages - 1
            where = {"buffer_id": at, "micro": micro, "chunk": chunk}
            commands: list[PipeInstruction] = []
            if kind is ForwardPass and not is_first:
                commands.append(RecvActivation(**where))
            if kind in (BackwardPass, BackwardInput) and not is_last:
                commands.append(RecvGrad(**where))
            if kind is ForwardPass and (is_first or is_last):
                commands.append(LoadMicroBatch(**where))
            commands.append(kind(**where))
            if kind is ForwardPass and not is_last:
                commands.append(SendActivation(**where))
            if kind in (BackwardPass, BackwardInput) and not is_first:
                commands.append(SendGrad(**where))
            yield commands
        if end := self._end():
            yield end

    def _end(self) -> list[PipeInstruction]:
        """Return the instructions after all passes, or []."""
        return _end_of_step()

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of micro-batches between their forward and their last backward at a time."""
        return 1 + max(_assign_buffers(list(self._passes())))


class InterleavedSchedule(_OrderedSchedule):
    """1F1B with several parts of the model per stage. Passes and the bubble are shorter, but there are more messages.

    Args:
        num_chunks: parts per stage.

    Raises:
        ConfigError: the number of micro-batches is not a multiple of the number of stages.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, num_chunks: int = 2) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches % stages:
            raise ConfigError(
                f'pipeline.schedule: "interleaved" found {micro_batches} micro-batches on {stages} stages; set '
                f"gradient_accumulation_steps to a multiple of {stages}, or use another schedule"
            )
        self.num_chunks = num_chunks

    def _passes(self) -> list[_Pass]:
        total = self.micro_batches * self.num_chunks
        ahead = min(total, 2 * (self.stages - 1 - self.stage_id) + (self.num_chunks - 1) * self.stages)
        forwards = [self._at(ForwardPass, place) for place in range(total)]
        backwards = [self._at(BackwardPass, place) for place in range(total)]
        pairs = zip(forwards[ahead:], backwards, strict=False)
        return [*forwards[:ahead], *(each for pair in pairs for each in pair), *backwards[total - ahead :]]

    def _at(self, kind: type[BufferOpInstruction], place: int) -> _Pass:
        """Return pass number `place`: S micro-batches run through the parts in order; backwards in reverse order."""
        group, place = divmod(place, self.stages * self.num_chunks)
        chunk, micro = divmod(place, self.stages)
        chunk = self.num_chunks - 1 - chunk if kind is BackwardPass else chunk
        return _Pass(kind, group * self.stages + micro, chunk)


class InterleavedInferenceSchedule(_OrderedSchedule):
    """Forwards only, with several parts per stage and any number of micro-batches.

    Args:
        num_chunks: parts per stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, num_chunks: int = 2) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.num_chunks = num_chunks

    def _passes(self) -> list[_Pass]:
        """Return the forwards: groups of S micro-batches run through one part after another."""
        firsts = range(0, self.micro_batches, self.stages)
        groups = (range(first, min(first + self.stages, self.micro_batches)) for first in firsts)
        return [
            _Pass(ForwardPass, micro, chunk) for group in groups for chunk in range(self.num_chunks) for micro in group
        ]

    def _end(self) -> list[PipeInstruction]:
        return []


class ZeroBubbleSchedule(_OrderedSchedule):
    """ZB-H1: 1F1B with separate weight gradients; stage s defers the weight gradients of s micro-batches.

    Gradients of inputs reach the previous stage sooner, and weight gradients fill the time at the end in which a stage
    would wait. Every stage keeps as many micro-batches as the first stage of 1F1B.
    """

    def _passes(self) -> list[_Pass]:
        ahead = min(self.micro_batches, self.stages - self.stage_id)
        passes = [_Pass(ForwardPass, micro) for micro in range(ahead)]
        for micro in range(self.micro_batches):
            passes.append(_Pass(BackwardInput, micro))
            if micro >= self.stage_id:
                passes.append(_Pass(BackwardWeight, micro - self.stage_id))
            if micro + ahead < self.micro_batches:
                passes.append(_Pass(ForwardPass, micro + ahead))
        left = range(max(0, self.micro_batches - self.stage_id), self.micro_batches)
        return [*passes, *(_Pass(BackwardWeight, micro) for micro in left)]


def _assign_buffers(passes: Sequence[_Pass]) -> list[int]:
    """Return the buffer of each pass: the lowest free buffer at the forward, freed after the last backward."""
    last = BackwardWeight if any(each.kind is BackwardWeight for each in passes) else BackwardPass
    held: dict[tuple[int, int], int] = {}
    buffers = []
    for kind, micro, chunk in passes:
        key = (micro, chunk)
        if kind is ForwardPass:
            held[key] = next(at for at in range(len(held) + 1) if at not in held.values())
        buffers.append(held[key])
        if kind is last:
            del held[key]
    return buffers


def _end_of_step() -> list[PipeInstruction]:
    return [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
