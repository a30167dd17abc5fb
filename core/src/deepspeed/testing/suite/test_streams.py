"""Streams and events: after any kind of wait, work on one stream is visible to another stream and to the host.

A fast device could pass these tests by luck. So each test first queues work to keep the device busy, and the simulated
device runs nothing before a wait.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.testing import requirements

_NUMEL = 1 << 16


def _queue_work(device: torch.device, rounds: int = 10) -> torch.Tensor:
    """Queue work on the current stream, and return the result."""
    x = torch.full((256, 256), 1 / 256, device=device)
    for _ in range(rounds):
        x = x @ x
    return x


def _synchronize_device(stream: Any) -> None:
    get_accelerator().synchronize()


def _synchronize_by_index(stream: Any) -> None:
    get_accelerator().synchronize(get_accelerator().current_device())


def _wait_stream(stream: Any) -> None:
    get_accelerator().current_stream().wait_stream(stream)


def _wait_event(stream: Any) -> None:
    event = get_accelerator().Event()
    event.record(stream)
    get_accelerator().current_stream().wait_event(event)


def _event_wait(stream: Any) -> None:
    event = stream.record_event()
    event.wait(get_accelerator().current_stream())


def _event_synchronize(stream: Any) -> None:
    event = get_accelerator().Event()
    event.record(stream)
    event.synchronize()
    assert event.query()


def _stream_synchronize(stream: Any) -> None:
    stream.synchronize()
    assert stream.query()


_ON_HOST = (_synchronize_device, _synchronize_by_index, _event_synchronize, _stream_synchronize)
_WAITS = (*_ON_HOST, _wait_stream, _wait_event, _event_wait)


# ----- which stream --------------------------------------------------------------------------------------------------


@requirements.stream_class
def test_the_default_stream_is_current_at_first(accelerator: DeepSpeedAccelerator) -> None:
    index = accelerator.current_device()
    assert not accelerator.is_current_stream_capturing()
    assert accelerator.current_stream() == accelerator.default_stream()
    assert accelerator.current_stream(index) == accelerator.current_stream()
    assert accelerator.default_stream(index) == accelerator.default_stream()


@requirements.stream_class
@requirements.streams
def test_a_stream_is_current_inside_its_context(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.current_stream()
    first, second = accelerator.Stream(), accelerator.Stream()
    assert first != second
    with accelerator.stream(first):
        assert accelerator.current_stream() == first
        with accelerator.stream(second):
            assert accelerator.current_stream() == second
        assert accelerator.current_stream() == first
    assert accelerator.current_stream() == before


@requirements.stream_class
@requirements.streams
def test_the_default_stream_stays_while_another_is_current(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.default_stream()
    with accelerator.stream(accelerator.Stream()):
        assert accelerator.default_stream() == before


@requirements.stream_class
def test_no_stream_leaves_the_current_one(accelerator: DeepSpeedAccelerator) -> None:
    before = accelerator.current_stream()
    with accelerator.stream(None):  # type: ignore[arg-type]
        assert accelerator.current_stream() == before
    assert accelerator.current_stream() == before


# ----- order ---------------------------------------------------------------------------------------------------------


@requirements.stream_class
@pytest.mark.parametrize("wait", _WAITS, ids=lambda wait: wait.__name__.strip("_"))
def test_a_copy_to_the_device_is_there_after_a_wait(
    accelerator: DeepSpeedAccelerator, device: torch.device, wait: Callable[[Any], None]
) -> None:
    side = accelerator.Stream()
    host = accelerator.pin_memory(torch.arange(float(_NUMEL)))
    target = torch.zeros(_NUMEL, device=device)
    accelerator.synchronize()
    with accelerator.stream(side):
        _queue_work(device)
        target.copy_(host, non_blocking=True)
    wait(side)
    assert torch.equal(target.cpu(), host)


@requirements.stream_class
@pytest.mark.parametrize("wait", _ON_HOST, ids=lambda wait: wait.__name__.strip("_"))
def test_a_copy_to_the_host_is_there_after_a_wait(
    accelerator: DeepSpeedAccelerator, device: torch.device, wait: Callable[[Any], None]
) -> None:
    side = accelerator.Stream()
    source = torch.arange(float(_NUMEL), device=device)
    host = accelerator.pin_memory(torch.zeros(_NUMEL))
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        _queue_work(device)
        host.copy_(source, non_blocking=True)
    wait(side)
    assert torch.equal(host, torch.arange(float(_NUMEL)))


def test_synchronize_waits_for_the_current_stream(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    source = torch.arange(float(_NUMEL), device=device)
    host = accelerator.pin_memory(torch.zeros(_NUMEL))
    _queue_work(device)
    host.copy_(source, non_blocking=True)
    accelerator.synchronize()
    assert torch.equal(host, torch.arange(float(_NUMEL)))


@requirements.stream_class
def test_a_side_stream_sees_what_it_waited_for(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    side = accelerator.Stream()
    host = accelerator.pin_memory(torch.ones(_NUMEL))
    source = torch.zeros(_NUMEL, device=device)
    accelerator.synchronize()
    _queue_work(device)
    source.copy_(host, non_blocking=True)
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        doubled = (source * 2).cpu()  # read on the side stream: a wait of another stream would hide a missing wait
    assert torch.equal(doubled, host * 2)


@requirements.stream_class
def test_a_device_that_resolves_dependencies_needs_no_wait(
    accelerator: DeepSpeedAccelerator, device: torch.device
) -> None:
    if not accelerator.resolves_data_dependency():
        pytest.skip("resolves_data_dependency() is False: the core waits between streams")
    side = accelerator.Stream()
    host = accelerator.pin_memory(torch.ones(_NUMEL))
    target = torch.zeros(_NUMEL, device=device)
    accelerator.synchronize()
    with accelerator.stream(side):
        _queue_work(device)
        target.copy_(host, non_blocking=True)
    assert torch.equal(target.cpu(), host)


def test_a_synchronized_device_is_done_when_a_call_returns(
    accelerator: DeepSpeedAccelerator, device: torch.device
) -> None:
    if not accelerator.is_synchronized_device():
        pytest.skip("is_synchronized_device() is False: the core waits for the device")
    source = _queue_work(device)
    host = accelerator.pin_memory(torch.zeros(256, 256))
    host.copy_(source, non_blocking=True)
    assert torch.equal(host, torch.full((256, 256), 1 / 256))


# ----- events --------------------------------------------------------------------------------------------------------


@requirements.stream_class
def test_events_measure_time_in_order(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    start, middle, end = (accelerator.Event(enable_timing=True) for _ in range(3))
    start.record()
    _queue_work(device)
    middle.record()
    _queue_work(device)
    end.record()
    end.synchronize()
    first, second, whole = start.elapsed_time(middle), middle.elapsed_time(end), start.elapsed_time(end)
    assert first > 0
    assert second > 0
    assert whole == pytest.approx(first + second, rel=1e-2, abs=1e-2)


@requirements.stream_class
def test_events_are_done_after_a_wait(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    event = accelerator.Event()
    _queue_work(device)
    event.record(accelerator.current_stream())
    accelerator.synchronize()
    assert event.query()
