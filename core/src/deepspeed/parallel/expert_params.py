"""Which parameters belong to experts: those with the attribute `allreduce` set to False, as documented.

This is `deepspeed.moe.utils`. The layers of a mixture of experts are not in this version, so a model has experts only
if its author marked them:

    param.allreduce = False
    param.group_name = "ep_size_2"      # the experts are divided over two ranks

Their gradients are summed over the ranks that hold the same experts (`zero/unit_ranks.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from deepspeed.compatibility import FEATURES
from deepspeed.errors import ConfigError

ParamGroup = dict[str, Any]

#: a group of experts is named by the number of ranks over which they are divided
EXPERT_PREFIX = "ep_size_"


def has_moe_layers(module: Module) -> tuple[bool, int]:
    """Whether the module has mixture-of-experts layers, and the experts of each: never in this version."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether the parameter is an expert's."""
    return getattr(param, "allreduce", True) is False


def expert_group_of(param: Tensor) -> str | None:
    """The name of the group of an expert's parameter; None for a parameter that all ranks have."""
    return str(getattr(param, "group_name", None)) if is_moe_param(param) else None


def expert_sizes(module: Module) -> dict[str, int]:
    """For every group of experts in the module the number of ranks over which they are divided, by name.

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
    """The optimizer's groups, with experts apart; without experts they are returned as they are.

    Args:
        param_groups: one group or several.
        max_group_size: elements of a group of experts, at most.

    Raises:
        ConfigError: if there are experts, since their groups are not in this version.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    _refuse_experts("split_params_into_different_moe_groups_for_optimizer", groups)
    return groups


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters or groups of them, with experts apart; without experts they are returned as they are.

    Raises:
        ConfigError: if there are experts, since their groups are not in this version.
    """
    groups = [each if isinstance(each, dict) else {"params": [each]} for each in model_parameters]
    _refuse_experts("configure_moe_param_groups", groups)
    return model_parameters


def _refuse_experts(asked: str, groups: list[ParamGroup]) -> None:
    num_experts = 0
    for group in groups:
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else params
        group["params"] = params if isinstance(params, list) else list(params)  # a generator can be read only once
        num_experts += sum(map(is_moe_param, group["params"]))
    if num_experts:
        found = f"{asked}: found {num_experts} parameters with allreduce=False"
        raise ConfigError(FEATURES["mixture of experts"].explain(found))
