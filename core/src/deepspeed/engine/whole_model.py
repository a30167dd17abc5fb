"""The weights of a model that is divided over ranks, put together: of experts, of tensor-parallel ranks, of stages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from deepspeed import comm
from deepspeed.comm.values import all_gather_values
from deepspeed.config.precision import dtype_name
from deepspeed.engine.export import gathered
from deepspeed.errors import ConfigError
from deepspeed.parallel.expert_params import expert_group_of, expert_groups, expert_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import ModelPart, division_is_known, parts_held


class _Held(NamedTuple):
    """`_Held` is the part of a weight that a rank has."""

    name: str  # in the undivided model
    part: ModelPart | None  # None: all of it
    value: Tensor
    experts: str | None  # the group of experts of which it is


def whole_weights(
    module: Module, mesh: Mesh, *, everywhere: bool, exclude_frozen: bool, device: torch.device
) -> dict[str, Any] | None:
    """The state dict of the undivided model, in host memory, as `export.gathered` gives that of one rank's part.

    A collective of the mesh. Weights travel one at a time, from each rank that has a part.

    Args:
        everywhere: every rank gets it; else the ranks of the first stage and the first tensor-parallel rank, others
            None.
        device: through whose memory they travel.
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
    """The state dict of a model that is divided over tensor-parallel ranks alone, whole and in host memory.

    A collective of `group`; None: the model is whole. Names of one weight share it. Weights travel one at a time.

    Args:
        keeps: whether this rank gets the result; others get None.
        device: through whose memory the weights travel.
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
    """The whole values of what the ranks of a group have of them. A collective of the group."""
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
    """Called before whole weights are put together.

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
