"""Lies about memory, pinned memory among it."""

import torch
from ds_ext_sim.accelerator import Sim_Accelerator


class AllocatesNothing(Sim_Accelerator):
    def memory_allocated(self, device_index=None):
        return 0


class CountsTheFirstDeviceOnly(Sim_Accelerator):
    def memory_allocated(self, device_index=None):
        return super().memory_allocated(0)


class KeepsOldStatistics(Sim_Accelerator):
    def memory_stats(self, device_index=None):
        return {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 0}


class KeepsThePeak(Sim_Accelerator):
    def reset_peak_memory_stats(self, device_index=None):
        pass


class KeepsThePeakOfReservedMemory(Sim_Accelerator):
    def reset_max_memory_cached(self, device_index=None):
        pass


class HasMoreThanThereIs(Sim_Accelerator):
    def available_memory(self, device_index=None):
        return self.total_memory(device_index) + 1


class KeepsItsCache(Sim_Accelerator):
    def empty_cache(self):
        pass


class PinsNothing(Sim_Accelerator):
    def pin_memory(self, tensor, align_bytes=1):
        return tensor.clone()


class CallsEverythingPinned(Sim_Accelerator):
    def is_pinned(self, tensor):
        return True


class PinsNothingAndSaysItDid(Sim_Accelerator):
    """Both lies agree with each other, but not with torch."""

    _given = ()

    def pin_memory(self, tensor, align_bytes=1):
        copy = torch.empty_like(tensor).copy_(tensor)
        self._given = (*self._given, copy)
        return copy

    def is_pinned(self, tensor):
        return any(tensor is one for one in self._given)


class AlignsNothing(Sim_Accelerator):
    def pin_memory(self, tensor, align_bytes=1):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype).pin_memory()
        return room[1:].view(tensor.shape).copy_(tensor)
