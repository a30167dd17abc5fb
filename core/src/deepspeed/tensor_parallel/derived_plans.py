"""The plans of models that no table knows: the one that a model brings, or one by the structure of its layers.

A transformers model may bring one: `base_model_tp_plan` of its config, and `_tp_plan` of its class. Else its own linear
layers say:

- Attention: a query, a key and a value layer by their usual names, and one output layer that reads as many features as
  the query layer gives. The numbers of heads are in `model.config`, or in the module.
- A feed-forward block: a chain of two linear layers of which the first (with a gate of the same shape beside it, if
  there is one) widens and the second returns to the width of the input: the last one before the residual connection is
  row-parallel.

Everything else stays whole. A model in which nothing is found is refused, with the reason.
"""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.cuts import along_of, role_of
from deepspeed.tensor_parallel.plans import Along, Rule, TensorPlan, heads_of_model

# transformers' names of styles; the output layer is divided with the embedding, see vocabulary.py
_STYLES: Mapping[str, tuple[Placement, bool]] = {
    "colwise": (Shard(0), False),
    "colwise_gather_output": (Shard(0), True),
    "colwise_rep": (Shard(0), True),
    "rowwise": (Shard(1), False),
    "replicated_with_grad_allreduce": (Replicate(), False),
}


def own_plan(model: nn.Module) -> TensorPlan | None:
    """The model's own plan; None: it has none.

    Raises:
        ConfigError: for a style that is not known here.
    """
    config = getattr(model, "config", None)
    styles = getattr(config, "base_model_tp_plan", None)
    if not styles:
        return None
    rules = []
    for path, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if Rule(pattern, Replicate()).matches(path)), None)
        if style is None:
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
    """The plan that the structure of `model` tells.

    Raises:
        ConfigError: if it tells none.
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
    """`others`: further modules of the block; one that is not elementwise would need all features."""
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
