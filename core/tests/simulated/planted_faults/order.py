"""Lies about time and order: streams, events, waits, graphs."""

import contextlib

import torch
from ds_ext_sim import torch_sim
from ds_ext_sim.accelerator import Sim_Accelerator


class DoesNotSynchronize(Sim_Accelerator):
    def synchronize(self, device_index=None):
        pass


class SynchronizesAnotherDevice(Sim_Accelerator):
    def synchronize(self, device_index=None):
        super().synchronize(1)


class ClaimsToBeDoneAtOnce(Sim_Accelerator):
    def is_synchronized_device(self):
        return True


class ClaimsToResolveDependencies(Sim_Accelerator):
    def resolves_data_dependency(self):
        return True


class IsAlwaysOnTheDefaultStream(Sim_Accelerator):
    def current_stream(self, device_index=None):
        return self.default_stream(device_index)


class TakesTheCurrentStreamForTheDefaultOne(Sim_Accelerator):
    def default_stream(self, device_index=None):
        return self.current_stream(device_index)


class IgnoresStreams(Sim_Accelerator):
    def stream(self, stream):
        return contextlib.nullcontext()


class _Impatient(torch_sim.Stream):
    def wait_stream(self, stream):
        pass


class WaitsForNoStream(Sim_Accelerator):
    @property
    def Stream(self):
        return _Impatient


class _Stopped:
    """An event whose clock stands still."""

    def __init__(self, **options):
        self._event = torch_sim.Event(**options)

    def __getattr__(self, name):
        return getattr(self._event, name)

    def elapsed_time(self, end):
        return 0.0


class MeasuresNoTime(Sim_Accelerator):
    @property
    def Event(self):
        return _Stopped


class _Unordered(_Stopped):
    def elapsed_time(self, end):
        return 1.0


class MeasuresAlwaysTheSame(Sim_Accelerator):
    @property
    def Event(self):
        return _Unordered


class _Hasty(_Stopped):
    def synchronize(self):
        pass

    def query(self):
        return True


class EventsDoNotWait(Sim_Accelerator):
    @property
    def Event(self):
        return _Hasty


class _Blank:
    """A graph that forgets what was recorded."""

    def replay(self):
        pass

    def pool(self):
        return None


class RecordsNothing(Sim_Accelerator):
    def create_graph(self):
        return _Blank()

    def capture_to_graph(self, graph, pool=None, stream=None):
        return contextlib.nullcontext()


class RefusesNoGraph(Sim_Accelerator):
    def replay_graph(self, graph):
        graph.replay()


class ReadsTheHostBeforeItIsDone(Sim_Accelerator):
    """Its second device is the first one's stream: a copy of a tensor there is not waited for."""

    def synchronize(self, device_index=None):
        if device_index is None:
            torch.zeros(1, device="sim").sum().item()
        else:
            super().synchronize(device_index)
