"""Pinned memory: what `pin_memory` gives is on the host, pinned, aligned where asked, and equal to its source."""

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.testing import requirements

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
    host = torch.arange(float(size + 1))[1:]  # begins where nothing is aligned
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
