"""A Metal device of dictionaries under the real `torch.mps`: what torch's C++ would answer on a Mac."""

import itertools
import types

import pytest
import torch


@pytest.fixture
def metal(monkeypatch):
    """What the device was asked for, and its figures; `torch.mps` and `torch.backends.mps` run on it unchanged."""
    metal = types.SimpleNamespace(
        present=True, allocated=10, driver=30, limit=100, waits=0, events={}, done=False, generator=torch.Generator()
    )
    numbers = itertools.count(1)

    def wait():
        metal.waits += 1
        metal.done = True

    def acquire(timing):
        number = next(numbers)
        metal.events[number] = {"timing": timing, "calls": []}
        return number

    def note(call):
        return lambda number: metal.events[number]["calls"].append(call)

    answers = {
        "_has_mps": True,
        "_mps_is_available": lambda: metal.present,
        "_mps_is_on_macos_or_newer": lambda major, minor: (major, minor) <= (15, 0),
        "_mps_deviceSynchronize": wait,
        "_mps_get_default_generator": lambda: metal.generator,
        "_mps_emptyCache": lambda: setattr(metal, "driver", metal.allocated),
        "_mps_currentAllocatedMemory": lambda: metal.allocated,
        "_mps_driverAllocatedMemory": lambda: metal.driver,
        "_mps_recommendedMaxMemory": lambda: metal.limit,
        "_mps_acquireEvent": acquire,
        "_mps_releaseEvent": metal.events.pop,
        "_mps_recordEvent": note("record"),
        "_mps_waitForEvent": note("wait"),
        "_mps_synchronizeEvent": note("synchronize"),
        "_mps_queryEvent": lambda number: metal.done,
        "_mps_elapsedTimeOfEvents": lambda start, end: float(end - start),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    monkeypatch.setattr(torch.mps, "_default_mps_generator", None)
    caches = (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer)
    for cached in caches:
        cached.cache_clear()
    yield metal
    for cached in caches:
        cached.cache_clear()
