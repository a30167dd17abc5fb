"""What core's conformance suite asks of kernels, asked of these: through the fronts, on a CPU as the device."""

import pytest
from deepspeed.testing.suite import fixtures, test_op_builders, test_optimizer_kernels, test_tensor_kernels

device = fixtures.device
accelerator = fixtures.accelerator

for _theme in (test_op_builders, test_optimizer_kernels, test_tensor_kernels):
    globals().update({name: test for name, test in vars(_theme).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def _in_force(on_device):
    """The accelerator with this extension's builders."""
