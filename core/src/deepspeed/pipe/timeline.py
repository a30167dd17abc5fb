"""Simulate schedules: `timeline` computes when each stage runs each pass.

passes = timeline([TrainSchedule(4, 2, stage) for stage in range(2)])
idle_share(passes)                                  # 0.2

`in_message_order` puts all messages of a pipeline in one order, for libraries that run messages on device streams.
There, messages between two ranks, or all messages of a rank, run on one stream in the order of issue, and a send ends
when its receive has run. Two stages that both begin with a send to each other would deadlock. All schedules of
`schedule.py` except 1F1B have such places, which are harmless if messages are buffered (gloo).

So the timeline gives each message a time, the end of the pass that makes it. Every stage issues its sends and receives
by these times: a send after its own pass, a receive before the first pass that begins at or after its time. Then there
are no circular waits: order all passes by start and all messages by time, messages first at equal times; then every
pass and message comes after the ones that it waits for.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from deepspeed.pipe.schedule import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

#: costs of a stage's passes: a backward takes twice as long as a forward, and each of its halves as long as a forward
DEFAULT_COSTS: Mapping[str, float] = {"ForwardPass": 1, "BackwardPass": 2, "BackwardInput": 1, "BackwardWeight": 1}

#: returns the time of a pass for its stage and instruction
CostFunction = Callable[[int, BufferOpInstruction], float]

COMPUTES = (ForwardPass, BackwardPass, BackwardInput, BackwardWeight)


class Pass(NamedTuple):
    """One computation, from `start` to `stop` in the unit of the costs."""

    stage: int
    name: str
    micro: int
    chunk: int
    start: float
    stop: float


class Deadlock(RuntimeError):
    """Every unfinished stage waits for a message that no stage sends, or gets another message than it expects."""


def timeline(
    schedules: Sequence[PipeSchedule], costs: Mapping[str, float] | CostFunction = DEFAULT_COSTS
) -> list[Pass]:
    """Compute the passes of all stages, each as early as its messages and earlier passes allow; messages take no time.

    Args:
        schedules: one per stage, in order.
        costs: time of a stage's pass by the name of its instruction, divided by the number of chunks per stage; or a
            function that returns the time of each pass, such as a measured time.

    Raises:
        Deadlock: an expected message is never sent, or another message comes before it.
    """
    run = _Run(schedules, costs)
    while any(run.queues):
        if not any(run.advance(stage) for stage in range(len(schedules))):
            waits = ", ".join(f"stage {stage} at {queue[0]}" for stage, queue in enumerate(run.queues) if queue)
            raise Deadlock(f"every stage waits: {waits}")
    return sorted(run.passes, key=lambda each: (each.start, each.stage))


def idle_share(passes: Sequence[Pass]) -> float:
    """Return the share of idle time over all stages, from the first start to the last stop."""
    num_stages = 1 + max(each.stage for each in passes)
    span = max(each.stop for each in passes) - min(each.start for each in passes)
    return 1 - sum(each.stop - each.start for each in passes) / (span * num_stages)


def peer(instruction: PipeInstruction, stage: int, num_stages: int) -> int:
    """Return the other stage of a send or receive of `stage`."""
    is_next = isinstance(instruction, SendActivation | RecvGrad)
    return (stage + (1 if is_next else -1)) % num_stages


class _Run:
    """The state of a simulation: all stages, each at its next instruction."""

    def __init__(self, schedules: Sequence[PipeSchedule], costs: Mapping[str, float] | CostFunction) -> None:
        self.queues = [deque(instruction for step in schedule for instruction in step) for schedule in schedules]
        self.passes: list[Pass] = []
        self._clocks = [0.0] * len(schedules)
        num_chunks = max(getattr(schedule, "num_chunks", 1) for schedule in schedules)
        self._cost: CostFunction = (
            (lambda _, each: costs[each.name] / num_chunks) if isinstance(costs, Mapping) else costs
        )
        # (kind, sender, receiver) -> micro-batch, chunk and time of each message that is not received yet
        self._sent: dict[tuple[str, int, int], deque[tuple[int, int, float]]] = {}

    def advance(self, stage: int) -> bool:
        """Run a stage until it waits for a message. Returns whether it ran any instruction."""
        queue = self.queues[stage]
        before = len(queue)
        while queue and not self._waits(queue[0], stage):
            self._do(queue.popleft(), stage)
        return len(queue) < before

    def _waits(self, instruction: PipeInstruction, stage: int) -> bool:
        is_receive = isinstance(instruction, RecvActivation | RecvGrad)
        return is_receive and not self._sent.get(self._channel(instruction, stage))

    def _do(self, instruction: PipeInstruction, stage: int) -> None:
        clock = self._clocks[stage]
        if isinstance(instruction, COMPUTES):
            self._clocks[stage] = clock + self._cost(stage, instruction)
            done = Pass(stage, instruction.name, instruction.micro, instruction.chunk, clock, self._clocks[stage])
            self.passes.append(done)
        elif isinstance(instruction, SendActivation | SendGrad):
            part = instruction.chunk * len(self.queues) + stage + (1 if isinstance(instruction, SendActivation) else -1)
            message = (instruction.micro, part // len(self.queues), clock)
            self._sent.setdefault(self._channel(instruction, stage), deque()).append(message)
        elif isinstance(instruction, RecvActivation | RecvGrad):
            micro, chunk, at = self._sent[self._channel(instruction, stage)].popleft()
            if (micro, chunk) != (instruction.micro, instruction.chunk):
                raise Deadlock(f"stage {stage}: {instruction} gets micro-batch {micro} of chunk {chunk}")
            self._clocks[stage] = max(clock, at)

    def _channel(self, instruction: PipeInstruction, stage: int) -> tuple[str, int, int]:
        other = peer(instruction, stage, len(self.queues))
        kind = "activation" if isinstance(instruction, SendActivation | RecvActivation) else "grad"
        is_send = isinstance(instruction, SendActivation | SendGrad)
        return (kind, stage, other) if is_send else (kind, other, stage)


def shown(passes: Sequence[Pass]) -> Iterator[str]:
    """Yield one line of text per stage, with a column per unit of time. F2 is the forward of micro-batch 2, B2 its
    backward, W2 the backward of its weights."""
    letters = {"ForwardPass": "F", "BackwardPass": "B", "BackwardInput": "B", "BackwardWeight": "W"}
    unit = min(each.stop - each.start for each in passes)
    width = 2 + len(str(max(each.micro for each in passes)))
    num_columns = round(max(each.stop for each in passes) / unit)
    for stage in range(1 + max(each.stage for each in passes)):
        cells = ["." + " " * (width - 1)] * num_columns
        for each in passes:
            if each.stage == stage:
                first, last = round(each.start / unit), round(each.stop / unit)
                text = f"{letters[each.name]}{each.micro}"
                cells[first:last] = [text.ljust(width), *(["-" * (width - 1) + " "] * (last - first - 1))]
        yield f"stage {stage}  {''.join(cells).rstrip()}"


_MESSAGES = (SendActivation, RecvActivation, SendGrad, RecvGrad)

_Key = tuple[float, int, bool, int]  # time, part that sends, whether it is an activation, micro-batch


def in_message_order(
    make: Callable[[int, int, int], PipeSchedule], micro_batches: int, stages: int, stage_id: int
) -> PipeSchedule:
    """Return the schedule `make(micro_batches, stages, stage_id)` with its sends and receives in the common order."""
    return _InMessageOrder([make(micro_batches, stages, stage) for stage in range(stages)], stage_id)


class _InMessageOrder(PipeSchedule):
    def __init__(self, schedules: list[PipeSchedule], stage_id: int) -> None:
        own = schedules[stage_id]
        super().__init__(own.micro_batches, own.stages, stage_id)
        self.num_chunks: int = getattr(own, "num_chunks", 1)
        self._num_buffers = own.num_pipe_buffers()
        self._instructions = list(_ordered(schedules, stage_id))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield all instructions in one step."""
        yield self._instructions

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers of the original schedule."""
        return self._num_buffers


def _ordered(schedules: list[PipeSchedule], stage_id: int) -> Iterator[PipeInstruction]:
    passes = timeline(schedules)
    starts = {(each.name, each.micro, each.chunk): each.start for each in passes if each.stage == stage_id}
    own = [each for step in schedules[stage_id] for each in step]
    stops = _stops(passes, len(schedules))
    messages = sorted(
        ((_key(each, stage_id, len(schedules), stops), each) for each in own if isinstance(each, _MESSAGES)),
        key=lambda pair: pair[0],
        reverse=True,
    )
    last = max((at for at, each in enumerate(own) if isinstance(each, COMPUTES)), default=-1)
    loads: list[PipeInstruction] = []
    for at, each in enumerate(own):
        if isinstance(each, LoadMicroBatch):
            loads.append(each)
        elif isinstance(each, COMPUTES):
            while messages and messages[-1][0][0] <= starts[each.name, each.micro, each.chunk]:
                yield messages.pop()[1]
            yield from (*loads, each)
            loads = []
            if at == last:
                yield from (message for _, message in reversed(messages))
        elif not isinstance(each, _MESSAGES):
            yield each


def _stops(passes: list[Pass], num_stages: int) -> dict[tuple[bool, int, int], float]:
    """Return the time of each message, by whether it is an activation, the part that makes it, and the micro-batch."""
    return {
        (each.name == "ForwardPass", each.chunk * num_stages + each.stage, each.micro): each.stop
        for each in passes
        if each.name != "BackwardWeight"
    }


def _key(message: BufferOpInstruction, stage: int, num_stages: int, stops: dict[tuple[bool, int, int], float]) -> _Key:
    """Return the sort key of a message, equal for a send and its receive."""
    is_activation = isinstance(message, SendActivation | RecvActivation)
    part = message.chunk * num_stages + stage
    if isinstance(message, RecvActivation | RecvGrad):
        part += -1 if is_activation else 1
    return stops[is_activation, part, message.micro], part, is_activation, message.micro
