"""The slots of swapped sub-groups: who holds what, what is read and written, and what is kept when things fail."""

import errno
import os
from itertools import product

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.config.training import AioConfig
from deepspeed.ops import registry
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.swap_file import SwapFile, SwapFolder, SwapQueue
from deepspeed.zero.offload.swap_slots import LEGAL_MOVES, SlotState, SwappedGroup, SwapSlot, SwapSlots
from deepspeed.zero.placement import GRADIENT, MASTER
from deepspeed.zero.unit import SubGroup

pytestmark = pytest.mark.skipif(
    registry.resolve("async_io").builder is None, reason="no extension serves async_io here"
)

NUMEL = 3000


@pytest.fixture
def file(tmp_path):
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    yield SwapFile(folder.path / "optimizer.swap")
    folder.remove()


def memory():
    return HostMemory(get_accelerator(), pins=False)


def make_groups(file, count):
    """Master weights are the number of the sub-group, gradients its negative."""
    groups = []
    for number in range(count):
        fp32 = {"master_dtype": torch.float32, "gradient_dtype": torch.float32}
        group = SwappedGroup(SubGroup((), 0, NUMEL), file, **fp32, num_states=0)
        for name, value in ((MASTER, number), (GRADIENT, -number)):
            values = torch.full((NUMEL,), float(value))
            SwapQueue().write(group.tensor(name, torch.float32).region, values).wait()
        groups.append(group)
    return groups


@pytest.fixture
def moved(monkeypatch):
    """The number of operations on the file, by action."""
    counts = {"read": 0, "write": 0}
    begin = SwapQueue._begin

    def count(queue, action, *arguments):
        counts[action] += 1
        return begin(queue, action, *arguments)

    monkeypatch.setattr(SwapQueue, "_begin", count)
    return counts


def update(slots, order):
    """One update: each master weight grows by 10 where its gradient is what it must be."""
    slots.begin(order)
    for group in order:
        slot = slots.fetch(group)
        slot.view(MASTER).add_(10.0)
        slot.give_back([MASTER])
        slots.make_room()


def value_of(slots, group, name):
    """In the slot that has it, else in the file."""
    held = slots.found(group, name)
    return in_file(group, name) if held is None else held[0].item()


def in_file(group, name):
    found = torch.empty(NUMEL)
    SwapQueue().read(group.tensors[name].region, found).wait()
    assert (found == found[0]).all()
    return found[0].item()


@pytest.mark.parametrize("pipelines", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_updates_to_and_fro_move_only_what_left(file, moved, num_groups, pipelines):
    groups = make_groups(file, num_groups)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=pipelines[0], writes_behind=pipelines[1])
    held = min(num_groups, slots.count)
    for step in range(4):
        order = groups if step % 2 == 0 else groups[::-1]
        moved["read"] = moved["write"] = 0
        for number, group in enumerate(groups):
            assert slots.put(group, GRADIENT, torch.full((NUMEL,), -float(number))) is (slots.of(group) is not None)
        update(slots, order)
        slots.settle()
        assert moved["write"] == num_groups - held
        assert moved["read"] == num_groups - (held if step else 0)
        assert {in_file(group, MASTER) for group in groups if slots.of(group) is None} <= {
            number + 10.0 * (step + 1) for number in range(num_groups)
        }
    assert [value_of(slots, group, MASTER) for group in groups] == [number + 40.0 for number in range(num_groups)]
    assert slots.num_bytes == held * groups[0].region.num_bytes


@pytest.mark.parametrize(("count", "numel", "held"), [(0, NUMEL, 3), (4, NUMEL, 4), (0, 2 * NUMEL, 6), (0, 10, 3)])
def test_slots_are_as_many_as_their_memory_has_room_for(file, moved, count, numel, held):
    groups = make_groups(file, 8)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=True, writes_behind=True)
    slots.provide(count, numel)
    for group in groups:
        slots.expect(group)
    assert slots.count == held
    update(slots, groups)
    for group in groups[-held:]:
        assert slots.put(group, GRADIENT, torch.zeros(NUMEL))
    moved["read"] = moved["write"] = 0
    update(slots, groups[::-1])
    assert moved == {"read": len(groups) - held, "write": len(groups) - held}
    assert slots.num_bytes == held * groups[0].region.num_bytes


@pytest.mark.parametrize("pipelines", [False, True])
def test_gradients_in_a_slot_outlive_its_use_by_another(file, pipelines):
    """As when parameters were not used in the step before: what is held is not what comes first."""
    groups = make_groups(file, 6)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=pipelines, writes_behind=pipelines)
    update(slots, groups[:3])
    slots.forget_gradients()
    landed = []
    for number, group in enumerate(groups):
        gradients = torch.full((NUMEL,), 100.0 + number)
        landed.append(slots.put(group, GRADIENT, gradients))
        if not landed[-1]:
            SwapQueue().write(group.tensors[GRADIENT].region, gradients).wait()
    assert sum(landed) == slots.count
    slots.begin(groups[::-1])
    for number, group in reversed(list(enumerate(groups))):
        assert (slots.fetch(group).view(GRADIENT) == 100.0 + number).all()
        assert (slots.of(group).view(MASTER) == number + 10.0 * (number < 3)).all()
        slots.of(group).give_back([MASTER])
        slots.make_room()


