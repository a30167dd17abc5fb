"""`deepspeed.testing.answers` has a value for every argument of the interface, and an eye for wrong answers."""

import inspect

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import MIXINS, DeepSpeedAccelerator, documented_names
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.testing import answers


@pytest.fixture
def plain():
    state = torch.get_rng_state()
    yield PlainAccelerator()
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", documented_names())
def test_the_plain_accelerator_answers(plain, name):
    """The tests of every extension ask so: a new method or argument fails here first, and says where to add a value."""
    answers.check_answers(plain, name)


def test_no_value_is_left_over():
    members = [member for mixin in MIXINS.values() for member in vars(mixin).values() if inspect.isfunction(member)]
    taken = {name for member in members for name in list(inspect.signature(member).parameters)[1:]}
    assert set(answers.VALUES) <= taken
    assert set(answers.ANY_DEVICE) <= set(documented_names())


def test_a_new_argument_says_where_to_add_a_value(plain, monkeypatch):
    monkeypatch.delitem(answers.VALUES, "msg")
    with pytest.raises(
        LookupError, match=r"range_push: .* argument 'msg'; add one to VALUES in deepspeed/testing/answ"
    ):
        answers.check_answers(plain, "range_push")


def older(self, tensor, align_bytes=1):
    return tensor


def other_default(self, tensor, make_copy=False, match_shape=True, *, align_bytes=1):
    return tensor


def more(self, tensor, make_copy=True, match_shape=True, own=None, *, align_bytes=1):
    return tensor


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (older, r"older: found no argument 'make_copy' at place 2"),
        (other_default, r"other_default: make_copy has the default False"),
        (more, None),
        (lambda self, *args, **kwargs: None, None),
    ],
)
def test_arguments_are_compared_with_the_interfaces(plain, monkeypatch, own, said):
    monkeypatch.setattr(PlainAccelerator, "pin_memory", own)
    if said is None:
        answers.check_arguments(own, DeepSpeedAccelerator.pin_memory)
        return
    with pytest.raises(AssertionError, match=said):
        answers.check_answers(plain, "pin_memory")


class Wrong(DeepSpeedAccelerator):
    _name = "cpu"

    def current_device(self):
        return 0

    def is_available(self):
        return 1

    def total_memory(self, device_index=None):
        return -1

    def export_envs(self):
        return [None]

    def range_pop(self, domain=None):
        return domain


@pytest.mark.parametrize("name", ["is_available", "total_memory", "export_envs", "range_pop"])
def test_a_wrong_answer_is_shown(name):
    with pytest.raises(AssertionError, match=f"{name}: found "):
        answers.check_answers(Wrong(), name)


@pytest.mark.parametrize("wrong", ["ccl", lambda found: len(found) == 3])
def test_what_a_device_answers_besides(plain, wrong):
    answers.check_answers(plain, "communication_backend_name", {"communication_backend_name": "gloo"})
    with pytest.raises(AssertionError, match="found 'gloo'"):
        answers.check_answers(plain, "communication_backend_name", {"communication_backend_name": wrong})
