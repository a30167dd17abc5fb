"""The accelerator reports its devices, their number and the current device, with names that torch understands."""

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, is_current_accelerator_supported
from deepspeed.testing import requirements


def test_it_is_an_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    assert isinstance(get_accelerator(), DeepSpeedAccelerator)
    assert get_accelerator() is get_accelerator()


def test_it_is_available_and_counts_its_devices(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.is_available() is True
    assert is_current_accelerator_supported()
    assert accelerator.device_count() >= 1


def test_names_are_torch_devices(accelerator: DeepSpeedAccelerator) -> None:
    kind = torch.device(accelerator.device_name()).type
    assert kind == accelerator.device_name()  # without an index it is the type
    for index in range(accelerator.device_count()):
        assert torch.device(accelerator.device_name(index)).type == kind
    assert torch.device(accelerator.current_device_name()).type == kind


@requirements.own_memory
def test_devices_have_names_of_their_own(accelerator: DeepSpeedAccelerator) -> None:
    count = accelerator.device_count()
    assert len({accelerator.device_name(index) for index in range(count)}) == count


def test_current_device_is_one_of_them(accelerator: DeepSpeedAccelerator) -> None:
    assert 0 <= accelerator.current_device() < accelerator.device_count()
    assert accelerator.current_device_name() == accelerator.device_name(accelerator.current_device())


def test_tensors_lie_on_the_current_device(accelerator: DeepSpeedAccelerator) -> None:
    made = torch.ones(3, device=accelerator.current_device_name())
    assert accelerator.on_accelerator(made)
    assert made.device == torch.device(accelerator.current_device_name())
    assert torch.ones(3, device=accelerator.device_name()).device == made.device
    assert not accelerator.on_accelerator(torch.empty(3, device="meta"))


@requirements.own_memory
def test_host_tensors_are_not_on_the_device(accelerator: DeepSpeedAccelerator) -> None:
    assert not accelerator.on_accelerator(torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)):
        torch.ones(3, device=accelerator.current_device_name()).numpy()


def test_set_device_is_remembered(accelerator: DeepSpeedAccelerator) -> None:
    for index in range(accelerator.device_count()):
        accelerator.set_device(index)
        assert accelerator.current_device() == index
        assert accelerator.current_device_name() == accelerator.device_name(index)
        accelerator.set_device(-1)  # scripts have this local_rank without a launcher; torch ignores it too
        assert accelerator.current_device() == index


@requirements.several_devices
def test_an_index_is_the_device_that_torch_means(accelerator: DeepSpeedAccelerator) -> None:
    for index in range(accelerator.device_count()):
        assert torch.empty(1, device=accelerator.device_name(index)).device.index == index
        accelerator.set_device(index)
        assert torch.empty(1, device=accelerator.device_name()).device.index == index


@requirements.own_memory
def test_device_count_is_where_devices_end(accelerator: DeepSpeedAccelerator) -> None:
    last = accelerator.device_count() - 1
    torch.empty(1, device=accelerator.device_name(last))
    if torch.device(accelerator.device_name(0)).index is None:
        return  # torch knows one device of this type and ignores the index
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        torch.empty(1, device=accelerator.device_name(last + 1))


def test_device_context_changes_nothing_outside(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.current_device()
    with accelerator.device(before):
        assert accelerator.current_device() == before
    with accelerator.device(None):
        assert accelerator.current_device() == before
    assert accelerator.current_device() == before


@requirements.several_devices
def test_device_context_makes_another_current(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.current_device()
    for index in range(accelerator.device_count()):
        with accelerator.device(index):
            assert accelerator.current_device() == index
            assert torch.empty(1, device=accelerator.device_name()).device.index == index
        assert accelerator.current_device() == before


@requirements.several_devices
def test_tensors_move_between_devices(accelerator: DeepSpeedAccelerator) -> None:
    first = torch.arange(1000.0, device=accelerator.device_name(0))
    second = first.to(accelerator.device_name(1))
    assert second.device.index == 1
    assert torch.equal(second.cpu(), torch.arange(1000.0))


def test_behaviour_flags_are_booleans_that_agree(accelerator: DeepSpeedAccelerator) -> None:
    synchronized = accelerator.is_synchronized_device()
    for answer in (
        synchronized,
        accelerator.use_host_timers(),
        accelerator.resolves_data_dependency(),
        accelerator.handles_memory_backpressure(),
    ):
        assert isinstance(answer, bool)
    if synchronized:  # the host's clock is right, and no stream can be ahead of another
        assert accelerator.use_host_timers()
        assert accelerator.resolves_data_dependency()
