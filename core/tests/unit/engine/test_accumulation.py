"""Which backward completes a step."""

from deepspeed.engine.accumulation import Accumulation
from deepspeed.zero.strategy import BackwardPlan


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
    assert schedule.is_boundary()


def test_plans():
    schedule = Accumulation(2)
    assert schedule.plan(by_user=False) == BackwardPlan(reduces=False, factor=1.0)
    assert schedule.plan(by_user=True) == BackwardPlan(reduces=False, factor=0.5)
    schedule.advance()
    assert schedule.plan(by_user=False) == BackwardPlan(reduces=True, factor=1.0)


def test_no_sync_holds_back_also_at_a_boundary():
    schedule = Accumulation(1)
    with schedule.no_sync():
        with schedule.no_sync():
            pass
        assert not schedule.syncs
        assert not schedule.plan(by_user=False).reduces
    assert schedule.syncs
    assert schedule.plan(by_user=False).reduces


def test_no_sync_ends_with_an_exception():
    schedule = Accumulation(1)
    try:
        with schedule.no_sync():
            raise KeyError
    except KeyError:
        assert schedule.syncs
