"""A table of which live engine trains a parameter. `Sharding` writes it; `safe_get_*` and new engines read it.

A parameter belongs to its engine until `destroy()`, or until the engine is collected: nothing here keeps it alive.
"""

import gc
import sys
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepspeed.errors import ConfigError, counted
from deepspeed.log import warn_once

if TYPE_CHECKING:
    from deepspeed.zero.sharding import Sharding

#: id of a parameter -> its manager; a Sharding keeps its parameters alive, so the id stays unique while it lives
_managers: "weakref.WeakValueDictionary[int, Sharding]" = weakref.WeakValueDictionary()


def register(sharding: "Sharding") -> None:
    """Record that `sharding` manages the gradients of its parameters from now on."""
    for param in sharding.units.params:
        _managers[id(param)] = sharding


def release(sharding: "Sharding") -> None:
    """Undo `register`."""
    for param in sharding.units.params:
        if _managers.get(id(param)) is sharding:
            del _managers[id(param)]


def manager_of(param: Tensor) -> "Sharding | None":
    """Return the sharding whose engine manages `param`, or None."""
    return _managers.get(id(param))


def refuse_managed(module: torch.nn.Module, optimizer: Optimizer | None, model_dtype: torch.dtype | None) -> None:
    """Check `module` before an engine is built around it: a live engine may manage some of its parameters.

    Two engines cannot train one parameter, because its gradient comes once. An engine may share a parameter if its
    optimizer does not have the parameter (or it has no optimizer and evaluates), and if it does not change the
    parameter's dtype. An engine without optimizer releases its parameters to an engine that trains them.

    Args:
        model_dtype: dtype that the new engine would give to all parameters; None: it leaves them.

    Raises:
        ConfigError: names a parameter and what to do.
    """
    if not any(manager_of(param) for param in module.parameters()):
        return
    gc.collect()  # an engine dropped without destroy() is in reference cycles
    groups = optimizer.param_groups if optimizer is not None else []
    trained = {id(param) for group in groups for param in group["params"] if param.requires_grad}
    for manager in {manager for group in groups for param in group["params"] if (manager := manager_of(param))}:
        if manager.optimizer is None:  # it only evaluates
            manager.retire()
    managed = [(name, param) for name, param in module.named_parameters() if manager_of(param)]
    if both := [name for name, param in managed if id(param) in trained]:
        raise ConfigError(
            f"initialize: found {counted(len(both), 'parameter')} of the model, such as {both[0]!r}, that another "
            "engine trains; call destroy() on that engine first (under Accelerate `accelerator.free_memory()`, under "
            "Lightning `trainer.strategy.deepspeed_engine.destroy()`), or give the new one no optimizer if it only "
            "evaluates"
        )
    if cast := [(name, param) for name, param in managed if model_dtype not in (None, param.dtype)]:
        name, param = cast[0]
        raise ConfigError(
            f"initialize: asked for a model in {model_dtype}, and another engine trains the parameter {name!r} in "
            f"{param.dtype}; use the same precision for both, or call destroy() on that engine first"
        )


def refuse_unshaped(named: Iterable[tuple[str, Tensor]], asked: str) -> None:
    """Refuse parameters of torch's lazy layers before their first forward.

    Args:
        named: parameters and buffers, with their names.
        asked: name of the function that the user called.

    Raises:
        ConfigError: names one of them.
    """
    name = next((name for name, tensor in named if is_lazy(tensor)), None)
    if name is not None:
        raise ConfigError(
            f"{asked}: found {name!r}, without a shape: a lazy layer learns it in its first forward; call the model "
            "once with a batch, under torch.no_grad(), before"
        )


def refuse_meta(named: Iterable[tuple[str, Tensor]], asked: str) -> None:
    """Refuse tensors on the meta device, which have no values.

    Args:
        named: parameters and buffers, with their names.
        asked: name of the function that the user called.

    Raises:
        ConfigError: names one of them.
    """
    names = [name for name, tensor in named if tensor.is_meta]
    if names:
        raise ConfigError(
            f"{asked}: found {counted(len(names), 'parameter or buffer', 'parameters or buffers')}, such as "
            f"{names[0]!r}, on the meta device, which keeps "
            'no values; build the model in deepspeed.zero.Init, outside of torch.device("meta"), or allocate it '
            'with model.to_empty(device="cpu") and set its values before'
        )


