"""The suite looks at itself, and would notice what it lacks."""

import pytest
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.testing import suite
from deepspeed.testing.suite import test_hygiene as hygiene
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


def test_everything_that_a_star_imports_is_a_test_or_a_fixture():
    fixtures = {name for name in suite.__all__ if not name.startswith("test_")}
    assert fixtures == {"accelerator", "device", "ds_expected_failure", "ds_undisturbed"}
    assert len(suite.__all__) == len(set(suite.__all__)) > 80
