"""The CUDA accelerator does what every accelerator has to do, where there is a GPU."""

import pytest
from ds_ext_cuda.plugin import ds_probe

if not ds_probe().available:
    pytest.skip(f"needs a GPU: {ds_probe().reason}", allow_module_level=True)

from deepspeed.testing.suite import *  # noqa: E402, F403
