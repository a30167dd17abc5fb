"""A vendor's class as one wrote it for DeepSpeed in 2023: it answers everything itself and knows no newer method."""

import os

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class OLD_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "old"
        self._communication_backend_name = "oldccl"

    def is_synchronized_device(self):
        return False

    def device_name(self, device_index=None):
        if device_index is None:
            return "old"
        return f"old:{device_index}"

    def device(self, device_index=None):
        return None

    def set_device(self, device_index):
        os.environ["OLD_DEVICE"] = str(device_index)

    def current_device(self):
        return int(os.environ.get("OLD_DEVICE", "0"))

    def current_device_name(self):
        return f"old:{self.current_device()}"

    def device_count(self):
        return 8

    def synchronize(self, device_index=None):
        pass

    def random(self):
        return torch.random

    def manual_seed(self, seed):
        pass

    def initial_seed(self, seed):
        return seed

    @property
    def Stream(self):
        return None

    def memory_allocated(self, device_index=None):
        return 1

    def memory_reserved(self, device_index=None):
        return 2

    def is_available(self):
        return True

    def communication_backend_name(self):
        return self._communication_backend_name

    def is_bf16_supported(self):
        return True

    def is_fp16_supported(self):
        return False

    def pin_memory(self, tensor):
        return tensor

    def on_accelerator(self, tensor):
        return str(tensor.device).startswith("old")

    def op_builder_dir(self):
        return "old_extension.op_builder"

    def create_op_builder(self, class_name):
        return (class_name, "made")

    def get_op_builder(self, class_name):
        return class_name


class OLD_Accelerator_Calling_Super(OLD_Accelerator):
    def __init__(self):
        super(OLD_Accelerator, self).__init__()
        super().__init__()


@pytest.mark.parametrize("kind", [OLD_Accelerator, OLD_Accelerator_Calling_Super])
def test_its_own_answers_win_and_newer_methods_are_answered_by_the_base(shelf, monkeypatch, kind):
    monkeypatch.delenv("OLD_DEVICE", raising=False)
    set_accelerator(kind())
    acc = get_accelerator()
    assert (acc.device_name(), acc.device_name(1), acc.current_device_name()) == ("old", "old:1", "old:0")
    assert (acc.device_count(), acc.communication_backend_name()) == (8, "oldccl")
    assert acc.create_op_builder("FusedAdamBuilder") == ("FusedAdamBuilder", "made")
    assert acc.op_builder_dir() == "old_extension.op_builder"
    # methods that came later
    assert acc.resolves_data_dependency() is False
    assert acc.use_host_timers() is False
    assert acc.supported_dtypes() == [torch.float32, torch.bfloat16]
    assert acc.memory_cached() == 2
    assert acc.visible_devices_envs() == []
    assert acc.get_compile_backend() == "inductor"
    acc.set_compile_backend("eager")
    assert acc.get_compile_backend() == "eager"


def test_a_plugin_may_bring_it(shelf):
    class Registered_Accelerator(OLD_Accelerator):
        def __init__(self):
            super().__init__()
            self._name = "meta"  # a device that torch knows, as a vendor's package registers its own

    shelf.put("old", build=Registered_Accelerator)
    assert type(get_accelerator()) is Registered_Accelerator


class PinsByTorchsHook(DeepSpeedAccelerator):
    """As a class for DeepSpeed 0.19.6 says how memory is pinned: by the one method below the public ones."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self):
        self.pinned = []

    def _torch_pin_memory(self, tensor):
        copy = tensor.clone()
        self.pinned.append(copy.data_ptr())
        return copy

    def _torch_is_pinned(self, tensor):
        return tensor.data_ptr() in self.pinned


def test_a_class_that_only_says_how_torch_pins_is_used():
    accelerator, host = PinsByTorchsHook(), torch.arange(6.0).view(2, 3)
    pinned = accelerator.pin_memory(host)
    assert torch.equal(pinned, host)
    assert accelerator.is_pinned(pinned)
    assert accelerator.pin_memory(pinned) is pinned
    assert accelerator.pin_memory(host, make_copy=False).shape == (2, 3)
    assert accelerator.pin_memory(host, match_shape=False).shape == (6,)
    assert accelerator.pin_memory(host, align_bytes=512).data_ptr() % 512 == 0
    assert accelerator.pin_empty(2, 5, dtype=torch.float16).shape == (2, 5)
    assert accelerator.pin_empty((3,), dtype=torch.int32).dtype is torch.int32
    assert accelerator.pin_empty_like(host, dtype=torch.bfloat16).dtype is torch.bfloat16
    accelerator.unpin_memory(pinned)


def test_what_newer_versions_ask_is_answered():
    accelerator = PinsByTorchsHook()
    assert (accelerator.is_fp64_supported(), accelerator.prefer_triton_grouped_mm()) == (True, False)
    assert (accelerator.pin_memory_alignment(), accelerator.is_current_stream_capturing()) == (1, False)
    assert not accelerator.register_host_memory(4096, 4096)
    assert not accelerator.unregister_host_memory(4096)
    accelerator.range_push("a", domain="b", category="c")
    accelerator.range_pop(domain="b")
