"""The one line that `initialize` prints: what trains, where, and by which kernels."""

from typing import TYPE_CHECKING

import torch

from deepspeed import comm
from deepspeed._version import __version__
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.values import all_gather_values, dtype_name
from deepspeed.errors import counted
from deepspeed.ops import registry
from deepspeed.ops.optimizer import KernelOptimizer
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import EXPERT_PREFIX, expert_group_of, part_held
from deepspeed.pipe.module import PipelineModule
from deepspeed.precision import Autocast, Precision
from deepspeed.zero.param_unit import shape_of

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine


def start_line(engine: "DeepSpeedEngine") -> str:
    """Return ranks, device, backend, ZeRO stage, dtype, parameters, the optimizer with its kernel, and its clipping.

    All ranks call it when the sharding is attached: by then the kernel is loaded, and the ranks have agreed on
    whether to use it. With several pipeline stages it is a collective of them.
    """
    facts = [
        _ranks(engine.mesh),
        f"device {get_accelerator().device_name()}",
        f"backend {torch.distributed.get_backend()}",
        f"ZeRO stage {engine.sharding.stage}",
        _dtype(engine.precision),
        _parameters(engine),
        _optimizer(engine),
    ]
    if engine.basic_optimizer is not None:
        facts.append(_clipping(engine.precision))
    return f"deepspeed {__version__}: {', '.join(facts)}"


def _ranks(mesh: Mesh) -> str:
    sizes = ", ".join(f"{axis} {mesh.size(axis)}" for axis in ("pp", "tp", "sp") if mesh.size(axis) > 1)
    return counted(comm.get_world_size(), "rank") + (f" ({sizes})" if sizes else "")


def _dtype(precision: Precision) -> str:
    if isinstance(precision, Autocast):
        return f"fp32 with autocast to {dtype_name(precision.dtype)}"
    return precision.name


def _clipping(precision: Precision) -> str:
    return f"gradients clipped to norm {precision.clip_norm:g}" if precision.clip_norm > 0 else "gradients not clipped"


def _parameters(engine: "DeepSpeedEngine") -> str:
    """Say how many parameters the whole model has, and how many are trained. A collective of pipeline stages."""
    module, mesh = engine.module, engine.mesh
    elsewhere = _counted_by_another_stage(module, mesh.rank("pp"))
    own = [param for param in module.parameters() if id(param) not in elsewhere]
    numels = {id(param): _whole_numel(param, mesh.size("tp")) for param in own}
    counts = [sum(numels.values()), sum(numels[id(param)] for param in own if param.requires_grad)]
    if mesh.size("pp") > 1:
        counts = [sum(each) for each in zip(*all_gather_values(counts, mesh.group("pp")), strict=True)]
    numel, trained = counts
    return f"{numel:,} parameter{'' if numel == 1 else 's'}" + (f" ({trained:,} trained)" if trained != numel else "")


def _whole_numel(param: torch.Tensor, tp_size: int) -> int:
    """Return the number of elements of the parameter on all ranks that divide the model."""
    part = part_held(param)
    numel = (shape_of(param) if part is None else part.shape).numel()
    group = expert_group_of(param)
    if group is not None and (part is None or part.name or part.is_whole):  # else its shape includes all experts
        numel *= int(group.removeprefix(EXPERT_PREFIX))
    elif part is None and getattr(param, "tensor_model_parallel", False):  # a layer of the user's own
        numel *= tp_size
    return numel


def _counted_by_another_stage(module: torch.nn.Module, stage: int) -> set[int]:
    """Return the ids of the parameters that an earlier pipeline stage has too."""
    if not isinstance(module, PipelineModule):
        return set()
    later = [key for key, stages in module.tied_stages().items() if key in module.tied_modules and stages[0] < stage]
    return {id(param) for key in later for param in module.tied_modules[key].parameters()}


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
