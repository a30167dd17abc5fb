"""Parameters with the attribute `allreduce` set to False belong to experts, as documented.

`deepspeed.moe.utils` has these functions. The layers of `deepspeed.moe` mark their experts; so may any other layer:

    param.allreduce = False
    param.group_name = "ep_size_2"      # the experts are divided over two ranks

Their gradients are summed over the ranks that hold the same experts (`zero/unit_groups.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from deepspeed.errors import ConfigError

ParamGroup = dict[str, Any]

#: a group of experts is named by the number of ranks over which they are divided
EXPERT_PREFIX = "ep_size_"


_group_being_built: str | None = None


@contextmanager
def building_experts(ep_size: int) -> Iterator[None]:
    """Modules built inside are experts that are divided over `ep_size` ranks; `zero.Init` marks their parameters with
    it before it shards them."""
    global _group_being_built
    before, _group_being_built = _group_being_built, f"{EXPERT_PREFIX}{ep_size}"
    try:
        yield
    finally:
        _group_being_built = before


def mark_if_built_as_expert(param: Tensor) -> None:
    """Mark a parameter that is made inside `building_experts`."""
    if _group_being_built is not None and not is_moe_param(param):
        mark_as_expert(param, _group_being_built)


def mark_as_expert(param: Tensor, group_name: str) -> None:
    """Mark a parameter as an expert's, of a group such as "ep_size_2"."""
    param.allreduce = False  # type: ignore[attr-defined]
    param.group_name = group_name  # type: ignore[attr-defined]


class ModuleOfExperts(Module):
    """A module whose parameters and buffers are all experts', also those of a copy: `copy.deepcopy` makes parameters
    without marks. Buffers have none: a forward may put other tensors in their place."""

    def mark_as_experts(self, ep_size: int) -> None:
        """Mark the parameters, of experts that are divided over `ep_size` ranks; called once they are there."""
        self.ep_size = ep_size
        for param in self.parameters():
            mark_as_expert(param, f"{EXPERT_PREFIX}{ep_size}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_as_experts(self.ep_size)


def is_moe_param(param: Tensor) -> bool:
    """Whether the parameter is an expert's."""
    return getattr(param, "allreduce", True) is False


def expert_group_of(param: Tensor) -> str | None:
    """The name of the group of an expert's parameter; None for a parameter that all ranks have."""
    return str(getattr(param, "group_name", None)) if is_moe_param(param) else None


def expert_groups(module: Module) -> dict[str, str]:
    """The group of experts, by the names of the parameters and buffers that are experts'."""
    named = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    found = {name: group for name, tensor in named if (group := expert_group_of(tensor)) is not None}
    for path, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, ModuleOfExperts):
            buffers = each.named_buffers(path, remove_duplicate=False)
            found.update({name: f"{EXPERT_PREFIX}{each.ep_size}" for name, _ in buffers})
    return found


def expert_sizes(module: Module) -> dict[str, int]:
    """Return for every group of experts in the module the number of ranks over which they are divided, by its name.

    Raises:
        ConfigError: for a parameter of an expert without such a name.
    """
    sizes: dict[str, int] = {}
    for path, param in module.named_parameters():
        if not is_moe_param(param):
            continue
        name = getattr(param, "group_name", None)
        size = str(name).removeprefix(EXPERT_PREFIX)
        if size == name or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"parameter {path}: it is marked as an expert's (allreduce=False), and its group_name is {name!r}; "
                f'give the number of ranks over which the experts are divided, such as "{EXPERT_PREFIX}2"'
            )
        sizes[str(name)] = int(size)
    return dict(sorted(sizes.items()))


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether the group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters in two lists: those that every rank has, and those of experts."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the parameters in two lists, as `split_params_into_shared_and_expert_params` splits these."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad for param in shared if param.grad is not None], [
        param.grad for param in experts if param.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | Sequence[ParamGroup], max_group_size: int | float = 178956971
) -> list[ParamGroup]:
    """The optimizer's groups, with experts in groups of their own after them.

    A group of experts has the options of the group that they were in, `moe: True`, and the `name` of the ranks over
    which they are divided ("ep_size_2"). Groups without experts are returned as they are, and a given group loses its
    experts.

    Args:
        param_groups: one group or several.
        max_group_size: elements of a group of experts, at most; a single larger parameter is a group of its own.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    found: list[ParamGroup] = []
    for group in groups:
        group["params"] = _listed(group["params"])
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        if not experts:
            continue
        options = {key: value for key, value in group.items() if key != "params"}
        group["params"] = shared
        for name in dict.fromkeys(str(expert_group_of(param)) for param in experts):
            own = [param for param in experts if expert_group_of(param) == name]
            found += [{**options, "name": name, "moe": True, "params": part} for part in _cut(own, max_group_size)]
    return groups + found


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters, or groups of them, for an optimizer: with experts in groups of their own, if there are any.

    Groups of which one is marked as experts' (`moe`) are returned as they are, as are parameters without experts.

    Raises:
        ConfigError: for something else than a list.
    """
    if not isinstance(model_parameters, list):
        raise ConfigError(f"configure_moe_param_groups: found {type(model_parameters).__name__}; give a list")
    if all(isinstance(each, Tensor) for each in model_parameters):
        if not any(map(is_moe_param, model_parameters)):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any(is_moe_param_group(group) for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, list) else list(params)  # a generator can be read only once


def _cut(params: Iterable[Tensor], max_numel: int | float) -> list[list[Tensor]]:
    """Consecutive parameters together, as long as they have at most `max_numel` elements."""
    parts: list[list[Tensor]] = []
    room: int | float = 0
    for param in params:
        numel = getattr(param, "ds_numel", param.numel())
        if not parts or numel > room:
            parts.append([])
            room = max_numel
        parts[-1].append(param)
        room -= numel
    return parts
