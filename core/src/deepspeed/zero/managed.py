"""This table says which live engine trains a parameter. `Sharding` writes it; `safe_get_*` and new engines read it.

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

#: id of a parameter -> its manager; a Sharding keeps its parameters alive, so an id stays unique as long as it lives
_managers: "weakref.WeakValueDictionary[int, Sharding]" = weakref.WeakValueDictionary()


def register(sharding: "Sharding") -> None:
    """`sharding` takes the gradients of its parameters from now on."""
    for param in sharding.units.params:
        _managers[id(param)] = sharding


def release(sharding: "Sharding") -> None:
    """Take `register` back."""
    for param in sharding.units.params:
        if _managers.get(id(param)) is sharding:
            del _managers[id(param)]


def manager_of(param: Tensor) -> "Sharding | None":
    """The sharding whose engine manages `param`."""
    return _managers.get(id(param))


def refuse_managed(module: torch.nn.Module, optimizer: Optimizer | None, model_dtype: torch.dtype | None) -> None:
    """Called before an engine is built around `module`, of which a live engine may manage parameters.

    Two engines cannot train one parameter: its gradient comes once. An engine whose optimizer does not have it (or
    that has no optimizer, to evaluate) may share it, as long as it does not change the parameter's dtype. An engine
    without optimizer leaves the parameters to one that trains them.

    Args:
        model_dtype: dtype that the new engine would give to all parameters; None leaves them.

    Raises:
        ConfigError: names a parameter and what to do.
    """
    if not any(manager_of(param) for param in module.parameters()):
        return
    gc.collect()  # an engine that was dropped without destroy() is in reference cycles
    groups = optimizer.param_groups if optimizer is not None else []
    trained = {id(param) for group in groups for param in group["params"] if param.requires_grad}
    for manager in {manager for group in groups for param in group["params"] if (manager := manager_of(param))}:
        if manager.optimizer is None:  # it evaluates, and cannot train
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
    """Refuse what torch's lazy layers have before their first forward.

    Args:
        named: parameters and buffers, with their names.
        asked: what the user called.

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
        asked: what the user called.

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


def warn_of_shared_memory(module: torch.nn.Module, stage: int) -> None:
    """Called before an engine of `stage` is built around `module`: sharding puts each parameter elsewhere, so that two
    with memory in common, which plain torch changes together, are then trained apart. It is said once."""
    if stage > 0 and (names := _overlapping(module)) is not None:
        warn_once(
            f"initialize: the parameters {names[0]!r} and {names[1]!r} share memory, and zero_optimization.stage "
            f"{stage} gives each its own: from now on a change of one does not change the other. For one weight under "
            "two names use one nn.Parameter for both, as `decoder.weight = encoder.weight`"
        )


def _overlapping(module: torch.nn.Module) -> tuple[str, str] | None:
    """Two parameters with memory in common. Those that are not dense, such as every other column of a matrix, are left
    out: their first and last element do not tell."""
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
    """Called before an engine of `stage` is built around `module`, which `zero.Init` may have sharded.

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
    """Called before an engine of `stage` is built around `model`.

    Two that average gradients take them from one another, so that weights are wrong. TorchScript's modules have
    parameters that no other object can be put in place of.

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
