"""One order of all messages of a pipeline, for libraries in which a message waits for those before it, on streams.

There messages of two ranks, or all messages of a rank, pass through one stream in the order of issue, and a send is
over when its receive has run. Two stages that begin with a send to each other would wait for ever; the schedules of
`schedule.py` but for 1F1B have such places, which do no harm where messages are buffered (gloo).

So the timeline gives each message a time, the end of the pass that makes it, and every stage issues its sends and
receives by these times: a send after its own pass, a receive before the first pass that begins at or after its time.
Then nobody waits in a circle. Order all passes by their start and all messages by their time, messages first where both
are equal: what a pass or a message waits for comes before it.
"""

from collections.abc import Callable, Iterator

from deepspeed.pipe.schedule import (
    BufferOpInstruction,
    LoadMicroBatch,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from deepspeed.pipe.timeline import COMPUTES, Pass, timeline

_MESSAGES = (SendActivation, RecvActivation, SendGrad, RecvGrad)

_Key = tuple[float, int, bool, int]  # time, part that sends, whether it is an activation, micro-batch


def in_message_order(
    make: Callable[[int, int, int], PipeSchedule], micro_batches: int, stages: int, stage_id: int
) -> PipeSchedule:
    """The schedule `make(micro_batches, stages, stage_id)` with its sends and receives in the order of all stages."""
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
        """Return as many buffers as the schedule needs without the order of messages."""
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
    """When each message is made, by whether it is an activation, the part that makes it, and the micro-batch."""
    return {
        (each.name == "ForwardPass", each.chunk * num_stages + each.stage, each.micro): each.stop
        for each in passes
        if each.name != "BackwardWeight"
    }


def _key(message: BufferOpInstruction, stage: int, num_stages: int, stops: dict[tuple[bool, int, int], float]) -> _Key:
    """The same for a send and its receive."""
    is_activation = isinstance(message, SendActivation | RecvActivation)
    part = message.chunk * num_stages + stage
    if isinstance(message, RecvActivation | RecvGrad):
        part += -1 if is_activation else 1
    return stops[is_activation, part, message.micro], part, is_activation, message.micro
