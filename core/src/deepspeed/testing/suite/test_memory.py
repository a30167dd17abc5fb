"""Memory figures follow allocations, peaks are kept and reset, and no figure exceeds the total.

A device that works in host memory reports the figures of the process, so comparisons allow for other allocations: a
tensor of 64 MiB must change a figure by at least 56 MiB. The result of `pin_memory` is on the host, pinned, aligned if
requested, and equal to its source.
"""

import gc
from collections.abc import Callable

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.testing import requirements

_BIG = 64 << 20
_SLACK = 8 << 20


def _allocate(device: torch.device, num_bytes: int = _BIG) -> torch.Tensor:
    """Return a tensor of ones. The memory must be written, because the figures do not count unwritten host memory."""
    return torch.ones(num_bytes, dtype=torch.uint8, device=device)


def _settle(accelerator: DeepSpeedAccelerator) -> None:
    gc.collect()
    accelerator.synchronize()


def test_total_and_available_memory_are_plausible(accelerator: DeepSpeedAccelerator) -> None:
    for index in range(accelerator.device_count()):
        total, available = accelerator.total_memory(index), accelerator.available_memory(index)
        assert isinstance(total, int)
        assert isinstance(available, int)
        assert 0 < available <= total
    assert accelerator.total_memory() == accelerator.total_memory(accelerator.current_device())
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()


