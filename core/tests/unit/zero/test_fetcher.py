"""Which units are whole at which moment: gathered ahead in the recorded order, kept while needed soon, released."""

import pytest
from deepspeed.errors import CommError
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.param_marks import LEGAL_MOVES, ZeroParamStatus
from deepspeed.zero.param_unit import LiveNumel

AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus


class FakeUnit:
    """What a fetcher needs of a unit; writes down what is done with it."""

    gathered_over = "its ranks"

    def __init__(self, name, log, numel=10):
        self.names, self.numel, self.log = [name], numel, log
        self.status, self.num_users, self.num_contexts, self.live = NOT_AVAILABLE, 0, 0, LiveNumel()
        self.reads = 0  # that may be begun ahead

    def read_ahead(self):
        if self.reads > 0:
            self.reads -= 1
            self.log.append(f"read {self.names[0]}")
            return True
        return False

    def launch(self, *, quantizes=False):
        assert not quantizes
        self._move(INFLIGHT, "launch")
        self.live.numel += self.numel

    def finish(self):
        self._move(AVAILABLE, "finish")

    def refuse_changes(self, *, compares=False):
        """There are none."""

    def release(self):
        if self.status is not NOT_AVAILABLE:
            self._move(NOT_AVAILABLE, "release")
            self.live.numel -= self.numel

    def abandon(self):
        if self.status is not INFLIGHT:
            return None
        self.status = AVAILABLE
        self.release()
        return f"work of {self.names[0]}"

    def _move(self, to, name):
        assert (self.status, to) in LEGAL_MOVES, (self.names, self.status, to)
        self.status = to
        self.log.append(f"{name} {self.names[0]}")

    def __repr__(self):
        return self.names[0]


class Model:
    """Units a, b, c, ... of 10 elements and their fetcher; `read` is one use of a unit by one module."""

    def __init__(self, names, *, prefetch=0, max_live=1000, max_reuse=0):
        self.log = []
        self.units = {name: FakeUnit(name, self.log) for name in names}
        self.fetcher = ParamFetcher(
            list(self.units.values()), prefetch_numel=prefetch, max_live_numel=max_live, max_reuse_numel=max_reuse
        )

    def read(self, names):
        """Use and drop units in this order; returns what was done, without what is in the order itself."""
        self.log.clear()
        for name in names:
            unit = self.units[name]
            self.fetcher.use(unit)
            assert unit.status is AVAILABLE
            self.fetcher.release_or_keep(unit)
        return list(self.log)

    def whole(self):
        return [name for name, unit in self.units.items() if unit.status is AVAILABLE]

    @property
    def live(self):
        live = sum(unit.numel for unit in self.units.values() if unit.status is not NOT_AVAILABLE)
        assert self.fetcher._live.numel == live, "what is counted is what is there"
        return live

    def forget_place(self):
        """The beginning of the next step."""
        self.fetcher.release_all()
        assert (self.whole(), self.live) == ([], 0)


def launches(log):
    return "".join(line.removeprefix("launch ") for line in log if line.startswith("launch"))


def test_without_room_each_use_is_a_gather_and_a_release():
    model = Model("ab")
    for _ in range(2):
        log = model.read("ab")
        assert log == ["launch a", "finish a", "release a", "launch b", "finish b", "release b"]
    assert model.live == 0


def test_a_unit_in_use_is_not_gathered_again():
    model = Model("a")
    model.fetcher.use(model.units["a"])
    model.fetcher.use(model.units["a"])
    assert model.log == ["launch a", "finish a"]


def test_the_second_time_what_comes_next_is_gathered_ahead():
    model = Model("abcd", prefetch=20)
    assert launches(model.read("abcd")) == "abcd"
    assert "launch b" not in model.log[: model.log.index("finish a")], "nothing is known yet"
    model.forget_place()
    log = model.read("abcd")
    assert log[:4] == ["launch a", "launch b", "launch c", "finish a"], "two of ten elements fit"
    assert log[log.index("release a") :][:3] == ["release a", "launch d", "finish b"]
    assert launches(log) == "abcd", "each once"
    assert model.live == 0


def test_what_comes_after_that_is_read_ahead_until_there_is_no_room():
    model = Model("abcde", prefetch=10)
    model.read("abcde")
    model.forget_place()
    for unit in model.units.values():
        unit.reads = 1
    model.units["e"].reads = 0
    assert model.read("a")[:5] == ["launch a", "launch b", "read c", "read d", "finish a"]


def test_a_changed_order_is_corrected_and_then_followed():
    model = Model("abcd", prefetch=10)
    model.read("abc")
    model.forget_place()
    assert launches(model.read("adc")) == "abdc", "b was a wrong guess"
    assert model.whole() + [name for name, unit in model.units.items() if unit.status is INFLIGHT] == ["b"]
    model.forget_place()
    log = model.read("adc")
    assert launches(log) == "adc"
    assert log[:2] == ["launch a", "launch d"]
    assert model.live == 0


