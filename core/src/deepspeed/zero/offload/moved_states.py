"""`MovedStates` holds the states that `engine.offload_states` moved to host memory, until `reload_states`.

It serves phases that need the device for something else, such as generation in reinforcement learning (stages 1 to 3).

[Note: the storage stays] Optimizer, shards, buckets and parameters hold views of the moved tensors. So only the storage
is moved: its bytes are copied to host memory, and it is resized to zero bytes; a reload resizes it back and copies the
bytes. Every view is then valid again. Meanwhile nothing may read the views: parameters are empty tensors, which torch
notices, and `States.require` checks all other cases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.config.constants import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.errors import ConfigError, StateError
from deepspeed.zero.managed import manager_of
from deepspeed.zero.offload.buffers import HostMemory

if TYPE_CHECKING:
    from deepspeed.zero.sharding import Sharding

_Kind = OffloadStateTypeEnum


@dataclass(frozen=True, slots=True)
class _Moved:
    """`_Moved` holds the bytes of one storage."""

    whole: Tensor  # the whole storage as uint8; the storage is empty
    host: Tensor


class MovedStates:
    """`MovedStates` holds states of one engine in host memory. `offload_states` creates it.

    Args:
        kinds: the kinds to move.
        pins: whether the host memory is page-locked.
        non_blocking: return before the copies are done; device memory is free for work that is queued after them.
    """

    def __init__(self, sharding: Sharding, kinds: Collection[_Kind], *, pins: bool, non_blocking: bool) -> None:
        self.kinds = frozenset(kinds)
        self._memory = HostMemory(get_accelerator(), pins=pins, key="offload_states")
        self._moved: dict[int, _Moved] = {}  # by storage
        if _Kind.contiguous_grad_buffer in kinds:
            sharding.gradients.memory.drop_free_buffers()
        for tensor in [each for kind in _Kind if kind in kinds for each in tensors_of(sharding, kind)]:
            self._copy(tensor)
        if not non_blocking:
            get_accelerator().synchronize()
        for moved in self._moved.values():
            moved.whole.untyped_storage().resize_(0)
        self._params = {param: param.data for param in _own_params(sharding) if self.has(param.data)}
        for param, value in self._params.items():
            param.data = value.new_empty(0)
        self._units = [unit for unit in sharding.units.divided() if any(map(self.has, unit.kept_tensors()))]
        for unit in self._units:
            unit.is_moved = True

    def _copy(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (
            tensor.device.type in ("cpu", "meta")
            or storage.nbytes() == 0
            or not storage.resizable()
            or self.has(tensor)
        ):
            return
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        host = self._memory.allocate(storage.nbytes(), torch.uint8)
        self._moved[storage._cdata] = _Moved(whole, host.copy_(whole, non_blocking=True))

    def has(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` was moved."""
        return tensor.untyped_storage()._cdata in self._moved

    @property
    def has_weights(self) -> bool:
        """Whether weights with which modules compute, or their shards, were moved."""
        return _Kind.lp_params in self.kinds or bool(self._params or self._units)

    def value_of(self, param: Parameter) -> Tensor:
        """Return the tensor that `param.data` will be when everything is moved back."""
        return self._params.get(param, param.data)

    def put_back(self, *, non_blocking: bool) -> None:
        """Move everything back to where it was."""
        for moved in self._moved.values():
            moved.whole.untyped_storage().resize_(moved.host.nbytes)
            moved.whole.copy_(moved.host, non_blocking=True)
        for param, value in self._params.items():
            param.data = value
        for unit in self._units:
            unit.is_moved = False
        if not non_blocking:
            get_accelerator().synchronize()


def tensors_of(sharding: Sharding, kind: _Kind) -> Iterator[Tensor]:
    """Yield the tensors of an engine for one kind of state, in whatever memory they are."""
    if kind is _Kind.optim_states and sharding.optimizer is not None:
        for state in sharding.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    elif kind is _Kind.hp_params:
        yield from (shard.master for group in sharding.units for shard in group.shards)
    elif kind is _Kind.lp_params:
        yield from (tensor for unit in sharding.units.divided() for tensor in unit.kept_tensors())
        moved = sharding.states.moved
        yield from (param.data if moved is None else moved.value_of(param) for param in _own_params(sharding))
    elif kind is _Kind.lp_grads:
        yield from sharding.gradients.memory.by_unit


def _own_params(sharding: Sharding) -> Iterator[Parameter]:
    """Yield the parameters of the model except those that another engine trains."""
    return (param for _, param in sharding.units.named_parameters if manager_of(param) in (None, sharding))


def offload_states(
    sharding: Sharding,
    include: Collection[OffloadStateTypeEnum | str] | None,
    device: OffloadDeviceEnum | str,
    *,
    pin_memory: bool,
    non_blocking: bool,
) -> None:
    """See `DeepSpeedEngine.offload_states`."""
    if device != OffloadDeviceEnum.cpu:
        found = device.value if isinstance(device, OffloadDeviceEnum) else device
        raise ConfigError(f'offload_states: device is {found!r}; states move to "cpu" only')
    if sharding.stage == 0:
        raise ConfigError(
            "offload_states: zero_optimization.stage is 0, where the optimizer and its states are the user's own; use "
            "stage 1, 2 or 3"
        )
    if sharding.states.moved is not None:
        raise StateError("offload_states: states were moved already; call engine.reload_states() first")
    if sharding.gradients.window.is_open:
        raise StateError("offload_states: found a backward that is not over; call it after the backward, or after step")
    kinds = _kinds(include)
    sharding.finish_before_moving()
    sharding.states.moved = MovedStates(sharding, kinds, pins=pin_memory, non_blocking=non_blocking)


def _kinds(include: Collection[OffloadStateTypeEnum | str] | None) -> set[_Kind]:
    if include is None:
        return set(_Kind)
    known = [kind.value for kind in _Kind]
    if isinstance(include, str) or any(kind not in known for kind in include):
        raise ConfigError(f"offload_states: include is {include!r}; give a list of any of {', '.join(known)}")
    return {_Kind(kind) for kind in include}


def get_state_devices(model: Any, state: OffloadStateTypeEnum | str) -> set[torch.device]:
    """Return the devices on which an engine has its states of one kind.

    Args:
        model: the engine that `deepspeed.initialize` returned.
        state: the kind.

    Returns:
        The devices; empty if there are no such states.
    """
    sharding: Sharding = model.sharding
    moved = sharding.states.moved
    host = torch.device("cpu")
    return {
        host if moved is not None and moved.has(tensor) else tensor.device
        for tensor in tensors_of(sharding, _Kind(state))
        if tensor.numel() > 0 and not tensor.is_meta
    }
