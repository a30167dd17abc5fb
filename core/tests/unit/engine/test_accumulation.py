"""What the engine does when: which backward completes a step."""

from deepspeed.engine.training import Accumulation


def test_every_nth_micro_batch_is_a_boundary():
    schedule = Accumulation(3)
    boundaries = []
    for _ in range(7):
        boundaries.append(schedule.is_boundary())
        schedule.advance()
    assert boundaries == [False, False, True, False, False, True, False]
    assert schedule.micro_steps == 7


def test_one_step_is_always_one():
    assert Accumulation(1).is_boundary()


def test_the_users_word_beats_counting_until_it_is_taken_back():
    schedule = Accumulation(2)
    schedule.set_boundary(True)
    assert schedule.is_boundary()
    schedule.advance()
    schedule.set_boundary(False)
    assert not schedule.is_boundary()
    schedule.set_boundary(None)
    assert not schedule.is_boundary()  # the first micro-batch after the step by hand
    schedule.advance()
    assert schedule.is_boundary()


def test_micro_batches_count_from_the_last_step():
    schedule = Accumulation(2)
    for _ in range(4):
        schedule.advance()
    schedule.num_steps = 3
    boundaries = []
    for _ in range(6):
        boundaries.append(schedule.is_boundary())
        schedule.advance()
    assert boundaries == [False, False, True] * 2
    schedule.micro_steps = 4  # of a checkpoint, or written by a script
    assert not schedule.is_boundary()
    schedule.advance()
    assert schedule.is_boundary()
    schedule.restart()
    assert not schedule.is_boundary()


def test_inside_no_sync_no_step_ends():
    schedule = Accumulation(2)
    with schedule.no_sync():
        for _ in range(3):
            schedule.advance()
    assert schedule.is_boundary()


def test_the_second_of_two_micro_batches_ends_the_step():
    schedule = Accumulation(2)
    assert [schedule.ends_step, schedule.ends_step] == [False, False]
    schedule.advance()
    assert schedule.ends_step


def test_no_sync_holds_back_also_at_a_boundary():
    schedule = Accumulation(1)
    with schedule.no_sync():
        with schedule.no_sync():
            pass
        assert not schedule.syncs
        assert not schedule.ends_step
    assert schedule.syncs
    assert schedule.ends_step


def test_no_sync_ends_with_an_exception():
    schedule = Accumulation(1)
    try:
        with schedule.no_sync():
            raise KeyError
    except KeyError:
        assert schedule.syncs
