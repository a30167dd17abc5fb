"""Schedules on paper: every pass once and in order, each receive has its send, no stage waits for ever, memory is
bounded, and the idle time is the formula's."""

import pytest
from deepspeed.errors import ConfigError
from deepspeed.pipe.schedule import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    InterleavedInferenceSchedule,
    InterleavedSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
    ZeroBubbleSchedule,
)
from deepspeed.pipe.timeline import Deadlock, idle_share, peer, shown, timeline
from hypothesis import given
from hypothesis import strategies as st

TRAINS = [TrainSchedule, ZeroBubbleSchedule, InterleavedSchedule]
RECEIVES, SENDS = (RecvActivation, RecvGrad), (SendActivation, SendGrad)
sizes = st.tuples(st.sampled_from(TRAINS), st.integers(1, 6), st.integers(1, 12))
all_sizes = st.tuples(
    st.sampled_from([*TRAINS, InferenceSchedule, InterleavedInferenceSchedule]), st.integers(1, 6), st.integers(1, 12)
)


def create(kind, num_stages, num_micros):
    if kind is InterleavedSchedule:
        num_micros = -(-num_micros // num_stages) * num_stages
    return [kind(num_micros, num_stages, stage) for stage in range(num_stages)], num_micros


def flat(schedule):
    return [instruction for step in schedule for instruction in step]


@given(sizes)
def test_each_micro_batch_passes_each_part_once_in_order(size):
    schedules, num_micros = create(*size)
    for schedule in schedules:
        done = flat(schedule)
        for chunk in range(getattr(schedule, "num_chunks", 1)):
            places = {
                kind: {x.micro: at for at, x in enumerate(done) if type(x) is kind and x.chunk == chunk}
                for kind in (ForwardPass, BackwardPass, BackwardInput, BackwardWeight)
            }
            backward = BackwardInput if isinstance(schedule, ZeroBubbleSchedule) else BackwardPass
            assert sorted(places[ForwardPass]) == sorted(places[backward]) == list(range(num_micros))
            assert all(places[ForwardPass][micro] < places[backward][micro] for micro in range(num_micros))
            if backward is BackwardInput:
                assert sorted(places[BackwardWeight]) == list(range(num_micros))
                assert all(places[backward][micro] < places[BackwardWeight][micro] for micro in range(num_micros))
        assert [type(x) for x in done[-3:]] == [ReduceTiedGrads, ReduceGrads, OptimizerStep]
        assert sum(isinstance(x, OptimizerStep) for x in done) == 1


@given(all_sizes)
def test_all_stages_come_to_their_end_with_the_messages_they_expect(size):
    schedules, _ = create(*size)
    timeline(schedules)
    sent = [x for schedule in schedules for x in flat(schedule) if isinstance(x, SENDS)]
    received = [x for schedule in schedules for x in flat(schedule) if isinstance(x, RECEIVES)]
    assert len(sent) == len(received)


@given(st.integers(1, 6), st.integers(1, 12))
def test_evaluation_runs_each_part_once(num_stages, num_micros):
    for kind, num_chunks in ((InferenceSchedule, 1), (InterleavedInferenceSchedule, 2)):
        for schedule in create(kind, num_stages, num_micros)[0]:
            done = sorted((x.micro, x.chunk) for x in flat(schedule) if isinstance(x, ForwardPass))
            assert done == [(micro, chunk) for micro in range(num_micros) for chunk in range(num_chunks)]


@given(st.sampled_from([TrainSchedule, InferenceSchedule]), st.integers(1, 6), st.integers(1, 12))
def test_steps_need_no_buffered_send(kind, num_stages, num_micros):
    """With a barrier after each step, and sends that wait for their receive, nobody waits for ever."""
    schedules, _ = create(kind, num_stages, num_micros)
    steps = [list(schedule) for schedule in schedules]
    assert len({len(each) for each in steps}) == 1
    for together in zip(*steps, strict=True):
        queues = [[x for x in commands if isinstance(x, SENDS + RECEIVES)] for commands in together]
        while any(queues):
            pair = next((pair for pair in _meeting(queues)), None)
            assert pair is not None, queues
            for stage in pair:
                queues[stage].pop(0)


def _meeting(queues):
    matches = {SendActivation: RecvActivation, SendGrad: RecvGrad}
    for stage, queue in enumerate(queues):
        if queue and type(queue[0]) in matches:
            other = peer(queue[0], stage, len(queues))
            if queues[other] and queues[other][0] == matches[type(queue[0])](
                **queue_arguments(queue[0], queues[other][0])
            ):
                yield stage, other


def queue_arguments(sent, received):
    return {**sent.kwargs, "buffer_id": received.buffer_id}


@given(sizes)
def test_buffers_are_bounded_and_not_overwritten(size):
    schedules, num_micros = create(*size)
    for schedule in schedules:
        held = {}
        last = BackwardWeight if isinstance(schedule, ZeroBubbleSchedule) else BackwardPass
        for x in flat(schedule):
            if not isinstance(x, BufferOpInstruction):
                continue
            assert 0 <= x.buffer_id < schedule.num_pipe_buffers()
            if isinstance(x, ForwardPass):
                assert x.buffer_id not in held
                held[x.buffer_id] = (x.micro, x.chunk)
            if isinstance(x, BackwardPass | BackwardInput | BackwardWeight):
                assert held[x.buffer_id] == (x.micro, x.chunk)
            if isinstance(x, last):
                del held[x.buffer_id]
        ahead = schedule.stages - schedule.stage_id if isinstance(schedule, TrainSchedule) else schedule.stages
        if not isinstance(schedule, InterleavedSchedule):
            assert schedule.num_pipe_buffers() <= max(2, min(ahead, num_micros))


@given(st.integers(1, 6), st.integers(1, 16))
def test_the_idle_share_of_1f1b_is_the_formula(num_stages, num_micros):
    num_micros = max(num_stages, num_micros)
    passes = timeline(create(TrainSchedule, num_stages, num_micros)[0])
    assert idle_share(passes) == pytest.approx((num_stages - 1) / (num_micros + num_stages - 1))


@pytest.mark.parametrize(("num_stages", "num_micros"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_interleaving_and_split_backwards_shorten_the_bubble(num_stages, num_micros):
    idle = {kind: idle_share(timeline(create(kind, num_stages, num_micros)[0])) for kind in TRAINS}
    bubble = num_stages - 1  # of work 3 per micro-batch; arXiv 2401.10241, table 2, and arXiv 2104.04473, section 2.2
    assert idle[ZeroBubbleSchedule] == pytest.approx(bubble / (3 * num_micros + bubble))
    assert idle[InterleavedSchedule] == pytest.approx(1.5 * bubble / (3 * num_micros + 1.5 * bubble))
    assert idle[ZeroBubbleSchedule] < idle[InterleavedSchedule] < idle[TrainSchedule]


def test_one_stage_accumulates():
    (schedule,), _ = create(DataParallelSchedule, 1, 2)
    first = [LoadMicroBatch(0, micro=0), ForwardPass(0, micro=0), BackwardPass(0, micro=0)]
    assert next(iter(schedule)) == first
    assert schedule.num_pipe_buffers() == 1
    assert [type(x) for x in flat(schedule)[6:]] == [ReduceGrads, OptimizerStep]


def test_a_schedule_of_a_user():
    class Alone(PipeSchedule):
        def steps(self):
            for micro in range(self.micro_batches):
                yield [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0, micro=micro)]

    schedule = Alone(micro_batches=2, stages=1, stage_id=0)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (0, 1, 2)
    assert schedule.is_first_stage
    assert schedule.is_last_stage
    assert repr(flat(schedule)[0]) == "LoadMicroBatch(buffer_id=0, micro=0, chunk=0)"


def test_a_receive_without_its_send_is_noticed():
    class Waits(PipeSchedule):
        def steps(self):
            yield [RecvActivation(0)]

    with pytest.raises(Deadlock, match=r"stage 0 at RecvActivation.*stage 1 at RecvActivation"):
        timeline([Waits(1, 2, stage) for stage in range(2)])


def test_interleaving_wants_a_multiple_of_the_stages():
    with pytest.raises(ConfigError, match="found 3 micro-batches on 2 stages.*a multiple of 2"):
        InterleavedSchedule(3, 2, 0)


def test_a_picture_of_a_schedule():
    picture = list(shown(timeline(create(TrainSchedule, 2, 2)[0])))
    assert picture == ["stage 0  F0 F1 .  .  B0 -- .  B1 --", "stage 1  .  F0 B0 -- F1 B1 -- .  ."]
