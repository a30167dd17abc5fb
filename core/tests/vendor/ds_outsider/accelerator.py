"""XYZ_Accelerator: the interface as it was in 2023, written out whole, with the signatures of that year."""

import importlib

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class XYZ_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "cpu"
        self._communication_backend_name = "gloo"

    def is_synchronized_device(self):
        return True

    # Device APIs
    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return None

    def set_device(self, device_index):
        return

    def current_device(self):
        return 0

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        return 1

    def synchronize(self, device_index=None):
        return

    # RNG APIs
    def random(self):
        return torch.random

    def set_rng_state(self, new_state, device_index=None):
        return torch.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        return torch.manual_seed(seed)

    def initial_seed(self, seed):
        return torch.initial_seed()

    def default_generator(self, device_index):
        return torch.default_generator

    # Streams/Events
    @property
    def Stream(self):
        return None

    def StreamContext(self, stream):
        return None

    def stream(self, stream):
        return None

    def current_stream(self, device_index=None):
        return None

    def default_stream(self, device_index=None):
        return None

    @property
    def Event(self):
        return None

    # Memory management
    def empty_cache(self):
        return

    def memory_allocated(self, device_index=None):
        return 1

    def max_memory_allocated(self, device_index=None):
        return 1

    def reset_max_memory_allocated(self, device_index=None):
        return

    def memory_cached(self, device_index=None):
        return 1

    def max_memory_cached(self, device_index=None):
        return 1

    def reset_max_memory_cached(self, device_index=None):
        return

    def memory_stats(self, device_index=None):
        return {}

    def reset_peak_memory_stats(self, device_index=None):
        return

    def memory_reserved(self, device_index=None):
        return 1

    def max_memory_reserved(self, device_index=None):
        return 1

    def total_memory(self, device_index=None):
        return 1 << 30

    # Misc
    def amp(self):
        return torch.cpu.amp

    def is_available(self):
        return True

    def range_push(self, msg):
        return

    def range_pop(self):
        return

    def lazy_call(self, callback):
        return callback()

    def communication_backend_name(self):
        return self._communication_backend_name

    def is_bf16_supported(self):
        return True

    def is_fp16_supported(self):
        return True

    # Tensor operations
    @property
    def BFloat16Tensor(self):
        return torch.BFloat16Tensor

    @property
    def ByteTensor(self):
        return torch.ByteTensor

    @property
    def DoubleTensor(self):
        return torch.DoubleTensor

    @property
    def FloatTensor(self):
        return torch.FloatTensor

    @property
    def HalfTensor(self):
        return torch.HalfTensor

    @property
    def IntTensor(self):
        return torch.IntTensor

    @property
    def LongTensor(self):
        return torch.LongTensor

    def pin_memory(self, tensor):
        return tensor

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    # Op builders
    def op_builder_dir(self):
        return "ds_outsider.op_builder"

    def create_op_builder(self, class_name):
        builder_class = self.get_op_builder(class_name)
        if builder_class is not None:
            return builder_class()
        return None

    def get_op_builder(self, class_name):
        builder_module = importlib.import_module(self.op_builder_dir())
        return getattr(builder_module, class_name, None)

    def build_extension(self):
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