@requirements.memory_figures
def test_allocated_memory_follows_tensors(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    _settle(accelerator)
    before = accelerator.memory_allocated()
    held = _allocate(device)
    accelerator.synchronize()
    assert accelerator.memory_allocated() >= before + _BIG - _SLACK
    assert accelerator.memory_allocated() <= accelerator.total_memory()
    del held
    _settle(accelerator)
    assert accelerator.memory_allocated() <= before + _SLACK


@requirements.memory_figures
def test_reserved_memory_holds_what_is_allocated(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    held = _allocate(device)
    accelerator.synchronize()
    assert accelerator.memory_reserved() >= accelerator.memory_allocated() - _SLACK
    assert abs(accelerator.memory_cached() - accelerator.memory_reserved()) <= _SLACK
    assert held.numel() == _BIG


@requirements.memory_figures
def test_empty_cache_gives_memory_back(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    held = _allocate(device)
    accelerator.synchronize()
    full = accelerator.memory_reserved()
    del held
    _settle(accelerator)
    accelerator.empty_cache()
    assert accelerator.memory_reserved() <= full - _BIG + _SLACK


def test_memory_is_sound_when_large_blocks_are_returned_at_once(
    accelerator: DeepSpeedAccelerator, device: torch.device
) -> None:
    accelerator.return_freed_memory()
    kept = _allocate(device).fill_(1)
    for _ in range(3):
        held = _allocate(device).fill_(2)
        del held
    accelerator.synchronize()
    assert bool((kept == 1).all())


@requirements.peak_memory
@pytest.mark.parametrize("reset", ["reset_peak_memory_stats", "reset_max_memory_allocated"])
def test_peak_of_allocated_memory_is_kept_and_reset(
    accelerator: DeepSpeedAccelerator, device: torch.device, reset: str
) -> None:
    start = _peak_of(accelerator, device, accelerator.max_memory_allocated, getattr(accelerator, reset))
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() - _SLACK
    assert accelerator.max_memory_allocated() <= start + _SLACK


@requirements.peak_memory
@pytest.mark.parametrize("reset", ["reset_peak_memory_stats", "reset_max_memory_cached"])
def test_peak_of_reserved_memory_is_kept_and_reset(
    accelerator: DeepSpeedAccelerator, device: torch.device, reset: str
) -> None:
    start = _peak_of(accelerator, device, accelerator.max_memory_reserved, getattr(accelerator, reset))
    assert abs(accelerator.max_memory_cached() - accelerator.max_memory_reserved()) <= _SLACK
    assert accelerator.max_memory_reserved() <= start + _SLACK


def _peak_of(
    accelerator: DeepSpeedAccelerator, device: torch.device, peak: Callable[[], int], reset: Callable[[], None]
) -> int:
    """Allocate and free a big tensor, check that `peak` rose, reset the peak, and return the peak from before."""
    _settle(accelerator)
    accelerator.empty_cache()
    reset()
    start = peak()
    held = _allocate(device)
    accelerator.synchronize()
    del held
    _settle(accelerator)
    accelerator.empty_cache()
    assert peak() >= start + _BIG - _SLACK
    reset()
    return start


@requirements.memory_statistics
def test_statistics_are_those_of_torch_by_name(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    held = _allocate(device)
    accelerator.synchronize()
    statistics = accelerator.memory_stats()
    for name in ("allocated_bytes.all.current", "allocated_bytes.all.peak"):
        assert isinstance(statistics[name], int), name
    assert abs(statistics["allocated_bytes.all.current"] - accelerator.memory_allocated()) <= _SLACK
    assert statistics["allocated_bytes.all.peak"] >= statistics["allocated_bytes.all.current"] - _SLACK
    assert held.numel() == _BIG


@requirements.several_devices
@requirements.own_memory
@requirements.memory_figures
def test_each_device_counts_its_own_memory(accelerator: DeepSpeedAccelerator) -> None:
    _settle(accelerator)
    before = [accelerator.memory_allocated(index) for index in (0, 1)]
    held = _allocate(torch.device(accelerator.device_name(1)))
    accelerator.synchronize(1)
    assert accelerator.memory_allocated(1) >= before[1] + _BIG - _SLACK
    assert accelerator.memory_allocated(0) <= before[0] + _SLACK
    assert held.numel() == _BIG


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_pinned_tensors_are_equal_and_on_the_host(accelerator: DeepSpeedAccelerator, dtype: torch.dtype) -> None:
    host = torch.arange(100).reshape(10, 10).to(dtype)
    pinned = accelerator.pin_memory(host)
    assert accelerator.is_pinned(pinned)
    assert pinned.device.type == "cpu"
    assert pinned.dtype == dtype
    assert torch.equal(pinned, host)
    for empty in (accelerator.pin_empty(10, 10, dtype=dtype), accelerator.pin_empty_like(host)):
        assert (empty.shape, empty.dtype, accelerator.is_pinned(empty)) == (host.shape, dtype, True)
    accelerator.unpin_memory(pinned)


def test_parts_of_pinned_memory_are_pinned(accelerator: DeepSpeedAccelerator) -> None:
    pinned = accelerator.pin_memory(torch.arange(100.0))
    assert accelerator.is_pinned(pinned[50:])
    assert accelerator.pin_memory(pinned).data_ptr() == pinned.data_ptr()  # pinned already: no copy
    align_bytes = accelerator.pin_memory_alignment()
    host = torch.ones(2 * align_bytes + 4096, dtype=torch.uint8)
    address = host.data_ptr() + -host.data_ptr() % align_bytes
    assert accelerator.register_host_memory(address, 4096) == accelerator.unregister_host_memory(address)


@pytest.mark.parametrize("align_bytes", [512, 4096])
@pytest.mark.parametrize("size", [0, 1, 1023])
def test_alignment_is_kept(accelerator: DeepSpeedAccelerator, align_bytes: int, size: int) -> None:
    host = torch.arange(float(size + 1))[1:]  # starts at an unaligned address
    pinned = accelerator.pin_memory(host, align_bytes=align_bytes)
    assert pinned.data_ptr() % align_bytes == 0
    assert torch.equal(pinned, host)


@requirements.own_memory
def test_ordinary_memory_is_not_pinned(accelerator: DeepSpeedAccelerator) -> None:
    assert not accelerator.is_pinned(torch.ones(100))


@requirements.own_memory
def test_torch_agrees_that_it_is_pinned(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.pin_memory(torch.ones(100)).is_pinned()
    assert accelerator.pin_memory(torch.ones(100), align_bytes=512).is_pinned()


def test_pinned_memory_travels_to_the_device_and_back(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    host = accelerator.pin_memory(torch.randn(65537))
    back = accelerator.pin_memory(torch.zeros(65537))
    back.copy_(host.to(device, non_blocking=True) * 2, non_blocking=True)
    accelerator.synchronize()
    assert torch.equal(back, host * 2)
