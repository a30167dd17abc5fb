"""Export weights for use elsewhere, whole even if ranks hold parts: state dicts and 16-bit model files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from deepspeed import comm
from deepspeed.checkpoint import Checkpointer, save_state_dict_file
from deepspeed.comm.values import all_gather_values, dtype_name
from deepspeed.engine.training_state import module_state_dict
from deepspeed.errors import ConfigError
from deepspeed.log import log_dist
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import (
    ModelPart,
    division_is_known,
    expert_group_of,
    expert_groups,
    expert_sizes,
    parts_held,
)
from deepspeed.zero.param_unit import unit_of, whole_in_turn


def save_weights(weights: Mapping[str, Any] | None, path: Path, checkpointer: Checkpointer) -> None:
    """Write the whole weights that one rank has; all ranks call it, and fail together."""

    def write() -> None:
        if weights is not None:
            save_state_dict_file(weights, path)

    checkpointer.together(write, f"save {path.name} in {path.parent}")


def gathered(module: torch.nn.Module, *, keeps: bool, exclude_frozen: bool) -> dict[str, Any] | None:
    """Return the module's state dict, with sharded weights gathered in host memory; names of one weight share a tensor.

    Weights that layers store in few bits are returned as the numbers that they stand for, in their original dtype.

    It is a collective if weights are sharded: every rank gathers one unit at a time.

    Args:
        keeps: whether this rank gets the result; others get None.
    """
    progress = ProgressLog("gather the weights of the model")
    state = module_state_dict(module, keep_vars=True, exclude_frozen=exclude_frozen)
    tensors = {id(value): value for value in state.values() if isinstance(value, Tensor)}
    layers = [each for each in module.modules() if isinstance(each, StoredLayer)]
    stored = {id(each.get_parameter(name)): (each, name) for each in layers for name in each.forms}

    def numbers(key: int, weight: Tensor) -> Tensor:
        if key not in stored:
            return weight.detach()
        layer, name = stored[key]
        return layer.values(weight, name=name)

    sharded = [value for value in tensors.values() if unit_of(value) is not None]
    whole = {key: value for key, value in tensors.items() if unit_of(value) is None}
    copies = {key: numbers(key, value) for key, value in whole.items()}
    for param, weights in whole_in_turn(sharded):
        if keeps:
            copies[id(param)] = numbers(id(param), weights).to("cpu", copy=True)
        progress.advance(len(sharded))
    return {name: copies.get(id(value), value) for name, value in state.items()} if keeps else None


def owned(weights: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return `weights` of `module` in host memory, each in a storage of its own; names of one weight share a storage.

    Libraries need this to write safetensors: they keep one name per storage, and small weights of the engine are views
    of one flat tensor.
    """
    live = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}

    def own(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        is_own = value.device.type == "cpu" and storage.nbytes() == value.nbytes and storage.data_ptr() not in live
        return value if is_own else value.detach().to("cpu", copy=True)

    copies = {id(value): own(value) for value in weights.values() if isinstance(value, Tensor)}
    return {name: copies.get(id(value), value) for name, value in weights.items()}


class ProgressLog:
    """`ProgressLog` logs on the first rank, every few seconds, how far a slow operation is."""

    interval_s = 5.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._last_s = time.monotonic()
        self._done = 0

    def advance(self, total: int) -> None:
        """Count one of `total` parts as done, and log the count if it is time."""
        self._done += 1
        if time.monotonic() - self._last_s > self.interval_s:
            self._last_s = time.monotonic()
            log_dist(f"{self._what}: {self._done} of {total}")


class _Held(NamedTuple):
    """`_Held` is the part of a weight that a rank has."""

    name: str  # in the undivided model
    part: ModelPart | None  # None: all of it
    value: Tensor
    experts: str | None  # the expert group that it belongs to


def whole_weights(
    module: Module, mesh: Mesh, *, everywhere: bool, exclude_frozen: bool, device: torch.device
) -> dict[str, Any] | None:
    """Return the state dict of the undivided model, in host memory; `gathered` returns that of one rank's part.

    A collective of the mesh. Weights are sent one at a time, from each rank that has a part.

    Args:
        everywhere: every rank gets the result; else only ranks that are first in tensor and pipeline parallelism, and
            others get None.
        device: device through whose memory the weights are sent.
    """
    state = gathered(module, keeps=True, exclude_frozen=exclude_frozen)
    assert state is not None
    experts, parts = expert_sizes(module), parts_held(module)
    group_of = expert_groups(module)
    held = [
        _Held(part.name or name if part else name, part, value, group_of.get(name))
        for name, value in state.items()
        for part in [parts.get(name)]
        if isinstance(value, Tensor)
    ]
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for group_name, ep_size in experts.items():
        if ep_size > 1:
            own, held = _split(held, [each.experts == group_name for each in held])
            held += _joined(own, mesh.experts(ep_size).group("ep"), device, keeps=True)
    if mesh.size("tp") > 1:
        own, held = _split(held, [each.part is not None and not each.part.is_whole for each in held])
        held += _joined(own, mesh.group("tp"), device, keeps=everywhere or mesh.rank("tp") == 0)
    keeps = everywhere or (mesh.rank("tp") == 0 and mesh.rank("pp") == 0)
    if mesh.size("pp") > 1:
        held = _joined(held, mesh.group("pp"), device, keeps=keeps)
    return {**{each.name: each.value for each in held}, **rest} if keeps else None


def tensor_parallel_whole(
    module: Module, group: ProcessGroup | None, *, keeps: bool, device: torch.device
) -> dict[str, Any] | None:
    """Return the whole state dict, in host memory, of a model that is divided over tensor-parallel ranks alone.

    A collective of `group`; None: the model is whole. Names of one weight share it. Weights are sent one at a time.

    Args:
        keeps: whether this rank gets the result; others get None.
        device: device through whose memory the weights are sent.
    """
    state = gathered(module, keeps=True, exclude_frozen=False)
    assert state is not None
    if group is not None:
        parts = parts_held(module)
        first_name = {id(value): name for name, value in reversed(state.items())}
        own = [
            _Held(name, parts[name], value, None)
            for name, value in state.items()
            if name in parts and not parts[name].is_whole and first_name[id(value)] == name
        ]
        wholes = {each.name: each.value for each in _joined(own, group, device, keeps=keeps)}
        state = {name: wholes.get(first_name[id(value)], value) for name, value in state.items()}
    return state if keeps else None


def _split(held: list[_Held], is_first: list[bool]) -> tuple[list[_Held], list[_Held]]:
    first = [each for each, wanted in zip(held, is_first, strict=True) if wanted]
    return first, [each for each, wanted in zip(held, is_first, strict=True) if not wanted]


def _joined(own: list[_Held], group: ProcessGroup, device: torch.device, *, keeps: bool) -> list[_Held]:
    """Return the whole weights whose parts the ranks of a group have. A collective of the group."""
    ranks = comm.group_backend(group)
    described = [[each.name, list(each.value.shape), dtype_name(each.value.dtype), _plain(each.part)] for each in own]
    wholes: dict[str, Tensor] = {}
    for source, items in enumerate(all_gather_values(described, group)):
        for number, (name, shape, dtype, plain) in enumerate(items):
            is_own = source == ranks.rank
            flat = torch.empty(torch.Size(shape).numel(), dtype=getattr(torch, dtype), device=device)
            if is_own:
                flat.copy_(own[number].value.reshape(-1))
            if flat.numel():
                ranks.broadcast(flat, source).wait()
            if not keeps:
                continue
            value = flat.view(shape).to("cpu", copy=True)
            if plain is None:
                wholes[name] = value
                continue
            part = ModelPart.of_plain(plain)
            whole = wholes.setdefault(name, value.new_empty(part.shape))
            part.put(value, whole)
    return [_Held(name, None, value, None) for name, value in wholes.items()]


def _plain(part: ModelPart | None) -> Mapping[str, Any] | None:
    return None if part is None or part.is_whole else part.to_plain()


def refuse_unknown_division(asked: str, module: Module, mesh: Mesh) -> None:
    """Refuse a model whose parts cannot be joined. Called before whole weights are exported.

    Raises:
        ConfigError: the caller divided the model, and no mark says which part a rank has.
    """
    named = parts_held(module)
    divided = [name for name, size in expert_sizes(module).items() if size > 1]
    unmarked = [
        name for name, param in module.named_parameters() if expert_group_of(param) in divided and name not in named
    ]
    unknown = [
        *(["tp"] if mesh.size("tp") > 1 and not division_is_known(module) else []),
        *(["pp"] if mesh.size("pp") > 1 and not getattr(module, "names_are_global", False) else []),
        *([f"experts {', '.join(divided)}"] if unmarked else []),
    ]
    if unknown:
        raise ConfigError(
            f"{asked}: the model is divided over ranks (pp {mesh.size('pp')} x tp {mesh.size('tp')}), and its "
            f"parameters do not say which part a rank has ({' and '.join(unknown)}); mark them with "
            "deepspeed.parallel.model_part.mark_part, or save the module's own state_dict() on every rank"
        )
