"""`safe_get_*` and `safe_set_*` access one parameter's weight, gradient or optimizer state at any stage.

`..._full_...` functions use the whole parameter on every rank. `..._local_...` functions use the elements that this
rank's optimizer updates: a 1-D tensor, empty on a rank that has none of them. In stage 0 these are all elements (of
this rank's part, if the model itself is divided).

A parameter that is divided over tensor-parallel ranks, or as a stack of experts over expert-parallel ranks, is joined
if a mark of `parallel.model_part` describes the division; then all those ranks must call. An expert that is not in a
stack is a separate parameter, whole on the ranks that hold it: these ranks call.

Users call these functions for debugging and in methods that read gradients (AdaLoRA). All ranks call them together; for
gradients between `backward` and `step`. If no engine manages a parameter, its fp32 weight and states are None, and its
gradient is `param.grad`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.errors import StateError, counted, first_line
from deepspeed.zero.managed import manager_of
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.placement import GRADIENT, MASTER
from deepspeed.zero.redistribute import join_parts, own_part
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.states import note_write
from deepspeed.zero.unit import ParamShard, Unit

#: returns one tensor of a shard, or None if the shard has no such tensor
_Pick = Callable[[Sharding, ParamShard], Tensor | None]


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """Return the fp32 weight that the optimizer updates, in the parameter's shape; None if no engine manages it.

    A collective: all ranks call it, and all get the weight.
    """
    found = _find(param)
    return None if found is None else _whole(found, param, MASTER, _master)


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return the reduced gradient in fp32, averaged over ranks and still multiplied by the loss scale, or None.

    The gradient is a copy, widened if gradients are kept in a lower precision; `safe_set_full_grad` replaces it. A
    collective: all ranks call it between `backward` and `step`, and all get the gradient.
    """
    found = _find(param)
    if found is None:
        return param.grad
    sharding, unit, index = found
    sharding.gradients.collect_unseen_grads()
    sharding.gradients.reduce()
    holders = sharding.units.ranks.holders_of_parts(param)
    is_used = sharding.gradients.was_used[unit.first_index + index]
    gradient = _assemble(found, param, GRADIENT, _gradient) if is_used else None
    if gradient is not None:
        gradient = sharding.options.stage.shown_gradient(gradient)
    if holders is not None:
        gradient = join_parts(gradient, param, holders)
    return None if gradient is None else _widened(gradient, sharding.gradients.postsum_factor)


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return one optimizer state, such as "exp_avg", in the whole parameter's shape; None before the first step.

    A collective: all ranks call it, and all get the state.
    """
    found = _find(param)
    return None if found is None else _whole(found, param, optim_state_key, _picks(optim_state_key))


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Replace the weight, in fp32 and in the model's dtype. All ranks call it with the same `value`."""
    unit = unit_of(param)
    if unit is not None and unit.status is ZeroParamStatus.INFLIGHT:  # prefetched: peers still read the shard
        unit.finish()
    value = _scatter(param, value, "safe_set_full_fp32_param", MASTER, _master)
    with torch.no_grad():
        if unit is None or unit.status is ZeroParamStatus.AVAILABLE:
            param.copy_(value)
        if unit is not None and unit.is_sharded:
            unit.set_shard_of(param, value)


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace one state of the optimizer. All ranks call it with the same `value`.

    Raises:
        StateError: if the optimizer has no such state yet, as before the first step.
    """
    asked = "safe_set_full_optimizer_state"
    _scatter(param, value, asked, optim_state_key, _requires(asked, optim_state_key))


def safe_update_full_grad_vectorized(param_list: Sequence[Parameter], update_func: Callable[[Tensor], Tensor]) -> None:
    """Replace the reduced gradient of each parameter by `update_func(gradient)`; skip those without a gradient.

    All ranks call it with the same parameters, and `update_func` returns the same values on all ranks.
    """
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad))


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Replace the reduced gradient, in the form that `safe_get_full_grad` returns; the step clips by the new norm.

    All ranks call it with the same `value`. Any floating dtype is rounded to the dtype in which gradients are kept.
    """
    asked = "safe_set_full_grad"
    _replace_gradient(param, value, asked, _scatter)


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the fp32 weight, 1-D, copied."""
    found = _find(param)
    return None if found is None else _local(*found, MASTER, _master)


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return this rank's elements of `safe_get_full_grad`, 1-D, copied. All ranks call it."""
    found = _find(param)
    if found is None:
        return None if param.grad is None else param.grad.reshape(-1)
    sharding, unit, index = found
    sharding.gradients.collect_unseen_grads()
    sharding.gradients.reduce()
    if not sharding.gradients.was_used[unit.first_index + index]:
        return None
    gradient = _local(sharding, unit, index, GRADIENT, _gradient)
    if gradient is None:
        return None
    return _widened(sharding.options.stage.shown_gradient(gradient), sharding.gradients.postsum_factor)


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of one optimizer state, 1-D, copied; None if the rank has elements but no state yet,
    as before the first step."""
    found = _find(param)
    return None if found is None else _local(*found, optim_state_key, _picks(optim_state_key))


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the fp32 weight with `value`, 1-D as in `safe_get_local_fp32_param`. All ranks
    call it. The model's weights follow immediately in stage 0 and if they are sharded; otherwise with the next step. In
    fp32, where master and weight share memory, this rank's elements of the weight change immediately."""
    unit, sharding = unit_of(param), manager_of(param)
    if unit is not None and sharding is not None:
        sharding.release_gathered()  # what is gathered has the former value
    _set_local(param, value, "safe_set_local_fp32_param", MASTER, _master)
    assert sharding is not None
    if unit is not None:
        unit.set_local(param.ds_index, value.detach().reshape(-1))  # type: ignore[attr-defined]
    elif sharding.stage == 0:
        with torch.no_grad():
            param.copy_(value.view(param.shape))
    else:
        sharding.set_locally.add(param)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the reduced gradient with `value`, 1-D as in `safe_get_local_grad`. All ranks
    call it, and the step clips by the new norm."""
    _replace_gradient(param, value, "safe_set_local_grad", _set_local)


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of one state of the optimizer.

    Raises:
        StateError: if the optimizer has no such state yet, as before the first step.
    """
    asked = "safe_set_local_optimizer_state"
    _set_local(param, value, asked, optim_state_key, _requires(asked, optim_state_key))


