"""Moves between any two divisions of the same parameters lose nothing and invent nothing."""

import pytest
import torch
from deepspeed.zero.layout import Run, UnitLayout, contiguous, even_cuts, in_parameters, parameter_cuts
from deepspeed.zero.redistribute import redistribute
from hypothesis import given
from hypothesis import strategies as st

NUMELS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def runs_of_unit(numels, world_size, layout=UnitLayout.even):
    layout = layout(numels, world_size)
    starts = [layout.shard(rank)[0] for rank in range(world_size)]
    return [
        Run(each.param, each.param_start, each.numel, each.owner, each.start - starts[each.owner])
        for each in layout.fragments
    ]


DIVISIONS = {
    "in parameters": in_parameters,
    "even": lambda numels, world_size: contiguous(numels, even_cuts(numels, world_size)),
    "between parameters": lambda numels, world_size: contiguous(numels, parameter_cuts(numels, world_size)),
    "shards of a unit": runs_of_unit,
    "whole shards of a unit": lambda numels, world_size: runs_of_unit(numels, world_size, UnitLayout.whole),
    "one owner": lambda numels, world_size: contiguous(numels, (0, *[sum(numels)] * world_size)),
}


class Rank:
    """One rank of a group whose ranks run one after the other: first all of them send, then all receive."""

    def __init__(self, rank, mail):
        self.rank, self.world_size, self.mail = rank, len(mail), mail
        self.group = type("Group", (), {"_device_types": [torch.device("cpu")]})()

    def all_to_all(self, output_N, input_N, output_numels, input_numels):
        self.mail[self.rank] = list(input_N.split(input_numels))
        if all(sent is not None for sent in self.mail):
            received = [sent[self.rank] for sent in self.mail]
            assert [part.numel() for part in received] == output_numels, "both sides agree on the sizes"
            output_N.copy_(torch.cat(received))
        return self

    def wait(self):
        pass


def among(buffers, before, after, numels):
    mail = [None] * len(buffers)
    for _ in range(2):
        results = [
            redistribute(buffer, before, after, buffer.new_zeros(numel), Rank(rank, mail))
            for rank, (buffer, numel) in enumerate(zip(buffers, numels))
        ]
    return results


def sizes_of(runs, world_size):
    return [
        max((run.offset + run.numel for run in runs if run.owner == rank), default=0) + 1 for rank in range(world_size)
    ]


def filled(runs, world_size, dtype):
    """The ranks' buffers, with a number of its own for every element, and zero where no run is."""
    buffers = [torch.zeros(numel, dtype=dtype) for numel in sizes_of(runs, world_size)]
    for run in runs:
        numbers = torch.arange(run.start, run.start + run.numel, dtype=dtype) + 16 * run.param + 1
        buffers[run.owner][run.offset : run.offset + run.numel] = numbers
    return buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(NUMELS, st.integers(1, 4), st.sampled_from(list(DIVISIONS)), st.sampled_from(list(DIVISIONS)))
def test_any_division_becomes_any_other(dtype, numels, world_size, source, target):
    before, after = DIVISIONS[source](numels, world_size), DIVISIONS[target](numels, world_size)
    expected = filled(after, world_size, dtype)
    results = among(filled(before, world_size, dtype), before, after, [each.numel() for each in expected])
    for result, wanted in zip(results, expected):
        assert result.dtype is dtype
        assert torch.equal(result, wanted)


@given(NUMELS, st.integers(1, 4), st.sampled_from(list(DIVISIONS)))
def test_a_division_covers_every_element_once(numels, world_size, name):
    runs = DIVISIONS[name](numels, world_size)
    covered = sorted((run.param, run.start + place) for run in runs for place in range(run.numel))
    assert covered == [(param, place) for param, numel in enumerate(numels) for place in range(numel)]
    held = [(run.owner, run.offset + place) for run in runs for place in range(run.numel)]
    assert len(set(held)) == len(held), "no two runs share memory"


@given(NUMELS)
def test_a_single_owner_needs_no_group(numels):
    layout = UnitLayout.whole(numels, 1)
    before = [Run(each.param, each.param_start, each.numel, 0, each.start) for each in layout.fragments]
    after = [run._replace(offset=sum(numels) - run.offset - run.numel) for run in before]  # in the reverse order
    (buffer,) = filled(before, 1, torch.float64)
    (expected,) = filled(after, 1, torch.float64)
    assert torch.equal(redistribute(buffer, before, after, torch.zeros_like(expected), None), expected)


def test_divisions_written_out():
    assert in_parameters([3, 1], 2) == [Run(0, 0, 2, 0, 0), Run(0, 2, 1, 1, 0), Run(1, 0, 1, 0, 2), Run(1, 1, 0, 1, 2)]
    assert contiguous([3, 2], (0, 4, 8)) == [Run(0, 0, 3, 0, 0), Run(1, 0, 1, 0, 3), Run(1, 1, 1, 1, 0)]