def test_a_reused_unit_is_told_apart_by_what_was_used_before_it():
    model = Model("abc", prefetch=10)
    for _ in range(2):
        model.read("abac")
        model.forget_place()
    model.log.clear()
    model.fetcher.use(model.units["a"])
    assert launches(model.log) == "ab"
    model.fetcher.release_or_keep(model.units["a"])
    model.fetcher.use(model.units["b"])
    model.fetcher.release_or_keep(model.units["b"])
    model.log.clear()
    model.fetcher.use(model.units["a"])
    assert launches(model.log) == "c", "after b, a is followed by c"
    model.fetcher.release_all()


def test_no_more_is_gathered_ahead_than_may_live():
    model = Model("abcd", prefetch=1000, max_live=20)
    for _ in range(3):
        model.log.clear()
        for name in "abcd":
            model.fetcher.use(model.units[name])
            assert model.live <= 20
            model.fetcher.release_or_keep(model.units[name])
        model.forget_place()


def test_what_is_in_use_may_exceed_the_limit():
    model = Model("abc", prefetch=1000, max_live=10)
    for name in "abc":
        model.fetcher.use(model.units[name])
    assert model.whole() == ["a", "b", "c"]
    for name in "abc":
        model.fetcher.release_or_keep(model.units[name])
    assert model.live == 0


def test_room_is_made_of_what_nobody_uses_oldest_first():
    model = Model("abcd", max_live=20, max_reuse=1000)  # all fits the reuse distance, so all would be kept
    assert model.read("abc")[-4:] == ["finish b", "release a", "launch c", "finish c"]
    assert model.whole() == ["b", "c"]
    model.fetcher.use(model.units["b"])
    model.log.clear()
    model.fetcher.use(model.units["d"])
    assert model.log[0] == "release c", "b is older, but in use"


@pytest.mark.parametrize(("max_reuse", "is_kept"), [(9, False), (10, True)])
def test_a_unit_that_is_used_again_soon_is_kept(max_reuse, is_kept):
    model = Model("abcd", max_reuse=max_reuse)
    for _ in range(2):
        log = model.read("abacd")
        model.forget_place()
    assert launches(log) == ("abcd" if is_kept else "abacd")


def test_a_model_within_the_reuse_distance_stays_whole():
    model = Model("abc", max_reuse=30)
    model.read("abc")
    assert model.whole() == ["a", "b", "c"]
    assert launches(model.read("cba")) == ""
    model.forget_place()


def test_release_all_leaves_nothing_launched():
    model = Model("abcd", prefetch=1000)
    model.read("abcd")
    model.forget_place()
    model.fetcher.use(model.units["a"])
    model.units["a"].num_users = 1
    assert model.units["c"].status is INFLIGHT
    model.fetcher.release_all()
    assert {unit.status for unit in model.units.values()} == {NOT_AVAILABLE}
    assert model.units["a"].num_users == 0
    assert model.live == 0
    assert launches(model.read("abcd")) == "abcd"


def test_abandon_waits_for_nothing():
    model = Model("abc", prefetch=1000)
    model.read("abc")
    model.forget_place()
    model.fetcher.use(model.units["a"])
    model.log.clear()
    assert list(model.fetcher.abandon()) == ["work of b", "work of c"]
    assert not any(line.startswith("finish") for line in model.log)
    assert {unit.status for unit in model.units.values()} == {NOT_AVAILABLE}
    assert model.live == 0


def test_the_order_can_be_forgotten():
    model = Model("ab", prefetch=1000)
    assert model.fetcher.is_invalid_trace()
    model.read("ab")
    assert not model.fetcher.is_invalid_trace()
    model.fetcher._invalidate_trace()
    assert model.fetcher.is_invalid_trace()
    model.forget_place()
    model.fetcher.use(model.units["a"])
    assert launches(model.log[-2:]) == "a"


def test_units_that_are_whole_already_count_and_make_room():
    log = []
    a, b = units = [FakeUnit("a", log), FakeUnit("b", log)]
    a.launch()
    a.finish()
    fetcher = ParamFetcher(units, prefetch_numel=0, max_live_numel=15, max_reuse_numel=0)
    fetcher.use(b)
    assert (a.status, b.status) == (NOT_AVAILABLE, AVAILABLE)
    fetcher.release_all()
    assert fetcher._live.numel == 0


def test_a_gather_that_fails_is_passed_on():
    model = Model("ab")

    def fail():
        raise CommError("a peer left")

    model.units["a"].finish = fail
    with pytest.raises(CommError, match="a peer left"):
        model.fetcher.use(model.units["a"])
    assert list(model.fetcher.abandon()) == ["work of a"]
    assert model.live == 0
