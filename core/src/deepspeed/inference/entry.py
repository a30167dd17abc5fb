"""`deepspeed.init_inference` prepares a model on its device, divided over the ranks, and returns an engine."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import deepspeed.comm as dist
from deepspeed.config import read_config
from deepspeed.config.inference import DeepSpeedInferenceConfig, DeepSpeedTPConfig
from deepspeed.config.intake import parse_section
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.config.precision import torch_dtype
from deepspeed.config.supported import check_supported
from deepspeed.engine.device import claim_device, claim_dtypes
from deepspeed.errors import CheckpointError, ConfigError, StateError
from deepspeed.inference.checkpoint import CheckpointWeights, read_description
from deepspeed.inference.engine import InferenceEngine, all_ranks, division_of, save_parts
from deepspeed.inference.injection import inject
from deepspeed.inference.injection.inject import is_injected
from deepspeed.inference.load_weights import has_no_values, load_weights, take_values_away
from deepspeed.inference.quantized import Packing, dtype_of, layer_groups
from deepspeed.log import announce
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh
from deepspeed.precision.policy import cast_buffers, cast_floating
from deepspeed.tensor_parallel.derived_plans import check_policy
from deepspeed.tensor_parallel.entry import divide_over

# keys whose values are Python objects, which are checked separately
_OF_PYTHON = ("injection_policy", "injection_dict", "injection_policy_tuple")


def default_inference_config() -> dict[str, Any]:
    """Return every key with its default, as a dict."""
    return DeepSpeedInferenceConfig().model_dump()


def init_inference(model: torch.nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Prepare a trained model for inference. With several tensor-parallel ranks, the call is a collective of all ranks.

    The module is changed in place: cast, moved to this rank's device, divided over the ranks, and set to evaluation
    mode. Call this once per model, under `deepspeed --num_gpus N` or plain python.

    Args:
        model: the whole model on every rank; the weights of the first rank are used. With `checkpoint` the model may be
            on the meta device (`deepspeed.OnDevice`), and its own values are dropped.
        config: dict, path of a JSON file, or `DeepSpeedInferenceConfig`; see docs/howto/run-inference.md for its keys.
        **kwargs: the same keys. A key that is also in `config` must have the same value there.

    Returns:
        An engine that is called like the model; its `module` is the model.

    Raises:
        ConfigError: a key is invalid (the message names key, value and allowed values), or the model cannot be divided.
        CheckpointError: a file or a weight of `checkpoint` is missing, damaged or of another model; names it.
        StateError: fused blocks are requested, but another engine has already injected them into the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"init_inference: model is {type(model).__name__}; pass a torch.nn.Module")
    settings = _settings(config, kwargs)
    check_supported(settings)
    if settings.replace_with_kernel_inject and is_injected(model):
        raise StateError(
            f"init_inference: there is an engine over this {type(model).__name__} already, of init_inference or "
            "InferenceEngineV2, and its layers compute by fused blocks; go on with that engine (InferenceEngineV2 "
            "takes that of init_inference), or build the model again, since an engine does not give it back. A model "
            "that you gave to inject() is whole after restore() of what that returned"
        )
    loads = _loads(model, settings)
    groups_of = layer_groups(settings)
    dtype = dtype_of(model) if groups_of is not None else torch_dtype(settings.dtype)
    claim_dtypes({"dtype": dtype})
    if settings.injection_policy is not None:
        check_policy(model, settings.injection_policy)
    mesh = None
    if settings.tp_size > 1:
        dist.init_distributed()
        mesh = groups.create_mesh(asked={"tp": (settings.tp_size, "tensor_parallel.tp_size")})
    device = claim_device(argparse.Namespace())
    parts = settings.save_mp_checkpoint_path or settings.checkpoint_config.save_mp_checkpoint_path
    plan = None if groups_of is None else partial(Packing, model, groups_of, settings)
    home = torch.device("cpu") if settings.keep_module_on_host else device
    with _opened(settings, mesh) if loads else nullcontext() as weights:
        if weights is not None:
            take_values_away(model)
        cast_floating(model.parameters(), dtype)
        cast_buffers(model, None, (), dtype)
        if mesh is not None:
            section = TensorParallelConfig(tp_grain_size=settings.tensor_parallel.tp_grain_size)
            divide_over(model, mesh, section, policy=settings.injection_policy, has_values=not loads)
        if weights is not None:
            _load(model, weights, mesh, home, None if parts else plan)  # parts are saved as they are read
    if not settings.keep_module_on_host:
        model.to(device=device)
    if parts:
        save_parts(model, mesh, dtype, Path(parts))
    if plan is not None and (parts or not loads):
        plan().apply()
    if settings.replace_with_kernel_inject:
        _inject(model, settings)
    return InferenceEngine(model.eval(), settings, group=None if mesh is None else mesh.group("tp"), dtype=dtype)


def _loads(model: torch.nn.Module, settings: DeepSpeedInferenceConfig) -> bool:
    """Return whether the weights come from `checkpoint`."""
    if settings.checkpoint or settings.checkpoint_config.checkpoint_dir:
        return True
    if settings.set_empty_params or has_no_values(model):
        asked = "set_empty_params" if settings.set_empty_params else "init_inference"
        raise ConfigError(
            f"{asked}: found {type(model).__name__}{' on the meta device' if has_no_values(model) else ''} and no "
            "checkpoint, so that the weights would have no values; name their files in checkpoint, or give a model "
            "that has its weights"
        )
    return False


def _opened(settings: DeepSpeedInferenceConfig, mesh: Mesh | None) -> CheckpointWeights:
    """Open the files on every rank, or fail on every rank."""
    asked = settings.checkpoint_config
    rank, num_ranks = (mesh.rank("tp"), mesh.size("tp")) if mesh is not None else (0, 1)

    with ExitStack() as until_all_could:

        def open_all() -> CheckpointWeights:
            base_dir = settings.base_dir or asked.base_dir or ""
            files = read_description(settings.checkpoint or asked.checkpoint_dir, base_dir)
            return until_all_could.enter_context(CheckpointWeights(files, rank, num_ranks))

        weights = all_ranks().together(open_all, "open the checkpoint")
        until_all_could.pop_all()
        return weights


def _load(
    model: torch.nn.Module,
    weights: CheckpointWeights,
    mesh: Mesh | None,
    device: torch.device,
    plan: Callable[[], Packing] | None,
) -> None:
    """Load the values on every rank, or fail on every rank. With `plan`, pack weights as they are read."""
    division = division_of(model, mesh)

    def load() -> None:
        if weights.files.division and weights.files.division != tuple(division):
            raise CheckpointError(
                f"checkpoint: {weights.files.what} holds the parts of a model that was divided otherwise; give the "
                "injection_policy and tp_grain_size with which it was saved, or name files of whole weights"
            )
        load_weights(model, weights, device, None if plan is None else plan())

    all_ranks().together(load, "load the checkpoint")


def _inject(model: torch.nn.Module, settings: DeepSpeedInferenceConfig) -> None:
    name = type(model).__name__
    done = inject(model, max_out_tokens=settings.max_out_tokens)
    if not done.replaced:
        reason = next(iter(done.left.values()), "none is of a family with fused blocks")
        announce(f"replace_with_kernel_inject: the layers of {name} stay its own: {reason}")


def _settings(config: Any, kwargs: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
    if isinstance(config, DeepSpeedInferenceConfig):
        if kwargs:
            raise ConfigError(
                f"init_inference: found a DeepSpeedInferenceConfig and the arguments {', '.join(sorted(kwargs))}; put "
                "them into the config"
            )
        return config
    given = dict(config if isinstance(config, Mapping) else {} if config is None else read_config(config))
    for name, value in kwargs.items():
        if name in given and not _is_same_key(name, given[name], value):
            raise ConfigError(
                f"init_inference: found {name} {given[name]!r} in config and {value!r} as an argument; give one"
            )
        given[name] = value
    policies = {name: given.pop(name) for name in _OF_PYTHON if given.get(name) is not None}
    tp = given.get("tensor_parallel", given.get("tp"))
    if isinstance(tp, DeepSpeedTPConfig):
        given["tensor_parallel"] = tp.model_dump(exclude_unset=True)
        given.pop("tp", None)
    settings = parse_section(DeepSpeedInferenceConfig, given)
    if "injection_policy_tuple" in policies:
        raise ConfigError(
            "injection_policy_tuple: it is not in this version; give injection_policy={class of the layers: names}"
        )
    if len(policies) > 1:
        raise ConfigError("init_inference: found injection_policy and injection_dict, its older name; give one")
    for policy in policies.values():
        settings.injection_policy = policy
    return settings


def _is_same_key(name: str, one: Any, other: Any) -> bool:
    """Return whether two values of a key are equal. The names of a dtype are: "float32" and torch.float32."""
    is_same = bool(one == other)
    if is_same or name != "dtype":
        return is_same
    dtypes = [parse_section(DeepSpeedInferenceConfig, {"dtype": value}).dtype for value in (one, other)]
    return dtypes[0] == dtypes[1]
