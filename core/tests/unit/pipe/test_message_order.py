"""Where a message waits for all before it, and a send for its receive, no stage waits for ever."""

from functools import partial

import pytest
from deepspeed.pipe.schedule import (
    BufferOpInstruction,
    InferenceSchedule,
    InterleavedInferenceSchedule,
    InterleavedSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
    ZeroBubbleSchedule,
)
from deepspeed.pipe.timeline import in_message_order, peer

SENDS, RECEIVES = (SendActivation, SendGrad), (RecvActivation, RecvGrad)
PLAIN = [TrainSchedule, InferenceSchedule, ZeroBubbleSchedule]
INTERLEAVED = [
    partial(kind, num_chunks=v) for kind in (InterleavedSchedule, InterleavedInferenceSchedule) for v in (2, 3, 4)
]


def flat(schedule):
    return [instruction for step in schedule for instruction in step]


def message(instruction, stage, num_stages):
    """What a send and its receive have in common."""
    is_activation = isinstance(instruction, SendActivation | RecvActivation)
    part = instruction.chunk * num_stages + stage
    if isinstance(instruction, RECEIVES):
        part += -1 if is_activation else 1
    return is_activation, part, instruction.micro


def is_stuck(schedules):
    """Run all stages over a transport without buffers: a rank does nothing until its send or receive meets its
    counterpart, which is what any library that keeps the order of messages does at the latest."""
    num_stages = len(schedules)
    queues = [[x for x in flat(schedule) if isinstance(x, SENDS + RECEIVES)][::-1] for schedule in schedules]
    waiting = list(range(num_stages))
    while waiting:
        stage = waiting.pop()
        if not queues[stage]:
            continue
        own = queues[stage][-1]
        other = peer(own, stage, num_stages)
        theirs = queues[other][-1] if queues[other] else None
        if (
            theirs is None
            or isinstance(own, SENDS) == isinstance(theirs, SENDS)
            or peer(theirs, other, num_stages) != stage
        ):
            continue
        if message(own, stage, num_stages) != message(theirs, other, num_stages):
            continue
        queues[stage].pop()
        queues[other].pop()
        waiting += [stage, other]
    return any(queues)


def sizes(kind, max_stages, max_micros):
    step = isinstance(kind, partial) and kind.func is InterleavedSchedule
    for num_stages in range(2, max_stages + 1):
        for num_micros in range(num_stages if step else 1, max_micros + 1, num_stages if step else 1):
            yield num_micros, num_stages


@pytest.mark.parametrize(
    ("max_stages", "max_micros"), [(4, 8), pytest.param(8, 16, marks=pytest.mark.sweep)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", [*PLAIN, *INTERLEAVED], ids=lambda kind: repr(kind)[-40:])
def test_no_stage_waits_for_ever(kind, max_stages, max_micros):
    for num_micros, num_stages in sizes(kind, max_stages, max_micros):
        schedules = [in_message_order(kind, num_micros, num_stages, stage) for stage in range(num_stages)]
        assert not is_stuck(schedules), (num_micros, num_stages)


def test_without_an_order_they_do():
    """So the transport of these tests is one that finds it."""
    for kind in (ZeroBubbleSchedule, InterleavedSchedule, InterleavedInferenceSchedule):
        assert is_stuck([kind(4, 2, stage) for stage in range(2)])
    assert not is_stuck([TrainSchedule(4, 2, stage) for stage in range(2)])


@pytest.mark.parametrize("kind", [*PLAIN, *INTERLEAVED], ids=lambda kind: repr(kind)[-40:])
def test_only_messages_move(kind):
    for stage in range(4):
        plain, ordered = kind(8, 4, stage), in_message_order(kind, 8, 4, stage)
        without = [[x for x in flat(each) if not isinstance(x, SENDS + RECEIVES)] for each in (plain, ordered)]
        assert without[0] == without[1]
        assert set(flat(plain)) == set(flat(ordered))
        assert len(flat(plain)) == len(flat(ordered))
        assert ordered.num_pipe_buffers() == plain.num_pipe_buffers()
        held = {}
        for x in flat(ordered):  # each send has the buffer as its pass left it
            if isinstance(x, BufferOpInstruction) and not isinstance(x, RECEIVES):
                assert not isinstance(x, SENDS) or held[x.chunk, x.buffer_id] == x.micro
                held[x.chunk, x.buffer_id] = x.micro
