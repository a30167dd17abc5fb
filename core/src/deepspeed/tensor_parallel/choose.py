"""Which plan a model is divided by: the user's, a preset, the table of its family, its own `tp_plan`, its structure."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.tensor_parallel.own_plan import own_plan
from deepspeed.tensor_parallel.partition_config import plan_of_config
from deepspeed.tensor_parallel.plans import PLANS, TensorPlan, preset_plan
from deepspeed.tensor_parallel.policy import Policy, plan_of_policy
from deepspeed.tensor_parallel.structure import plan_of_structure


def choose_plan(
    model: nn.Module,
    *,
    preset_model: str | None = None,
    partition_config: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
) -> TensorPlan:
    """The plan for `model`, first that there is of: `partition_config`, `policy` (see `policy.py`), `preset_model`, the
    table of its model type, the `tp_plan` that transformers gives it, and what its structure tells.

    Raises:
        ConfigError: for an unknown preset, a malformed config, or a model whose structure does not tell.
    """
    config = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    if partition_config is not None:
        uses_table = bool(partition_config.get("use_default_specs", False))
        default = _table_of(model_type, preset_model, config) if uses_table or preset_model else None
        return plan_of_config(partition_config, default, model_type, model)
    if policy is not None:
        return plan_of_policy(model, policy, _table_of(model_type, preset_model, config))
    if preset_model is not None:
        return preset_plan(preset_model, config)
    if model_type in PLANS:
        return PLANS[model_type](config)
    return own_plan(model) or plan_of_structure(model)


def _table_of(model_type: str, preset_model: str | None, config: Any) -> TensorPlan | None:
    if preset_model is not None:
        return preset_plan(preset_model, config)
    return PLANS[model_type](config) if model_type in PLANS else None