def test_values_are_found_in_the_slot_until_they_are_dropped(file):
    groups = make_groups(file, 2)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=False, writes_behind=True)
    assert slots.found(groups[0], MASTER) is None
    update(slots, groups)
    assert (slots.found(groups[1], MASTER) == 11.0).all()
    assert slots.found(groups[1], GRADIENT) is None  # the update took it
    slots.drop(groups[1], MASTER)
    assert slots.found(groups[1], MASTER) is None
    SwapQueue().write(groups[1].tensors[MASTER].region, torch.full((NUMEL,), 7.0)).wait()
    slots.begin(groups)
    assert (slots.fetch(groups[1]).view(MASTER) == 7.0).all()


def test_a_slot_moves_legally_only(file):
    (group,) = make_groups(file, 1)
    assert {state for move in LEGAL_MOVES for state in move} == set(SlotState)
    for before, after in product(SlotState, SlotState):
        slot = SwapSlot(memory(), SwapQueue())
        slot.state = before
        if (before, after) in LEGAL_MOVES:
            slot._move(after)
            assert slot.state is after
        else:
            with pytest.raises(AssertionError):
                slot._move(after)
    slot = SwapSlot(memory(), SwapQueue())
    with pytest.raises(AssertionError):
        slot.lend()  # nothing was read
    slot.read(group)
    with pytest.raises(AssertionError):
        slot.lend()  # not finished


def fail_writes(monkeypatch):
    """As a disk that takes no write, which only shows when the write is waited for."""
    finish = SwapQueue.finish

    def fail(queue):
        works = list(queue._works)
        finish(queue)
        for work in works:
            work.end(OSError(errno.EIO, os.strerror(errno.EIO)))

    monkeypatch.setattr(SwapQueue, "finish", fail)


@pytest.mark.parametrize("writes_behind", [False, True])
def test_what_could_not_be_written_stays_and_is_written_later(file, monkeypatch, writes_behind):
    groups = make_groups(file, 5)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=False, writes_behind=writes_behind)
    update(slots, groups)
    before = [value_of(slots, group, MASTER) for group in groups]
    slots.begin(groups[::-1])
    slots.fetch(groups[4]).give_back([])
    slots.put(groups[4], MASTER, torch.full((NUMEL,), 77.0))
    with monkeypatch.context() as patch:
        fail_writes(patch)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                slots.of(groups[4]).clear()
            assert (slots.found(groups[4], MASTER) == 77.0).all()
    slots.of(groups[4]).clear()
    assert [value_of(slots, group, MASTER) for group in groups] == [*before[:4], 77.0]


def test_states_that_the_region_has_no_place_for(file):
    """They are swapped all the same; those that it has a place for move with the rest."""
    (group, *others) = make_groups(file, 5)
    region = group.region
    for name, dtype in (("first", torch.bfloat16), ("wide", torch.float64)):
        assert not region.offset <= group.tensor(name, dtype).region.offset < region.stop
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=True, writes_behind=True)
    slots.begin([group])
    slot = slots.fetch(group)
    for number, name in enumerate(("first", "wide")):
        slot.view(name).fill_(number + 0.5)
    slot.give_back([MASTER, "first", "wide"])
    slots.make_room()
    update(slots, others)
    assert slots.of(group) is None
    slots.begin([group])
    slot = slots.fetch(group)
    assert (slot.view("first").dtype, slot.view("wide").dtype) == (torch.bfloat16, torch.float64)
    assert (slot.view("first") == 0.5).all()
    assert (slot.view("wide") == 1.5).all()


def test_one_operation_moves_a_sub_group(file):
    kinds = {"master_dtype": torch.float32, "gradient_dtype": torch.bfloat16}
    group = SwappedGroup(SubGroup((), 0, NUMEL), file, **kinds, num_states=2)
    names = [MASTER, "m", "v"]
    for name in names:
        group.tensor(name, torch.float32)
    assert group.runs([*names, GRADIENT]) == [group.region.part(0, group.tensors[GRADIENT].region.stop)]
    assert group.runs(names) == [group.region.part(0, group.tensors["v"].region.stop)]
    assert group.runs([MASTER, "v"]) == [group.tensors[name].region for name in (MASTER, "v")]


def test_a_failed_read_leaves_no_values(file, monkeypatch):
    groups = make_groups(file, 1)
    slots = SwapSlots(memory(), AioConfig(), reads_ahead=False, writes_behind=False)
    with monkeypatch.context() as patch:
        fail_writes(patch)
        slots.begin(groups)
        with pytest.raises(OSError, match="Input/output error"):
            slots.fetch(groups[0])
    assert slots.found(groups[0], MASTER) is None
    slots.begin(groups)
    assert (slots.fetch(groups[0]).view(MASTER) == 0.0).all()
