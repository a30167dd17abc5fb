"""`deepspeed.tp_model_init`, and the functions that `deepspeed.initialize` calls for the section `tensor_parallel`.

A plan divides a model (`choose_plan`): the user's plan, a preset, the table of the model's family, the model's own
`tp_plan`, or a plan derived from its structure.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import deepspeed.comm as dist
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import expert_sizes, is_moe_param, is_sharded, reshard
from deepspeed.tensor_parallel.derived_plans import Policy, own_plan, plan_of_config, plan_of_policy, plan_of_structure
from deepspeed.tensor_parallel.divide import divide_model
from deepspeed.tensor_parallel.plans import PLANS, TensorPlan, preset_plan
from deepspeed.tensor_parallel.ranges import mark_params
from deepspeed.tensor_parallel.ranks import TensorRanks, divided_modules
from deepspeed.tensor_parallel.vocabulary import check_loss


def choose_plan(
    model: nn.Module,
    *,
    preset_model: str | None = None,
    partition_config: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    is_stage: bool = False,
) -> TensorPlan:
    """Return the plan for `model` from the first source that exists: `partition_config`, `policy`, `preset_model`, the
    table of its model type, its transformers `tp_plan`, its structure. `is_stage`: see `plan_of_config`.

    Raises:
        ConfigError: for an unknown preset, a malformed config, or a structure that gives no plan.
    """
    config = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    if partition_config is not None:
        uses_table = bool(partition_config.get("use_default_specs", False))
        default = _table_of(model_type, preset_model, config) if uses_table or preset_model else None
        return plan_of_config(partition_config, default, model_type, model, is_stage=is_stage)
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


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **_: Any
) -> nn.Module:
    """Divide a model's layers over tensor-parallel ranks, in place. A collective of all ranks.

    Engines that are built later use the same ranks for this model. An engine without its own mesh also uses them for
    other models with parameters marked `tensor_model_parallel`; for whole models all ranks are data parallel.

    Args:
        model: the whole model, on every rank; the weights of each group's first rank are used.
        tp_size: number of ranks over which the model is divided; 1: the model stays whole.
        dtype: the dtype of its floating-point parameters and buffers; None: unchanged.
        config: the engine's configuration as a dict, with the section `tensor_parallel`.

    Returns:
        The same model.

    Raises:
        ConfigError: if the size does not divide the world, or the model cannot be divided over it.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"tp_model_init: model is {type(model).__name__}; pass a torch.nn.Module")
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ConfigError(f"tp_model_init: found tp_size {tp_size!r}; give the number of ranks that share a model")
    dist.init_distributed()
    section = config.get("tensor_parallel") if isinstance(config, Mapping) else None
    mesh = groups.create_mesh(asked={"tp": (tp_size, "tp_model_init: tp_size")})
    if tp_size > 1:
        divide_over(model, mesh, TensorParallelConfig(**(section or {})))
        groups.keep_for_divided(mesh)
    return _cast(model, dtype, mesh) if dtype is not None else model


def _cast(model: nn.Module, dtype: torch.dtype, mesh: Mesh) -> nn.Module:
    """Call `model.to(dtype)`, with support for sharded parameters."""
    sharded = [param for param in model.parameters() if is_sharded(param)]
    if not sharded:
        return model.to(dtype)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            continue
        if is_sharded(tensor):
            assert isinstance(tensor, nn.Parameter)
            reshard(tensor, lambda value: value.to(dtype), mesh.gradient_group())
        else:
            tensor.data = tensor.data.to(dtype)
    return model


def prepare_params(model: nn.Module) -> None:
    """Mark divided parameters again when an engine is built and they are on their device; see `ranges.mark_params`."""
    for module, ranks in divided_modules(model):
        mark_params(module, ranks)


def divide_expert(expert: nn.Module, mesh: Mesh) -> None:
    """Divide a feed-forward expert over the axis "tp" of `mesh`, by its structure. A collective of that axis.

    Raises:
        ConfigError: if its structure gives no plan.
    """
    ep_size = max(expert_sizes(expert).values(), default=1)
    divide_model(expert, TensorRanks(mesh.group("tp"), mesh.gradient_group(ep_size)), plan_of_structure(expert))


def divide_over(
    model: nn.Module,
    mesh: Mesh,
    section: TensorParallelConfig,
    *,
    policy: Policy | None = None,
    has_values: bool = True,
) -> None:
    """Divide `model` over the axis "tp" of `mesh`, unless the model or a module inside is divided already. A collective
    of that axis; of all ranks if the model is a pipeline stage.

    Args:
        policy: names of its row-parallel layers, see `derived_plans.py`; None: see `choose_plan`.
        has_values: see `divide.divide_model`.

    Raises:
        ConfigError: if the model is already divided over other ranks, or cannot be divided over these.
    """
    size = mesh.size("tp")
    known = [ranks for module, ranks in divided_modules(model) if not all(map(is_moe_param, module.parameters()))]
    for ranks in known:
        if ranks.group is not mesh.group("tp"):
            raise ConfigError(
                f"tensor parallelism: the model is divided over {ranks.world_size} ranks already, by tp_model_init, "
                f"and those are not the {size} of the engine's mesh; give both the same mesh"
            )
    if known:
        return
    if section.vocab_parallel_lm_head:
        check_loss(model)
    plan = choose_plan(
        model,
        preset_model=section.preset_model,
        partition_config=section.partition_config,
        policy=policy,
        is_stage=mesh.size("pp") > 1,
    )
    divide_model(
        model,
        TensorRanks(mesh.group("tp"), mesh.gradient_group()),
        plan,
        grain=section.grain,
        keeps_logits_divided=section.vocab_parallel_lm_head,
        divides_sequence=section.sequence_parallel,
        stays_whole=_layers_of_experts(model),
        has_values=has_values,
        is_stage=mesh.size("pp") > 1,
    )


def _layers_of_experts(model: nn.Module) -> set[str]:
    """Return the paths of modules with experts' parameters, which `deepspeed.moe` divides or leaves whole."""
    return {path for path, module in model.named_modules() if any(map(is_moe_param, module.parameters(recurse=False)))}
