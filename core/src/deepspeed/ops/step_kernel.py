"""Kernels of optimizer steps as the fronts use them: which operator, for which tensors.

Called by `kernel_optimizer.py`, at each step. An operator takes lists of tensors and updates all of them in one call.
May import `ops.registry` and below.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
FP32 = frozenset((torch.float32,))
PLAIN = frozenset((Tensor, nn.Parameter))


class StepKernel(NamedTuple):
    """One operator, and the kind of device whose tensors it takes."""

    operator: Callable[..., Any]
    device_type: str

    def takes(self, tensors: Iterable[Tensor], dtypes: frozenset[torch.dtype] = FLOATS) -> bool:
        """Whether all are what the operator reads: plain, dense and contiguous, of one of `dtypes`, on its device."""
        strided, is_host, device_type = torch.strided, self.device_type == "cpu", self.device_type
        for one in tensors:  # written out, because it runs for every tensor of every step
            if one.dtype not in dtypes or type(one) not in PLAIN or one.layout is not strided:
                return False
            if not one.is_contiguous() or not (one.is_cpu if is_host else one.device.type == device_type):
                return False
        return True


def step_kernel(op: str | None, operator: str) -> StepKernel | None:
    """The operator that steps for `op`, or None: then the front runs its torch reference.

    Args:
        op: as `registry.kernel` takes it, for example "cpu_adam"; None: there is none.
        operator: its name in the loaded op, for example "adam_step_".
    """
    loaded = registry.kernel(op) if op is not None else None
    if loaded is None:
        return None
    on_host = op in registry.OPS and registry.OPS[op].on_host
    device_type = "cpu" if on_host else torch.device(get_accelerator().device_name()).type
    packet = getattr(loaded, operator)
    return StepKernel(getattr(packet, "default", packet), device_type)  # the overload saves torch a search per call


def host_numbers(**values: Any) -> dict[str, float] | None:
    """Options as an operator takes them; None when one is a tensor on a device, which a step must not wait for."""
    for name, value in values.items():
        if type(value) is not float:  # they nearly always are
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return None
            values[name] = float(value)
    return values


def host_step_count(state: dict[str, Any]) -> Tensor:
    """`state["step"]` as operators count it: a 0-D fp32 tensor on the host, whatever a checkpoint held."""
    step = state["step"]
    if not isinstance(step, Tensor) or step.dtype is not torch.float32 or not step.is_cpu or step.dim():
        step = state["step"] = torch.tensor(float(step), dtype=torch.float32)
    return step
