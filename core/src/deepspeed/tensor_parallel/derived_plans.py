"""Plans that are not in a table: from a model's own tp_plan, its structure, `partition_config` or an injection policy.

A transformers model may have a plan: `base_model_tp_plan` of its config. Otherwise `plan_of_structure` finds linear
layers:

- Attention: a query, a key and a value layer with their usual names, and one output layer with as many input features
  as the query layer has output features. The numbers of heads are in `model.config`.
- A feed-forward block: a chain of two linear layers. The first one, which may have a gate of the same shape beside it,
  widens, and the second returns to the width of the input. The second is row-parallel.

All other layers stay whole. If nothing is found, `ConfigError` gives the reason.

`tensor_parallel.partition_config` is a plan in DeepSpeed's documented form:

    {"use_default_specs": false,
     "layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"},
                     {"patterns": [".*\\\\.gate_up_proj\\\\.weight$"], "partition_type": "column",
                      "shape": [2, -1], "partition_dim": 0}]}

A pattern is a regular expression that matches names of parameters from their start. The first match counts. `shape`
gives the blocks of a fused weight along `partition_dim`: a number of equal blocks, or a list of block sizes; each block
is divided separately. Attention layers are cut at heads if the model's config has numbers of heads; other layers are
cut at features.

`injection_policy`, the format of `init_inference`, names the row-parallel linear layers in the modules of a class;
their outputs are summed over the ranks. The other linear layers of such a module are column-parallel:

    {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.plans import Along, Rule, TensorPlan, heads_of_model
from deepspeed.tensor_parallel.ranges import along_of, role_of

# transformers' style names; vocabulary.py divides the embedding and the output layer, whatever the plan says
_STYLES: Mapping[str, tuple[Placement, bool]] = {
    "colwise": (Shard(0), False),
    "colwise_gather_output": (Shard(0), True),
    "colwise_rep": (Shard(0), True),
    "rowwise": (Shard(1), False),
    "replicated_with_grad_allreduce": (Replicate(), False),
}
_OF_EMBEDDINGS = frozenset({"embedding_rowwise"})


def own_plan(model: nn.Module) -> TensorPlan | None:
    """Return the model's own tp_plan; None if the model has none.

    Raises:
        ConfigError: for an unknown style, or a fused layer whose output is not gathered.
    """
    config = getattr(model, "config", None)
    styles = getattr(config, "base_model_tp_plan", None)
    if not styles:
        return None
    rules = []
    for path, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if Rule(pattern, Replicate()).matches(path)), None)
        if style is None or style in _OF_EMBEDDINGS:
            continue
        if style not in _STYLES:
            raise ConfigError(
                f"tensor parallelism: the tp_plan of {type(model).__name__} divides {path} as {style!r}, and the "
                f"styles that are known here are {', '.join(_STYLES)}; describe its layers in "
                "tensor_parallel.partition_config"
            )
        placement, gathers = _STYLES[style]
        if isinstance(placement, Replicate):
            rules.append(Rule(path, placement, sums_gradient=True))
            continue
        if role_of(path) == "fused" and not gathers:
            raise ConfigError(
                f"tensor parallelism: the tp_plan of {type(model).__name__} divides the fused layer {path}, and does "
                "not say how query, key and value lie in it; describe it in tensor_parallel.partition_config"
            )
        if isinstance(module, nn.Linear):
            rules.append(Rule(path, placement, along_of(model, path, placement), gathers=gathers))
    return TensorPlan(f"tp_plan of {type(model).__name__}", tuple(rules), heads_of_model(model))


_WHOLE_WIDTH = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)


def plan_of_structure(model: nn.Module) -> TensorPlan:
    """Derive a plan from the structure of `model`.

    Raises:
        ConfigError: if no layers that can be divided are found.
    """
    heads = heads_of_model(model)
    rules: list[Rule] = []
    fused = []
    for path, module in model.named_modules():
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        roles = {name: role_of(name) for name in linears}
        prefix = f"{path}." if path else ""
        if "fused" in roles.values():
            fused.append(prefix + next(name for name, role in roles.items() if role == "fused"))
        elif "query" in roles.values() and heads is not None:
            rules += _attention(prefix, linears, roles)
        elif "query" not in roles.values() and "key" not in roles.values():
            rules += _feed_forward(
                prefix, linears, [child for name, child in module.named_children() if name not in linears]
            )
    if not rules:
        hint = (
            f"; it does not tell how query, key and value lie in {fused[0]}"
            if fused
            else ""
            if heads is not None
            else "; model.config has no num_attention_heads"
        )
        raise ConfigError(
            f"tensor parallelism: the structure of {type(model).__name__} does not show which of its layers can be "
            "divided: found no query, key, value and output layers in one module, and no module with two linear layers "
            f"of which the second undoes the shape of the first{hint}. Describe its layers in "
            "tensor_parallel.partition_config"
        )
    return TensorPlan("by structure", tuple(rules), heads)


def _attention(prefix: str, linears: dict[str, nn.Linear], roles: dict[str, str]) -> Iterator[Rule]:
    (query,) = (linears[name] for name, role in roles.items() if role == "query")
    others = [name for name, role in roles.items() if not role]
    if len(others) != 1 or linears[others[0]].in_features != query.out_features:
        return
    for name, role in roles.items():
        along = Along.KEYS if role == "key" else Along.QUERIES
        yield Rule(prefix + name, Shard(0 if role else 1), along)


def _feed_forward(prefix: str, linears: dict[str, nn.Linear], others: list[nn.Module]) -> Iterator[Rule]:
    """Yield the rules of a feed-forward block. `others`, its further modules, must be elementwise."""
    if len(linears) not in (2, 3) or any(
        isinstance(other, _WHOLE_WIDTH) or list(other.parameters()) for other in others
    ):
        return
    *first, last = linears
    shapes = {tuple(linears[name].weight.shape) for name in first}
    if (
        shapes != {tuple(reversed(linears[last].weight.shape))}
        or linears[last].in_features <= linears[last].out_features
    ):
        return
    for name in first:
        yield Rule(prefix + name, Shard(0))
    yield Rule(prefix + last, Shard(1))


_KEY = "tensor_parallel.partition_config"
_TYPES = ("row", "column", "skip")
_KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types")


def plan_of_config(
    config: Mapping[str, Any],
    default: TensorPlan | None,
    model_type: str,
    model: nn.Module,
    *,
    is_stage: bool = False,
) -> TensorPlan:
    """Return the plan that `config` describes for `model`.

    Args:
        default: a plan for modules that no pattern matches; None: these modules stay whole.
        model_type: the type of the model; a spec may apply to some types only.
        is_stage: the model is a pipeline stage; the patterns may match layers of other stages only.

    Raises:
        ConfigError: for a malformed spec, patterns that match nothing, or no spec at all.
    """
    if unknown := set(config) - {"use_default_specs", "layer_specs"}:
        raise ConfigError(f"{_KEY}: found the keys {sorted(unknown)}; it has use_default_specs and layer_specs")
    specs = config.get("layer_specs") or []
    if not specs and default is None:
        raise ConfigError(f"{_KEY}.layer_specs: found none; give specs, or set use_default_specs to true")
    rules: list[Rule] = []
    decided: set[str] = set()
    for place, spec in enumerate(specs):
        _check(spec, f"{_KEY}.layer_specs[{place}]")
        if model_type and spec.get("model_types") and model_type not in spec["model_types"]:
            continue
        patterns = [re.compile(pattern) for pattern in spec["patterns"]]
        for name, _ in model.named_parameters(remove_duplicate=False):
            path, _, kind = name.rpartition(".")
            if kind != "weight" or path in decided or not any(pattern.match(name) for pattern in patterns):
                continue
            decided.add(path)
            rules.append(_rule(spec, path, model, f"{_KEY}.layer_specs[{place}]"))
    if default is None and not is_stage and not any(isinstance(rule.weight, Shard) for rule in rules):
        raise ConfigError(
            f"{_KEY}.layer_specs: no pattern matches a weight of {type(model).__name__}, whose weights have names such "
            f"as {', '.join([name for name, _ in model.named_parameters() if name.endswith('weight')][:3])}"
        )
    if default is not None:
        return replace(default, name="partition_config", rules=(*rules, *default.rules))
    return TensorPlan("partition_config", tuple(rules), heads_of_model(model))


def _check(spec: Any, where: str) -> None:
    if not isinstance(spec, Mapping) or not spec.get("patterns"):
        raise ConfigError(f"{where}: found {spec!r}; a spec is an object with patterns and partition_type")
    if unknown := set(spec) - set(_KEYS):
        raise ConfigError(f"{where}: found the keys {sorted(unknown)}; a spec has {', '.join(_KEYS)}")
    if spec.get("partition_type", "column") not in _TYPES:
        raise ConfigError(
            f"{where}.partition_type: found {spec['partition_type']!r}; the types are {', '.join(_TYPES)}"
        )
    for pattern in spec["patterns"]:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{where}.patterns: found {pattern!r}, which is no regular expression: {error}"
            ) from error


def _rule(spec: Mapping[str, Any], path: str, model: nn.Module, where: str) -> Rule:
    kind = spec.get("partition_type", "column")
    if kind == "skip":
        return Rule(path, Replicate())
    rule = Rule(path, Shard(0 if kind == "column" else 1))
    blocks = _blocks(spec, rule, where)
    if blocks != 1:
        return replace(rule, blocks=blocks)
    return replace(rule, along=along_of(model, path, rule.weight))


def _blocks(spec: Mapping[str, Any], rule: Rule, where: str) -> int | tuple[int, ...]:
    shape = spec.get("shape")
    if shape is None:
        return 1
    assert isinstance(rule.weight, Shard)
    dim = spec.get("partition_dim", rule.weight.dim)
    if dim != rule.weight.dim or not isinstance(shape, list | tuple) or len(shape) <= dim:
        raise ConfigError(
            f"{where}: found shape {shape!r} with partition_dim {dim!r} and partition_type "
            f"{spec.get('partition_type', 'column')!r}; a column is divided along dim 0 and a row along dim 1, and "
            "shape has an entry for it: a number of equal blocks, or the list of their sizes"
        )
    blocks = shape[dim]
    if isinstance(blocks, list | tuple):
        return tuple(int(size) for size in blocks)
    return int(blocks) if int(blocks) > 0 else 1


Policy = Mapping[type[nn.Module], tuple[str, ...] | str]


def plan_of_policy(model: nn.Module, policy: Any, table: TensorPlan | None) -> TensorPlan:
    """Return the plan that the policy describes.

    Args:
        policy: the names of row-parallel linear layers, by class of the model's layers.
        table: the plan of the model's family, if any. The table also covers fused layers and position biases, which
            names do not describe; it is returned if its row-parallel layers are those of the policy.

    Raises:
        ConfigError: see `check_policy`; also for a fused layer, since the policy does not say how to divide it.
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
    """Check that a policy fits the model.

    Raises:
        ConfigError: the policy is malformed, the model has no module of a class, or modules of a class lack a named
            linear layer.
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
        if not isinstance(names, str) and not (
            isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names)
        ):
            shown = names.__name__ if isinstance(names, type) else repr(names)
            raise ConfigError(
                f"injection_policy: found {shown} for {cls.__name__}; give the names of linear layers whose "
                f"outputs are summed over the ranks, of {', '.join(sorted(inside)) or 'none'}, or leave it out: "
                "the model's own structure is known then"
            )
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
    """Yield the paths of the linear layers in modules of the policy's classes, and whether the policy names each."""
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
