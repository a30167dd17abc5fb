"""`state_dict()` and `load_state_dict()` of a module whose parameters are sharded (stage 3, `zero.Init`).

A sharded parameter is an empty tensor, so that a plain `state_dict()` would be saved without weights, and a load would
end in torch's words about shapes, one for each parameter. `watch` puts hooks on the modules: a plain `state_dict()`
says once how to get whole weights, and a load of sharded parameters is refused with the way to do it. Neither can
gather by itself, since scripts call both on one rank alone.

`get_model_state_dict` and `set_model_state_dict` of `torch.distributed.checkpoint.state_dict` are collectives: all
ranks call them. They get whole weights, and what they set is kept in the shards and in the fp32 master weights.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import StateError
from deepspeed.log import warn_once
from deepspeed.zero.managed import manager_of, note_write
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of, whole

_COLLECTIVE = "torch.distributed.checkpoint.state_dict"
#: a method of libraries' models that asks for names of what it will load, before there is anything to lose
_NAMES_ONLY = "from_pretrained"
#: attribute of a module that has the hooks
_MARK = "_ds_state_dict_hooks"
#: attribute of our hooks, which do not translate what is loaded
IS_OURS = "_is_of_zero3"

_takes_empty = False


@contextmanager
def as_it_is() -> Iterator[None]:
    """Let a `state_dict` or `load_state_dict` of the engine's own run inside, in which sharded parameters are empty."""
    global _takes_empty
    former, _takes_empty = _takes_empty, True
    try:
        yield
    finally:
        _takes_empty = former


def watch(module: Module) -> None:
    """Put the hooks on `module` and the modules below it that own sharded parameters. Idempotent."""
    for each in module.modules():
        if _MARK not in each.__dict__ and any(unit_of(param) is not None for param in _own(each).values()):
            handles = [each._register_state_dict_hook(_after_collection)]
            handles.append(each.register_load_state_dict_pre_hook(_before_load))
            each.__dict__[_MARK] = handles


def unwatch(module: Module) -> None:
    """Take `watch` back where no parameter is sharded any more."""
    for each in module.modules():
        if all(unit_of(param) is None for param in _own(each).values()):
            handles: Sequence[RemovableHandle] = each.__dict__.pop(_MARK, ())
            for handle in handles:
                handle.remove()


def _after_collection(module: Module, state: Any, prefix: str, metadata: Any) -> None:
    """Called by `state_dict` when it has what `module` owns."""
    if _takes_empty:
        return
    named = {prefix + name: param for name, param in _own(module).items() if _is_released_again(param)}
    named = {name: param for name, param in named.items() if name in state and not isinstance(state[name], Parameter)}
    if named and is_called_by_collective():
        for name, param in named.items():
            with whole(param) as value:
                state[name] = value.clone()
        return
    kept = [name for name, param in named.items() if not _is_empty(param)]  # of memory that is given back
    for name in kept:
        state[name] = named[name].detach().clone()
    if len(kept) < len(named) and not _is_called_by(lambda frame: frame.f_code.co_name == _NAMES_ONLY):
        warn_once(
            "state_dict: sharded parameters are empty tensors in it (zero_optimization.stage 3). For whole weights "
            "call engine.save_16bit_model(folder); or on all ranks get_model_state_dict(engine.module) of "
            "torch.distributed.checkpoint.state_dict; or state_dict() inside "
            "deepspeed.zero.GatheredParameters(module.parameters())"
        )


def _before_load(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Called by `load_state_dict` before `module` takes what it owns."""
    if _takes_empty:
        return
    own = {name: param for name, param in _own(module).items() if isinstance(state.get(prefix + name), Tensor)}
    if is_called_by_collective():
        for unit in {unit for param in own.values() if (unit := unit_of(param)) is not None}:
            _release(unit)
        for name, param in own.items():
            if _is_empty(param):
                _set_whole(param, prefix + name, state[prefix + name])
                state[prefix + name] = param.detach()
        return
    for name, param in own.items():
        if _is_empty(param):
            raise StateError(
                f"load_state_dict: the parameter {prefix + name!r} is sharded (zero_optimization.stage 3), so it "
                "cannot take a value here. Load a checkpoint with engine.load_checkpoint(folder); or on all ranks call "
                "set_model_state_dict(engine.module, weights) of torch.distributed.checkpoint.state_dict; or load "
                "inside deepspeed.zero.GatheredParameters(module.parameters(), modifier_rank=0)"
            )


setattr(_before_load, IS_OURS, True)


def _set_whole(param: Any, name: str, value: Tensor) -> None:
    """Keep this rank's elements of a whole value, in the shard and in its master weights."""
    unit: ParamUnit = param.ds_unit
    if value.shape != param.ds_shape:
        raise StateError(
            f"load_state_dict: found a value of shape {tuple(value.shape)} for the parameter {name!r}, which has the "
            f"shape {tuple(param.ds_shape)}"
        )
    note_write()
    unit.set_shard_of(param, value.to(unit.device))
    unit.expect_load(param.ds_index)
    if (sharding := manager_of(param)) is not None:
        sharding.states.wait_for_copy()
        group, place = sharding.units.find(param)
        group.take_changes(place)


def _release(unit: ParamUnit) -> None:
    """Make parameters empty that were left whole, to be used again soon."""
    if unit.status is ZeroParamStatus.NOT_AVAILABLE or unit.num_contexts > 0:
        return
    if unit.hooks is not None:
        unit.hooks.param_coordinator.release_all()
    unit.release()


def _own(module: Module) -> dict[str, Parameter]:
    """The module's own parameters, not seen as reads of them."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def _is_released_again(param: Any) -> bool:
    """Whether it is sharded, and whole for a module at most, not for a context of the user's."""
    unit = unit_of(param)
    return unit is not None and unit.is_sharded and unit.num_contexts == 0


def _is_empty(param: Any) -> bool:
    unit = unit_of(param)
    return unit is not None and unit.is_sharded and param.shape != param.ds_shape


def is_called_by_collective() -> bool:
    """Whether a function of `torch.distributed.checkpoint.state_dict` is running."""
    return _is_called_by(lambda frame: frame.f_globals.get("__name__") == _COLLECTIVE)


def _is_called_by(tells: Callable[[FrameType], bool]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if tells(frame):
            return True
        frame = frame.f_back
    return False
