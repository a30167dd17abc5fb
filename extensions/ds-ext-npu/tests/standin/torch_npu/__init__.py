"""A stand-in for the vendor's package: importing it makes the simulated device `npu`, and gives the operators we call.

It does what `import torch_npu` does: PrivateUse1 is renamed, `torch.npu` and the library `hccl` are registered, and the
operators of `torch.ops.npu` are names here. The device is `ds_ext_sim` (core/tests/simulated), which has to be on
sys.path; schemas are the vendor's own (`vendor_api.json`), so that a call which they do not allow is refused by torch.
"""

import types

import torch
from ds_ext_sim import torch_sim

torch_sim.install(name="npu", library="hccl", visible_devices_env="ASCEND_RT_VISIBLE_DEVICES")

from torch_npu import operators  # noqa: E402 - their tensors are on the device

__version__ = "2.13.0+standin"

npu = torch.npu
npu.init = lambda: None
npu.utils = types.SimpleNamespace(get_cann_version=lambda module="CANN": f"8.5.0 of {module}")

globals().update({name: getattr(torch.ops.npu, name) for name in operators.define()})
