"""Every candidate and its verdict, under each rule that can decide."""

import pytest
from deepspeed.accelerator import candidates, current, set_accelerator
from deepspeed.accelerator.candidates import list_candidates
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import PluginError


@pytest.fixture
def told(shelf, monkeypatch):
    """Chooses, and gives name -> (state, chosen, verdict)."""
    monkeypatch.setattr(candidates, "plugin_manager", lambda: shelf.manager)

    def tell():
        try:
            choice = current.explain()
        except PluginError:
            choice = None
        return {each.name: (each.state, each.chosen, each.verdict) for each in list_candidates(choice)}

    return tell


def fail():
    raise OSError("driver too old")


def test_by_priority(shelf, told, warned):
    shelf.put("low", 1, build=PlainAccelerator)
    shelf.put("best", 9, build=PlainAccelerator, reason="2 devices")
    shelf.put("absent", 99, available=False, reason="no device")
    shelf.put("badly", 50, build=fail)
    shelf.put("half", 70, broken=ImportError("no library"))
    assert told() == {
        "best": ("available", True, "won: priority 9 is the highest available (2 devices)"),
        "low": ("available", False, "lost: priority 1 is below 9 of 'best'"),
        "absent": ("absent", False, "lost: its device is not here"),
        "badly": ("broken", False, "lost: it is broken"),
        "half": ("broken", False, "lost: it is broken"),
        "plain": ("available", False, "lost: 'best' and 'low' can be used"),
    }


def test_what_was_broken_comes_with_its_traceback(shelf, told, warned):
    shelf.put("badly", 50, build=fail)
    told()
    (broken,) = (each for each in list_candidates(current.explain()) if each.name == "badly")
    assert "in fail" in broken.traceback
    assert "OSError: driver too old" in broken.traceback


def test_a_tie_is_undecided_on_both_sides(shelf, told):
    shelf.put("a", 5, build=PlainAccelerator)
    shelf.put("b", 5, build=PlainAccelerator)
    found = told()
    assert found["a"] == ("available", False, "undecided: 'b' offers the same priority 5")
    assert found["b"] == ("available", False, "undecided: 'a' offers the same priority 5")
    assert not found["plain"][1]


def test_two_claims_on_one_device_are_undecided_on_both_sides(shelf, told, monkeypatch):
    shelf.put("cpu", 1, build=PlainAccelerator)
    shelf.put("poser", 9, build=PlainAccelerator, impersonates="cpu")
    shelf.put("low", 0, build=PlainAccelerator)
    found = told()
    assert found["poser"] == ("available", False, "undecided: 'cpu' claims torch's device 'cpu' too")
    assert found["cpu"] == ("available", False, "undecided: 'poser' claims torch's device 'cpu' too")
    assert found["low"][2] == "lost: priority 0 is below 9 of 'poser'"
    assert {each.name: each.impersonates for each in list_candidates(None)}["poser"] == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "poser")
    assert told()["poser"][1]


def test_by_the_variable(shelf, told, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "low")
    shelf.put("low", 1, build=PlainAccelerator)
    shelf.put("best", 9, build=PlainAccelerator)
    found = told()
    assert found["low"] == ("available", True, "won: DS_ACCELERATOR=low")
    assert found["best"][2] == found["plain"][2] == "lost: DS_ACCELERATOR=low beats every offer"


def test_by_the_variable_and_broken(shelf, told, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "badly")
    shelf.put("badly", 1, build=fail)
    shelf.put("good", 9, build=PlainAccelerator)
    found = told()
    assert found["badly"] == ("broken", False, "lost: it is broken")
    assert found["good"][1:] == (False, "lost: DS_ACCELERATOR=badly beats every offer")


def test_by_hand(shelf, told):
    shelf.put("a", 1, build=PlainAccelerator)
    set_accelerator(PlainAccelerator())
    found = told()
    assert found["a"][1:] == found["plain"][1:] == (False, "lost: set_accelerator beats every offer")


def test_plain_is_what_is_left(shelf, told, warned, monkeypatch):
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "a")
    shelf.put("a", 1, build=PlainAccelerator)
    found = told()
    assert found["a"] == ("blocked", False, "not asked")
    assert found["plain"][1]
    assert found["plain"][2].startswith("won: no installed accelerator is available")


def test_one_that_came_after_the_choice(shelf, told):
    shelf.put("a", 1, build=PlainAccelerator)
    current.get_accelerator()
    shelf.put("late", 2, build=PlainAccelerator)
    shelf.manager._entries.clear()
    assert told()["late"][1:] == (False, "lost: the choice was made before it was there")