def _replace_gradient(param: Parameter, value: Tensor, asked: str, write: Callable[..., Any]) -> None:
    """`write` is `_scatter` or `_set_local`."""
    sharding, unit, index = _managed(param, asked)
    sharding.gradients.collect_unseen_grads()
    sharding.gradients.reduce()
    value = value / sharding.gradients.postsum_factor if isinstance(value, Tensor) else value
    write(param, value, asked, GRADIENT, _gradient)
    sharding.gradients.were_replaced(unit.first_index + index)


def _widened(gradient: Tensor, factor: float) -> Tensor:
    """Return a new gradient multiplied by `factor`, at least in fp32."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide if factor == 1.0 else wide.mul_(factor)


def _managed(param: Parameter, asked: str) -> tuple[Sharding, Unit, int]:
    """Return what `_find` returns; raise KeyError if no engine manages `param`."""
    found = _find(param)
    if found is None:
        raise KeyError(f"{asked}: no engine manages this parameter of shape {tuple(shape_of(param))}")
    return found


def _find(param: Parameter) -> tuple[Sharding, Unit, int] | None:
    sharding = manager_of(param)
    if sharding is None:
        return None
    sharding.states.require("safe_get and safe_set of a parameter")
    if sharding.states.outside_changes is not None:
        sharding.states.outside_changes.take_of(param)
    return sharding, *sharding.units.find(param)


def _whole(found: tuple[Sharding, Unit, int], param: Parameter, name: str, pick: _Pick) -> Tensor | None:
    """Return what `_assemble` returns, joined with the parts of other ranks where the model itself is divided."""
    holders = found[0].units.ranks.holders_of_parts(param)
    own = _assemble(found, param, name, pick)
    return own if holders is None else join_parts(own, param, holders)


def _assemble(found: tuple[Sharding, Unit, int], param: Parameter, name: str, pick: _Pick) -> Tensor | None:
    """Collect the owners' fragments of one parameter into a new tensor of its shape.

    Args:
        name: name of the tensor for `Placement.read`.
        pick: returns a shard's tensor, or None; either all ranks have the tensor or none has.
    """
    sharding, unit, index = found
    fragments = [fragment for fragment in unit.layout.fragments if fragment.param == index]
    shards = [shard for shard in unit.shards if shard.fragment.param == index]
    mine = [(shard, shard.placement.read(shard, name, pick(sharding, shard))) for shard in shards]
    picked = [value for _, value in mine if value is not None]
    dtype = _agree_on_dtype(unit.ranks.reduce_group, picked[0].dtype if picked else None, param.device)
    if dtype is None:
        return None
    shape = shape_of(param)
    whole_N = torch.zeros(shape.numel(), dtype=dtype, device=param.device)
    for shard, value in mine:
        whole_N.narrow(0, shard.fragment.param_start, shard.fragment.numel).copy_(value.detach().reshape(-1))
    if unit.layout.world_size > 1:
        works = [
            unit.ranks.shard_group.broadcast(whole_N.narrow(0, each.param_start, each.numel), each.owner)
            for each in fragments
        ]
        for work in works:
            work.wait()
    return whole_N.view(shape)


_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def _agree_on_dtype(ranks: GroupBackend, dtype: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """Return the owners' dtype on all ranks, including ranks that own nothing of the parameter."""
    flags_N = torch.zeros(len(_DTYPES), device=device)
    if dtype is not None:
        flags_N[_DTYPES.index(dtype)] = 1.0
    ranks.all_reduce(flags_N, tag="dtype").wait()
    found = flags_N.nonzero().flatten().tolist()
    return _DTYPES[found[0]] if found else None


