"""The MPS accelerator does what every accelerator has to do, where there is a Metal device."""

import pytest
import torch
from ds_ext_mps.plugin import ds_probe

if not torch.backends.mps.is_available():
    pytest.skip(f"needs a Metal device; here is {ds_probe().reason}", allow_module_level=True)

from deepspeed.testing.suite import *  # noqa: E402, F403
