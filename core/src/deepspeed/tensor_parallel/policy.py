"""`plan_of_policy`: a plan from `injection_policy`, the form of `init_inference`.

    {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}

names in each module of a class the linear layers that are row-parallel, whose outputs are summed over the ranks. The
other linear layers of such a module are column-parallel.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.cuts import along_of, role_of
from deepspeed.tensor_parallel.plans import Rule, TensorPlan, heads_of_model

Policy = Mapping[type[nn.Module], tuple[str, ...] | str]


def plan_of_policy(model: nn.Module, policy: Any, table: TensorPlan | None) -> TensorPlan:
    """The plan that the policy describes.

    Args:
        policy: by class of the model's layers the names of row-parallel linear layers.
        table: that of the model's family, if there is one; it knows what names do not tell, such as fused layers and
            position biases, and is taken where its row-parallel layers are those of the policy.

    Raises:
        ConfigError: as `check_policy`; for a fused layer, of which the policy does not tell how it is divided.
    """
    check_policy(model, policy)
    rows = {path for path, is_row in _linears(model, policy) if is_row}
    if table is not None:
        of_table = {path for path in _all_linears(model) if _is_row(table, path)}
        if rows == of_table:
            return table
    rules = []
    for path, is_row in _linears(model, policy):
        placement = Shard(1 if is_row else 0)
        if not is_row and role_of(path) == "fused":
            raise ConfigError(
                f"injection_policy: found the layer {path} beside the named ones, in which query, key and value are "
                "fused, and names do not tell how; use deepspeed.tp_model_init with tensor_parallel.partition_config"
            )
        rules.append(Rule(path, placement, along_of(model, path, placement)))
    return TensorPlan("injection_policy", tuple(rules), heads_of_model(model))


def check_policy(model: nn.Module, policy: Any) -> None:
    """Refuse a policy that does not fit the model.

    Raises:
        ConfigError: the policy has another form, names a class of which the model has no module, or a linear layer
            that modules of that class do not have.
    """
    if not isinstance(policy, Mapping) or not all(isinstance(cls, type) for cls in policy):
        raise ConfigError(
            f"injection_policy: found {policy!r}; give a dict from classes of the model's layers to names of linear "
            "layers in them, as {T5Block: ('SelfAttention.o', 'DenseReluDense.wo')}"
        )
    for cls, names in policy.items():
        modules = [module for module in model.modules() if isinstance(module, cls)]
        if not modules:
            raise ConfigError(
                f"injection_policy: found the class {cls.__name__}, of which {type(model).__name__} has no module; its "
                f"layers are {', '.join(_classes_of_layers(model)) or 'in no list'}"
            )
        inside = {name for module in modules for name in _all_linears(module)}
        for name in _names(names):
            if not any(_ends(path, name) for path in inside):
                raise ConfigError(
                    f"injection_policy: found {name!r} for {cls.__name__}, which has no such linear layer; it has "
                    f"{', '.join(sorted(inside)) or 'none'}"
                )


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _all_linears(module: nn.Module) -> list[str]:
    return [
        path for path, each in module.named_modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"
    ]


def _linears(model: nn.Module, policy: Policy) -> Iterator[tuple[str, bool]]:
    """Paths of the linear layers in modules of the policy's classes, and whether each is named."""
    for path, module in model.named_modules():
        for cls, names in policy.items():
            if isinstance(module, cls):
                for inner in _all_linears(module):
                    yield f"{path}.{inner}" if path else inner, any(_ends(inner, name) for name in _names(names))


def _is_row(plan: TensorPlan, path: str) -> bool:
    rule = plan.rule_for(path)
    return rule is not None and rule.weight == Shard(1)


def _classes_of_layers(model: nn.Module) -> list[str]:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return sorted({type(each).__name__ for layers in lists for each in layers})
