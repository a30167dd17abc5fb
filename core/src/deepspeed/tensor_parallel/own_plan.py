"""The plan that a transformers model brings itself: `base_model_tp_plan` of its config, and `_tp_plan` of its class."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.cuts import along_of, role_of
from deepspeed.tensor_parallel.plans import Rule, TensorPlan, heads_of_model

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
