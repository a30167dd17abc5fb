"""Lies about which device, how many, and which one is current."""

import contextlib

import torch
from ds_ext_sim.accelerator import Sim_Accelerator


class NamesTheNextDevice(Sim_Accelerator):
    def device_name(self, device_index=None):
        return super().device_name(None if device_index is None else (device_index + 1) % 2)


class NamesOneDeviceForAll(Sim_Accelerator):
    def device_name(self, device_index=None):
        return super().device_name(None if device_index is None else 0)


class CountsOneTooMany(Sim_Accelerator):
    def device_count(self):
        return super().device_count() + 1


class CountsOneTooFew(Sim_Accelerator):
    def device_count(self):
        return super().device_count() - 1


class IgnoresSetDevice(Sim_Accelerator):
    def set_device(self, device_index):
        pass


class LeavesTheDeviceContextOpen(Sim_Accelerator):
    @contextlib.contextmanager
    def device(self, device_index=None):
        if device_index is not None:
            self.set_device(device_index)
        yield


class OwnsEveryTensor(Sim_Accelerator):
    def on_accelerator(self, tensor):
        return True


class ForgetsADtype(Sim_Accelerator):
    def supported_dtypes(self):
        return [torch.float32, torch.float16]


class MakesHalvesOfFloats(Sim_Accelerator):
    @property
    def HalfTensor(self):
        return self._maker(torch.float32)
