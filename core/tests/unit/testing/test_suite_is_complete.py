"""The suite looks at itself, and would notice what it lacks."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.errors import PluginError
from deepspeed.testing import requirements, suite
from deepspeed.testing.suite import fixtures
from deepspeed.testing.suite import test_dtypes as dtypes
from deepspeed.testing.suite import test_environment as environment
from deepspeed.testing.suite import test_hygiene as hygiene
from deepspeed.testing.suite import test_speed as speed
from deepspeed.testing.suite.fixtures import ASKED, Watched


def test_a_new_method_that_no_test_asks_is_noticed(monkeypatch):
    monkeypatch.setattr(hygiene, "documented_names", lambda: [*documented_names(), "levitate"])
    with pytest.raises(AssertionError, match="levitate"):
        hygiene.test_every_documented_method_is_asked_by_a_test()


SOURCE = """
def test_a(accelerator):
    accelerator.device()
    other.stream()

def helper(accelerator):
    accelerator.amp()
"""


def test_only_what_a_test_takes_from_the_accelerator_counts():
    assert hygiene._names_asked(SOURCE) == {"device"}


def test_what_a_test_takes_is_noted_and_what_the_accelerator_calls_itself_is_not(monkeypatch):
    class Device:
        def current_device_name(self):
            return self.device_name()

        def device_name(self):
            return "xyz"

    before = set(ASKED)
    ASKED.clear()
    try:
        assert Watched(Device()).current_device_name() == "xyz"
        assert set(ASKED) == {"current_device_name"}
    finally:
        ASKED.update(before)


def test_without_its_device_the_suite_ends_with_the_reason(tmp_path, monkeypatch, capfd):
    reason = "DS_ACCELERATOR=xyz: that accelerator cannot be used here: no /dev/xyz0"

    def refuse():
        raise PluginError(reason)

    monkeypatch.setattr(fixtures, "get_accelerator", refuse)
    (tmp_path / "test_conformance.py").write_text("from deepspeed.testing.suite import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", str(tmp_path / "pytest.ini")]
    assert pytest.main([*options, "-k", "test_host_tensors or test_set_device", str(tmp_path)]) == 2
    told = capfd.readouterr().out
    assert told.count(reason) == 1
    assert "passed" not in told
    assert "failed" not in told


def test_everything_that_a_star_imports_is_a_test_or_a_fixture():
    fixtures = {name for name in suite.__all__ if not name.startswith("test_")}
    assert fixtures == {"accelerator", "device", "ds_expected_failure", "ds_undisturbed"}
    assert len(suite.__all__) == len(set(suite.__all__)) > 80


def test_each_test_belongs_to_a_level_that_names_tests_of_its_own():
    names = suite.all_tests()
    assert set(suite.__all__) <= {*names, *suite._FIXTURES}
    levels = {level: set(suite.chosen(level)) for level in suite.LEVELS}
    assert suite._ELSEWHERE.keys() <= set(names)
    for level, needed in suite.NEEDED.items():
        assert set(needed) <= levels[level] - levels.get(level - 1, set())
    assert levels[suite.DEFAULT_LEVEL] == set(suite.__all__)


# ----- numerics ------------------------------------------------------------------------------------------------------


def test_units_in_the_last_place_are_those_of_the_magnitude():
    one = torch.ones(1)
    eps = torch.finfo(torch.float32).eps
    assert dtypes.ulps_off(one + 3 * eps, one.double(), one.double()) == 3
    assert dtypes.ulps_off(one + 3 * eps, one.double(), 3 * one.double()) == 1
    assert dtypes.ulps_off(one.bfloat16(), one.double(), one.double()) == 0
    assert dtypes.ulps_off(one * float("nan"), one.double(), one.double()) == float("inf")


def test_a_product_of_fewer_bits_is_noticed(monkeypatch):
    def product(x):
        if x.dtype is not torch.float32:
            return x @ x.t()
        x = x.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)  # the bits that TF32 reads
        return x @ x.t()

    operator = dtypes._OPERATORS["product"]
    monkeypatch.setitem(dtypes._OPERATORS, "product", operator._replace(call=product))
    with pytest.raises(AssertionError, match="ULP off, and at most 16 are right"):
        dtypes.test_operators_are_right_to_a_few_ulp(torch.device("cpu"), "product", torch.float32)


# ----- speed: the judgment on given rates ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "enough"), [(30e9, True), (20e9, False), (140e9, True)])
def test_a_share_is_judged_by_its_threshold(rate, enough):
    found = speed.figure("sum of two tensors", [rate] * 3, [40e9] * 3, "GB/s")
    share = rate / 40e9
    assert found == {
        **{"what": "sum of two tensors", "share": share, "at_least": 0.7, "enough": enough},
        **{"rate": rate / 1e9, "device_rate": 40.0, "unit": "GB/s"},
    }
    if enough:
        speed.judge(found)
    else:
        with pytest.raises(
            AssertionError, match=r"20 of the device's 40 GB/s is a share of 0.50, and at least 0.70 is"
        ):
            speed.judge(found)


def test_a_round_in_which_the_machine_was_busy_or_free_changes_no_share():
    own, copies = [30e9, 30e9, 3e9, 30e9, 60e9], [40e9, 80e9, 40e9, 40e9, 80e9]
    found = speed.figure("sum of two tensors", own, copies, "GB/s")
    assert (found["share"], found["enough"], found["rate"], found["device_rate"]) == (0.75, True, 30, 40)


@pytest.mark.parametrize("share", [0.1, 0.95])
def test_a_test_of_speed_notes_its_figure_and_judges_it(monkeypatch, share):
    monkeypatch.setattr(speed, "_BYTES", 1 << 10)
    monkeypatch.setattr(
        speed, "rates", lambda works: {name: [1e9 if name == "copy" else share * 1e9] for name in works}
    )
    noted = {}
    for what in speed._BOUND_BY_MEMORY:
        run = (torch.device("cpu"), what, noted.__setitem__)
        if share > speed.AT_LEAST[what]:
            speed.test_share_of_the_copy_bandwidth(*run)
        else:
            with pytest.raises(AssertionError, match=what):
                speed.test_share_of_the_copy_bandwidth(*run)
        assert noted["figure"]["share"] == share


def test_rates_are_amounts_by_time_and_all_take_turns(monkeypatch):
    """On a clock that each call moves by what it takes."""
    now, calls = [0.0], []

    def work(name, seconds):
        def call():
            calls.append(name)
            now[0] += seconds

        return speed.TimedCall(call, 6.0)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    found = speed.rates({"slow": work("slow", 2.0), "fast": work("fast", 0.01)})
    assert found == {"slow": pytest.approx([3.0] * speed._ROUNDS), "fast": pytest.approx([600.0] * speed._ROUNDS)}
    rounds = calls[calls.index("fast") + 2 :]
    assert rounds == (["slow"] + ["fast"] * 5) * speed._ROUNDS


def test_a_step_of_a_gpt_has_six_operations_per_weight_and_token():
    config = speed.GPTConfig(vocab_size=512, sequence_length=1, num_layers=2, num_heads=8, width=256)
    weights = sum(weight.numel() for name, weight in speed.GPT(config).named_parameters() if weight.dim() == 2)
    weights -= config.width * (config.vocab_size + config.sequence_length)  # embeddings are read, not multiplied
    attention = 2 * 2 * config.width
    assert speed.step_operations(config, 3) == 6 * 3 * (weights + attention)


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        ([{"sparks": 2}, {"sparks": 1}], "sparks: found 2, then 1"),
        ([{"sparks": 2}, {}], "sparks: found 2, then None"),
        ([{"sparks": 1.5}, {"sparks": 1.5}], "found 1.5; return an int"),
        ([{"sparks": 2}, {"sparks": 3}], None),
    ],
)
def test_counts_of_faults_that_fall_are_noticed(monkeypatch, readings, said):
    monkeypatch.setattr(environment.plugin_manager(), "ask", lambda *_, **__: [readings.pop(0)])
    monkeypatch.setattr(requirements.counted_faults, "check", lambda: None)
    with nullcontext() if said is None else pytest.raises(AssertionError, match=said):
        environment.test_faults_of_a_device_are_counted_and_only_grow(get_accelerator())
