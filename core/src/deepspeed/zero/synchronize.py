"""Make every rank start from the same weights: those of the group's first rank.

Called once, before a stage is attached, so that fp32 master weights are copied from agreed values.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, broadcast_together, serves
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.values import check_same
from deepspeed.parallel.expert_params import expert_groups
from deepspeed.parallel.model_part import tied_stages
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.unit_groups import UnitGroups

#: tensors below this many bytes travel together
_SMALL_BYTES = 2**20
_TAG = "first weights"


def synchronize_module(
    module: torch.nn.Module,
    group: ProcessGroup | None = None,
    experts: Mapping[str, ProcessGroup] | None = None,
) -> None:
    """Broadcast parameters and buffers from the first rank of `group`. No-op on one rank.

    Args:
        experts: by `param.group_name`, the ranks that hold the same experts; their parameters and buffers come from the
            first of these.

    Raises:
        ConfigError: on every rank, if the module's tensors are not the same by name, shape and dtype.
    """
    if torch.distributed.get_world_size(group) == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    check_same({"the module": described(named)}, group)
    by_group: dict[ProcessGroup | None, list[Tensor]] = {}
    of_experts = expert_groups(module)
    for path, tensor in named:
        if tensor.numel() > 0 and unit_of(tensor) is None:
            name = of_experts.get(path)
            members = group if name is None or experts is None else experts[name]
            by_group.setdefault(members, []).append(tensor.data)
    for members, tensors in by_group.items():
        ranks = group_backend(members)
        ranks.connect()
        _synchronize(tensors, ranks)


def synchronize_tied(module: torch.nn.Module, units: UnitGroups) -> None:
    """Broadcast the parameters that several pipeline stages hold from the first of these.

    Raises:
        ConfigError: on every rank that holds them, if they are not the same by name, shape and dtype.
    """
    for stages, ranks in units.tied.items():
        assert ranks.replicate_group is not None
        ranks.replicate_group.connect()
        named = [(name, param) for name, param in module.named_parameters() if tied_stages(param) == stages]
        check_same(
            {f"the modules that the stages {', '.join(map(str, stages))} share": described(named)},
            ranks.replicate_group.group,
        )
        _synchronize([param.data for _, param in named], ranks.replicate_group)


def _synchronize(tensors: list[Tensor], ranks: GroupBackend) -> None:
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    works = []
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES and not serves(ranks.group, tensor.device):
            broadcast_together([tensor], ranks, 0, tag=_TAG)
        elif tensor.nbytes >= _SMALL_BYTES and tensor.is_contiguous():
            works.append(ranks.broadcast(tensor.view(-1), 0, tag=_TAG))
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for work in works:
        work.wait()
    for same_kind in small.values():
        broadcast_together(same_kind, ranks, 0, tag=_TAG)


def described(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and dtypes as a text."""
    return ", ".join(f"{name} {tuple(shape_of(tensor))} {tensor.dtype}" for name, tensor in tensors)


def settings_of(group: Mapping[str, Any]) -> str:
    """A group of parameters of an optimizer without them: its learning rate and what else is a plain value."""
    shown = []
    for name, value in sorted(group.items()):
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if name != "params" and isinstance(plain, bool | int | float | str | tuple):
            shown.append(f"{name} {plain}")
    return ", ".join(shown)
