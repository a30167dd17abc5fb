"""The accelerator that core's conformance suite asks for kernels: the card's if there is one, else the emulation's."""

import os

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.ops import registry
from ds_ext_cuda.accelerator import CUDA_Accelerator
from ds_ext_cuda.op_builder import builders


def _emulated(kind, base):
    """The builder class `kind`, built for the host."""

    class Emulated(base):
        BUILD_VAR, NAME, op_namespace = kind.BUILD_VAR, kind.NAME, kind.op_namespace

        def __init__(self):
            kernel = kind()
            super().__init__(kernel.name, kernel.sources(), kernel.op_namespace, kernel.register_fakes)

    return type(kind.__name__, (Emulated,), {})


@pytest.fixture(scope="session")
def accelerator_with_kernels(emulated_builder):
    if torch.cuda.is_available() and os.environ.get("DS_CUDA_EMULATED") != "1":
        return CUDA_Accelerator()
    kinds = {name: _emulated(kind, emulated_builder) for name, kind in builders().items()}

    class Host(PlainAccelerator):
        def get_op_builder(self, class_name):
            return kinds.get(class_name)

    return Host()


@pytest.fixture
def in_force(accelerator_with_kernels):
    before = get_accelerator()
    set_accelerator(accelerator_with_kernels)
    registry.reset()
    yield
    set_accelerator(before)
    registry.reset()