def _scatter(param: Parameter, value: Tensor, asked: str, name: str, pick: _Pick) -> Tensor:
    """Copy this rank's fragments of the whole `value` to the tensors called `name`, which `pick` returns.

    Returns:
        The part of `value` that this rank has; all of `value` unless the model is divided.
    """
    note_write()
    sharding, unit, index = _managed(param, asked)

    def check() -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{asked}: found {type(value).__name__}, wanted a tensor of the parameter's shape")
        part = own_part(param, value, asked)
        if part.shape != shape_of(param):
            raise ValueError(
                f"{asked}: found a value of shape {tuple(part.shape)}, the parameter has {tuple(shape_of(param))}"
            )
        for shard in unit.shards:
            if shard.fragment.param == index:
                pick(sharding, shard)  # raises if it is not there
        return part

    part = _accepted_by_all(check, asked, unit.ranks.reduce_group)
    flat = part.detach().reshape(-1)
    for shard in unit.shards:
        if shard.fragment.param == index:
            start = shard.fragment.param_start
            _write(sharding, shard, name, pick, flat[start : start + shard.fragment.numel])
    return part


def _accepted_by_all(check: Callable[[], Tensor], asked: str, ranks: GroupBackend) -> Tensor:
    """Return `check()` once every rank has accepted a value and the sums agree. If one rank refuses, all ranks raise
    and nothing is written."""
    if ranks.world_size == 1:
        return check()
    try:
        value = check()
    except (TypeError, ValueError, StateError) as error:
        all_gather_values([first_line(error), ""], backend=ranks, call=asked)
        raise
    sum_of = repr(value.detach().sum(dtype=torch.float64).item())
    said = all_gather_values(["", sum_of], backend=ranks, call=asked)
    for rank, (refusal, _) in enumerate(said):
        if refusal:
            raise ValueError(f"{asked}: rank {rank} refused its value, and nothing was changed: {refusal}")
    others = [rank for rank, (_, other) in enumerate(said) if other != said[0][1]]
    if others:
        raise ValueError(
            f"{asked}: {named_ranks(others)} and rank 0 brought different values (this rank's sum is {sum_of}), and "
            "nothing was changed. Give the same value on every rank"
        )
    return value


def _write(sharding: Sharding, shard: ParamShard, name: str, pick: _Pick, new: Tensor) -> None:
    sharding.states.wait_for_copy()
    target = pick(sharding, shard)
    if target is not None or shard.placement.fetches:
        shard.placement.write(shard, name, target, new)


def _master(sharding: Sharding, shard: ParamShard) -> Tensor:
    return shard.master


def _gradient(sharding: Sharding, shard: ParamShard) -> Tensor | None:
    return shard.grad


def _picks(key: str) -> _Pick:
    """Return a function that returns a shard's state, or None if it does not exist."""

    def pick(sharding: Sharding, shard: ParamShard) -> Any:
        optimizer = sharding.optimizer
        return None if optimizer is None else optimizer.state.get(shard.master, {}).get(key)

    return pick


def _requires(asked: str, key: str) -> _Pick:
    """Return a function that returns a shard's state and raises if it does not exist."""

    def pick(sharding: Sharding, shard: ParamShard) -> Tensor:
        state = sharding.optimizer.state.get(shard.master, {}) if sharding.optimizer is not None else {}
        if key not in state:
            raise StateError(
                f"{asked}: found no state {key!r}, only {sorted(state)}; states exist after the first step"
            )
        return state[key]  # type: ignore[no-any-return]

    return pick


def _local(sharding: Sharding, unit: Unit, index: int, name: str, pick: _Pick) -> Tensor | None:
    """Concatenate this rank's fragments of one parameter."""
    shards = [shard for shard in unit.shards if shard.fragment.param == index]
    picked = [shard.placement.read(shard, name, pick(sharding, shard)) for shard in shards]
    present = [value.detach().reshape(-1) for value in picked if value is not None]
    if len(present) < len(picked):
        return None
    return torch.cat(present) if present else torch.empty(0, device=unit.params[index].device)


def _set_local(param: Parameter, value: Tensor, asked: str, name: str, pick: _Pick) -> None:
    """Copy `value`, this rank's elements of `param`, to the tensors called `name`, which `pick` returns."""
    note_write()
    sharding, unit, index = _managed(param, asked)
    shards = [shard for shard in unit.shards if shard.fragment.param == index]

    def check() -> Tensor:
        numel = sum(shard.fragment.numel for shard in shards)
        if not isinstance(value, Tensor):
            raise TypeError(f"{asked}: found {type(value).__name__}, wanted a tensor of {counted(numel, 'element')}")
        if value.numel() != numel:
            raise ValueError(
                f"{asked}: found a value of {counted(value.numel(), 'element')}, this rank has {numel} of the parameter"
            )
        for shard in shards:
            pick(sharding, shard)  # raises if it is not there
        return value

    # at stage 0 each rank has all elements, so values must agree; at other stages each rank's elements differ
    part = _accepted_by_all(check, asked, unit.ranks.reduce_group) if sharding.stage == 0 else check()
    flat = part.detach().reshape(-1)
    start = 0
    for shard in shards:
        _write(sharding, shard, name, pick, flat[start : start + shard.fragment.numel])
        start += shard.fragment.numel
