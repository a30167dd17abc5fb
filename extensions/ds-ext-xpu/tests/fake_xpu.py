"""A stand-in for `torch.xpu`: two devices without memory, every function under the name and arguments of the real one.

`test_accelerator.py` holds the arguments against the installed torch, so that the stand-in cannot answer what torch
would not.
"""

import contextlib
import types

import torch

TOTAL, FREE = 16 << 30, 12 << 30


class Stream:
    def __init__(self, device=None, priority=0):
        self.waited = []

    def wait_stream(self, stream):
        self.waited.append(stream)


class Event:
    def __init__(self, enable_timing=False):
        self.enable_timing = enable_timing


class XPUGraph:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


class FakeXpu(types.ModuleType):
    """Its state: the current device, a seed for each device, memory in bytes, and the calls that change something."""

    def __init__(self):
        super().__init__("torch.xpu")
        self.calls = []
        self.current, self.opened = 0, False
        self.streams = [Stream(), Stream()]
        self.generators = [torch.Generator().manual_seed(index) for index in range(2)]
        self.default_generators = ()
        self.Stream, self.Event, self.XPUGraph = Stream, Event, XPUGraph

    def _index(self, device):
        return self.current if device in (None, "xpu") else int(device)

    def init(self):
        self.opened, self.default_generators = True, tuple(self.generators)

    def _lazy_call(self, callable, **kwargs):
        self.calls.append("_lazy_call")
        callable()

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = device

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def synchronize(self, device=None):
        self.calls.append(("synchronize", self._index(device)))

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(total_memory=TOTAL)

    def is_bf16_supported(self, including_emulation=True):
        return True

    # ----- streams -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.streams[self.current]
        self.streams[self.current] = stream or before
        yield
        self.streams[self.current] = before

    def current_stream(self, device=None):
        return self.streams[self._index(device)]

    def graph(self, xpu_graph, pool=None, stream=None):
        return contextlib.nullcontext(xpu_graph)

    # ----- random numbers ------------------------------------------------------------------------------------------

    def get_rng_state(self, device="xpu"):
        return self.generators[self._index(device)].get_state()

    def set_rng_state(self, new_state, device="xpu"):
        self.generators[self._index(device)].set_state(new_state)

    def manual_seed(self, seed):
        self.generators[self.current].manual_seed(seed)

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def initial_seed(self):
        return self.generators[self.current].initial_seed()

    # ----- memory --------------------------------------------------------------------------------------------------

    def empty_cache(self):
        self.calls.append("empty_cache")

    def memory_allocated(self, device=None):
        return 100 + self._index(device)

    def max_memory_allocated(self, device=None):
        return 200 + self._index(device)

    def memory_reserved(self, device=None):
        return 300 + self._index(device)

    def max_memory_reserved(self, device=None):
        return 400 + self._index(device)

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.current": self.memory_allocated(device)}

    def reset_peak_memory_stats(self, device=None):
        self.calls.append(("reset_peak_memory_stats", self._index(device)))

    def mem_get_info(self, device=None):
        return FREE, TOTAL
