"""State that an optimizer has when it is given to `initialize`, divided like the parameters it belongs to.

Called by `holding.py` when a unit is laid out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.errors import ConfigError
from deepspeed.zero.flat_group import FlatGroup, ParamShard
from deepspeed.zero.param_unit import shape_of

#: states that are one number for the whole parameter, which for one of no dimensions look like its moments
_NUMBERS = ("step", "mu_product")


def adopt_state(optimizer: Optimizer, group: FlatGroup) -> None:
    """Give each shard its share of the state that the user's optimizer has for the whole parameter, if any.

    Adagrad makes state when it is built; others have it when they stepped before `initialize`.

    Raises:
        ConfigError: for a state, other than Adagrad's, that was made of an empty parameter, which `zero.Init` had
            sharded.
    """
    whole = {id(param): optimizer.state.pop(param) for param in group.params if param in optimizer.state}
    for shard in group.shards:
        state = whole.get(id(group.params[shard.fragment.param]))
        if state:
            shape = shape_of(group.params[shard.fragment.param])
            optimizer.state[shard.master] = {
                name: _initial_state(optimizer, name, shard) if _is_empty(value) else _share(name, value, shard, shape)
                for name, value in state.items()
            }


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _initial_state(optimizer: Optimizer, name: str, shard: ParamShard) -> Tensor:
    initial = optimizer.defaults.get("initial_accumulator_value")
    if name != "sum" or initial is None:
        raise ConfigError(
            f"initialize: {type(optimizer).__name__} was built with parameters that zero.Init had sharded, and made "
            f"its state {name!r} of empty tensors; name the optimizer in the configuration, or build it inside "
            "deepspeed.zero.GatheredParameters(model.parameters())"
        )
    return torch.full_like(shard.master, initial)


def _share(name: str, value: Any, shard: ParamShard, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or value.shape != shape or (value.dim() == 0 and name in _NUMBERS):
        return owned_copy(value, shard.master.device)
    start = shard.fragment.param_start
    values = value.detach().reshape(-1)[start : start + shard.fragment.numel]
    return values.to(shard.master.dtype, copy=True).view(shard.master.shape)


def owned_copy(value: Any, device: torch.device) -> Any:
    """A copy that the optimizer may change. Scalars, as Adam's `step`, stay where they were saved."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)
