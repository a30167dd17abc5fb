"""Sequences divided between two ranks give the losses of whole ones, through the engine, Accelerate and the Trainer."""

import pytest
from deepspeed.testing.tiers import swept

CASES = [
    ("engine", "sdpa", "3"),
    ("engine", "eager", "1"),
    ("engine", "sdpa", "2"),
    ("accelerate", "sdpa", "3"),
    ("accelerate", "sdpa", "2"),
    ("trainer", "sdpa", "3"),
    ("trainer", "sdpa", "1"),
]
QUICK = {("engine", "eager", "1"), ("accelerate", "sdpa", "3"), ("trainer", "sdpa", "3")}


@pytest.mark.parametrize(("through", "attention", "stage"), swept(CASES, lambda *case: case in QUICK))
def test_losses_equal_those_of_whole_sequences(through, attention, stage, launch, plain, tmp_path):
    found = launch(tmp_path, "--through", through, "--attention", attention, "--stage", stage)["losses"]
    expected = plain.result["losses"]
    if through == "trainer":  # logs the mean of a step's micro-batches
        expected = [sum(pair) / 2 for pair in zip(expected[::2], expected[1::2], strict=True)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1
