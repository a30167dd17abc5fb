"""What core's conformance suite asks of kernels, asked of these: through the fronts that users call."""

import pytest
from deepspeed.testing.suite import (
    fixtures,
    test_generation_kernels,
    test_op_builders,
    test_optimizer_kernels,
    test_tensor_kernels,
)

device = fixtures.device
accelerator = fixtures.accelerator

for _theme in (test_op_builders, test_optimizer_kernels, test_tensor_kernels, test_generation_kernels):
    globals().update({name: test for name, test in vars(_theme).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def _in_force(in_force):
    """The accelerator with these kernels."""
