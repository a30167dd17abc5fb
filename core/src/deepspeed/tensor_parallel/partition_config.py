"""`tensor_parallel.partition_config`: the plan in DeepSpeed's documented form.

    {"use_default_specs": false,
     "layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"},
                     {"patterns": [".*\\\\.gate_up_proj\\\\.weight$"], "partition_type": "column",
                      "shape": [2, -1], "partition_dim": 0}]}

A pattern is a regular expression for the names of parameters, from their begin. The first that matches counts.
`shape` says how a fused weight is divided along `partition_dim`: so many equal blocks, or blocks of the sizes in a
list; each is divided by itself. Layers are cut at heads where the model's config has numbers of heads and the features
are whole heads of its attention.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.cuts import along_of
from deepspeed.tensor_parallel.plans import Rule, TensorPlan, heads_of_model

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
    """The plan that `config` describes for `model`.

    Args:
        default: a plan for modules that no pattern names; None: these stay whole.
        model_type: of the model; a spec may be for some types only.
        is_stage: the model is a stage of a pipeline, of which another may have what the patterns match.

    Raises:
        ConfigError: for a malformed spec, a pattern that matches nothing, or no spec at all.
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
