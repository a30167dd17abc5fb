"""The one line that `initialize` prints: what trains, where, and by which kernels."""

from typing import TYPE_CHECKING

import torch

from deepspeed import comm
from deepspeed._version import __version__
from deepspeed.accelerator import get_accelerator
from deepspeed.config.precision import dtype_name
from deepspeed.ops import registry
from deepspeed.ops.kernel_optimizer import KernelOptimizer
from deepspeed.precision import Autocast, Precision
from deepspeed.zero.param_unit import shape_of

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine


def start_line(engine: "DeepSpeedEngine") -> str:
    """Ranks, device, backend, ZeRO stage, dtype, number of parameters, the optimizer with its kernel, and clipping.

    Called when the sharding is attached: by then the kernel was loaded, and the ranks have agreed on whether to use it.
    """
    num_ranks = comm.get_world_size()
    facts = [
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''}",
        f"device {get_accelerator().device_name()}",
        f"backend {torch.distributed.get_backend()}",
        f"ZeRO stage {engine.sharding.stage}",
        _dtype(engine.precision),
        _parameters(engine),
        _optimizer(engine),
        _clipping(engine.precision),
    ]
    return f"deepspeed {__version__}: {', '.join(facts)}"


def _dtype(precision: Precision) -> str:
    if isinstance(precision, Autocast):
        return f"fp32 with autocast to {dtype_name(precision.dtype)}"
    return precision.name


def _clipping(precision: Precision) -> str:
    return f"gradients clipped to norm {precision.clip_norm:g}" if precision.clip_norm > 0 else "gradients not clipped"


def _parameters(engine: "DeepSpeedEngine") -> str:
    parameters = list(engine.module.parameters())
    numel = sum(shape_of(parameter).numel() for parameter in parameters)
    trained = sum(shape_of(parameter).numel() for parameter in parameters if parameter.requires_grad)
    return f"{numel:,} parameters" + (f" ({trained:,} trained)" if trained != numel else "")


def _optimizer(engine: "DeepSpeedEngine") -> str:
    optimizer = engine.basic_optimizer
    if optimizer is None:
        return "no optimizer"
    name = type(optimizer).__name__
    if not isinstance(optimizer, KernelOptimizer) or optimizer.kernel_op is None:
        return name
    op = optimizer.kernel_op
    builder = registry.resolve(op).builder if optimizer.uses_kernel else None
    if builder is None:
        return f"{name} on torch's operators"
    return f"{name} by the kernel {op} of {type(builder).__module__.partition('.')[0]}"