def refuse_inference(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that `torch.inference_mode` made: autograd takes none, and none can be sharded.

    Raises:
        ConfigError: names one of them.
    """
    for name, tensor in named:
        if tensor.is_inference():
            raise ConfigError(
                f"initialize: parameter {name!r} was made within torch.inference_mode(), where no parameter can be "
                "trained or sharded; make the model outside of it, and evaluate in torch.no_grad() where one is needed"
            )


def warn_of_shared_memory(module: torch.nn.Module, stage: int) -> None:
    """Warn once about parameters that share memory, before an engine of `stage` is built around `module`. Plain torch
    changes such parameters together, but sharding copies each elsewhere, so they are then trained apart."""
    if stage > 0 and (names := _overlapping(module)) is not None:
        warn_once(
            f"initialize: the parameters {names[0]!r} and {names[1]!r} share memory, and zero_optimization.stage "
            f"{stage} gives each its own: from now on a change of one does not change the other. For one weight under "
            "two names use one nn.Parameter for both, as `decoder.weight = encoder.weight`"
        )


def _overlapping(module: torch.nn.Module) -> tuple[str, str] | None:
    """Return the names of two parameters that share memory, or None. Parameters that are not dense (every other column
    of a matrix, for example) are skipped, because their first and last element do not show an overlap."""
    ends: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in module.named_parameters():
        has_own = param.numel() > 0 and param.layout is torch.strided and not is_traceable_wrapper_subclass(param)
        if has_own and torch.ops.aten.is_non_overlapping_and_dense(param):
            start = param.data_ptr()
            ends.setdefault(param.untyped_storage().data_ptr(), []).append((start, start + param.nbytes, name))
    for ranges in map(sorted, ends.values()):
        for (_, end, name), (start, _, other) in pairwise(ranges):
            if start < end:
                return name, other
    return None


def refuse_sharded(module: torch.nn.Module, stage: int) -> None:
    """Check `module` before an engine of `stage` is built around it: `zero.Init` may have sharded the module.

    Raises:
        ConfigError: names a parameter and what to do.
    """
    sharded = [name for name, param in module.named_parameters() if getattr(param, "ds_unit", None) is not None]
    if sharded and stage != 3:
        raise ConfigError(
            f"initialize: zero_optimization.stage is {stage}, and zero.Init or an engine of stage 3 sharded "
            f"{counted(len(sharded), 'parameter')} of the model, such as {sharded[0]!r}; use stage 3, or build the "
            "model outside of zero.Init, and end an earlier engine with its destroy() before you drop it"
        )


def refuse_wrapped(model: torch.nn.Module, stage: int) -> None:
    """Refuse a `model` that another library wraps, before an engine of `stage` is built around it.

    Two libraries that average gradients take gradients from each other, which makes weights wrong. Parameters of
    TorchScript modules cannot be replaced by other objects.

    Raises:
        ConfigError: names the module and what to do.
    """
    kinds: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel,)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        kinds += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        where = f"{name!r} of the model" if name else "the model"
        scripted = module.parameters() if isinstance(module, torch.jit.ScriptModule) else ()
        if any(param.requires_grad or stage == 3 for param in scripted):
            raise ConfigError(
                f"initialize: {where} was made by torch.jit, whose parameters the engine cannot hold; pass the module "
                "that was scripted or traced, and call engine.compile() for speed"
            )
        if isinstance(module, kinds):
            kind = next(cls.__name__ for cls in type(module).__mro__ if cls in kinds)
            raise ConfigError(
                f"initialize: {where} is a {kind}, which averages gradients over the ranks, as the engine does; pass "
                "the module inside it, before it is wrapped"
            )
