"""The suite's tests on ranks notice when any one thing that a rank brought back is wrong.

Each test runs with the answers of two plain ranks, then once for each part of them, with that part spoiled.
"""

import copy

import pytest
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.testing.suite import fixtures, test_communication, test_training
from deepspeed.testing.tiers import swept

TESTS = {
    "join": lambda folder: test_communication.test_ranks_join_over_its_library(),
    "all_reduce": lambda folder: test_communication.test_all_reduce_adds(torch.float32),
    "all_reduce-bf16": lambda folder: test_communication.test_all_reduce_adds(torch.bfloat16),
    "in flight": lambda folder: test_communication.test_a_collective_in_flight_is_done_after_its_wait(),
    "gather": lambda folder: test_communication.test_gather_scatter_swap_and_broadcast(),
    "send": lambda folder: test_communication.test_one_rank_sends_to_another(),
    "zero": lambda folder: test_communication.test_zeros_collectives(),
    "many": lambda folder: test_communication.test_many_are_in_flight_and_waited_for_in_any_order(),
    "abandon": lambda folder: test_communication.test_the_group_works_after_all_ranks_abandoned_a_collective(),
    "train": lambda folder: test_training.test_losses_are_those_of_plain_torch(2, "fp32"),
    "train-bf16": lambda folder: test_training.test_losses_are_those_of_plain_torch(1, "bf16"),
}


def parts(answer, path=()):
    """Where the tensors, numbers, words and flags of nested lists, tuples and dictionaries are."""
    if isinstance(answer, dict):
        return [part for key, value in answer.items() for part in parts(value, (*path, key))]
    if isinstance(answer, list | tuple):
        return [part for key, value in enumerate(answer) for part in parts(value, (*path, key))]
    return [path]


def spoiled(answer, path):
    """`answer` with the part at `path` spoiled a little: one element, a tenth of a number."""
    if not path:
        if isinstance(answer, torch.Tensor):
            answer = answer.clone()
            answer[-1] += 1
            return answer
        if isinstance(answer, bool):
            return not answer
        return answer + "x" if isinstance(answer, str) else answer * 1.1 + 0.1
    key, *rest = path
    changed = dict(answer) if isinstance(answer, dict) else list(answer)
    changed[key] = spoiled(answer[key], rest)
    return type(answer)(changed)


@pytest.fixture(autouse=True)
def _plain():
    set_accelerator(PlainAccelerator())
    yield
    reset_accelerator()


@pytest.mark.parametrize("name", swept(TESTS, lambda name: name in ("zero", "train-bf16")))
def test_every_part_of_an_answer_is_looked_at(name, tmp_path, monkeypatch):
    kept = []
    ask = fixtures.on_ranks

    def asked(world_size, fn, *args):
        kept.append(ask(world_size, fn, *args))
        return copy.deepcopy(kept[-1])

    monkeypatch.setattr(fixtures, "on_ranks", asked)
    TESTS[name](tmp_path)
    (answer,) = kept
    assert len(parts(answer)) >= 2
    for path in parts(answer):
        monkeypatch.setattr(fixtures, "on_ranks", lambda *_, path=path: spoiled(answer, path))
        with pytest.raises(AssertionError):
            TESTS[name](tmp_path)
