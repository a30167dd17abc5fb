"""A plan by structure, for models that no table knows and that bring none.

What a module's own linear layers tell:

- Attention: a query, a key and a value layer by their usual names, and one output layer that reads as many features as
  the query layer gives. The numbers of heads are in `model.config`, or in the module.
- A feed-forward block: a chain of two linear layers of which the first (with a gate of the same shape beside it, if
  there is one) widens and the second returns to the width of the input: the last one before the residual connection is
  row-parallel.

Everything else stays whole. A model in which nothing is found is refused, with the reason.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import Shard

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.cuts import role_of
from deepspeed.tensor_parallel.plans import Along, Rule, TensorPlan, heads_of_model

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
