"""What third-party libraries look up in `deepspeed`, as one table, read from their sources.

transformers 5.24.0, accelerate 1.15.0, lightning 2.6.6, peft 0.21.2, trl 1.16.0. This file has names and signatures;
`test_contract_engines.py` has configurations and behaviour. What belongs to features that this version does not have
is listed at the end with its reason: it imports, and refuses when it is used. When such a line begins to work, its test
fails and the line moves up.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.launcher.arguments import create_parser
from packaging.specifiers import SpecifierSet

# ---- reachable from a plain `import deepspeed`, without importing anything else -------------------------------------

PUBLIC = """
    DeepSpeedEngine __version__ accelerator add_config_arguments checkpointing.configure comm.get_rank
    comm.init_distributed comm.is_initialized get_accelerator init_distributed init_inference initialize log_dist logger
    runtime.engine.DeepSpeedEngine runtime.lr_schedules.VALID_LR_SCHEDULES tp_model_init utils.groups
    utils.logging.logger utils.safe_get_full_grad zero.GatheredParameters zero.Init zero.register_external_parameter
"""

# ---- module -> names that are imported from it ----------------------------------------------------------------------

IMPORTS = {
    "deepspeed.accelerator": "get_accelerator set_accelerator DeepSpeedAccelerator",
    "deepspeed.accelerator.abstract_accelerator": "DeepSpeedAccelerator",
    "deepspeed.accelerator.real_accelerator": "get_accelerator set_accelerator",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "deepspeed.comm": "init_distributed is_initialized get_rank get_world_size barrier all_reduce all_gather broadcast",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.lion": "DeepSpeedCPULion",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "checkpoint configure is_configured",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer",
    "deepspeed.runtime.compiler": "disable dummy_decorator enable is_compile_supported is_compiling",
    "deepspeed.runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.lr_schedules": "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    "deepspeed.runtime.utils": "clip_grad_norm_ get_global_norm move_to_device see_memory_usage",
    "deepspeed.runtime.zero": "GatheredParameters Init ZeroParamStatus register_external_parameter",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
    "deepspeed.runtime.zero.partition_parameters": "Init GatheredParameters ZeroParamStatus get_accelerator "
    "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange register_external_parameter",
    "deepspeed.runtime.zero.utils": "is_zero_supported_optimizer",
    "deepspeed.utils": "RepeatingLoader groups logger log_dist safe_get_full_fp32_param safe_get_full_grad "
    "safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module",
    "deepspeed.utils.groups": "_get_sequence_parallel_group _get_sequence_parallel_world_size "
    "_get_sequence_parallel_rank _get_data_parallel_group _get_model_parallel_group",
    "deepspeed.utils.logging": "logger log_dist",
    "deepspeed.utils.tensor_fragment": "safe_get_full_grad",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files "
    "convert_zero_checkpoint_to_fp32_state_dict load_state_dict_from_zero_checkpoint",
}

# ---- old modules whose attributes are replaced, or compared by identity: the old name is the new module -------------

SAME_MODULE = {
    "deepspeed.runtime.engine": "deepspeed.engine.engine",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.zero.construct",
    "deepspeed.utils.groups": "deepspeed.parallel.groups",
    "deepspeed.utils.logging": "deepspeed.log",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator.current",
}

# ---- calls, as (function, positional arguments, keyword arguments) --------------------------------------------------

ANY = object()
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    # accelerate
    (
        "deepspeed:initialize",
        (),
        {"model": ANY, "config_params": ANY, "optimizer": ANY, "lr_scheduler": ANY, "mpu": ANY},
    ),
    ("deepspeed:initialize", (), {"model": ANY, "config_params": ANY, "model_parameters": ANY}),
    ("deepspeed.comm:init_distributed", (), {"dist_backend": None, "auto_mpi_discovery": False, "timeout": ANY}),
    ("deepspeed.ops.adam:DeepSpeedCPUAdam", (ANY,), {"lr": ANY, "weight_decay": ANY, "adamw_mode": ANY}),
    ("deepspeed.ops.adagrad:DeepSpeedCPUAdagrad", (ANY,), {"lr": ANY, "weight_decay": ANY}),
    ("deepspeed.ops.lion:DeepSpeedCPULion", (ANY,), {"lr": ANY, "weight_decay": ANY}),
    (
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers",
        (),
        {
            "model_name_or_path": ANY,
            "sequence_parallel_size": 2,
            "seq_length": 64,
            "seq_length_is_variable": True,
            "core_attn_implementation": "sdpa",
            "micro_batch_size": 1,
            "disable_in_eval": True,
        },
    ),
    (
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter",
        (ANY,),
        {"sp_rank": 0, "sp_group": ANY, "sp_world_size": 2, "device": ANY},
    ),
    ("deepspeed.zero:GatheredParameters", (ANY,), {"modifier_rank": None, "fwd_module": None, "enabled": True}),
    ("deepspeed.utils:set_z3_leaf_modules", (ANY, ANY), {}),
    # lightning
    ("deepspeed:init_distributed", ("gloo",), {"distributed_port": 29500, "timeout": timedelta(minutes=1)}),
    (
        "deepspeed:initialize",
        (),
        {
            "args": ANY,
            "config": ANY,
            "model": ANY,
            "model_parameters": ANY,
            "optimizer": ANY,
            "lr_scheduler": ANY,
            "dist_init_required": False,
        },
    ),
    ("deepspeed.zero:Init", (), {"enabled": True, "remote_device": None, "config_dict_or_path": ANY}),
    (
        "deepspeed:checkpointing.configure",
        (),
        {
            "mpu_": None,
            "partition_activations": ANY,
            "contiguous_checkpointing": ANY,
            "checkpoint_in_cpu": ANY,
            "profile": None,
        },
    ),
    # transformers
    ("deepspeed.zero:Init", (), {"config_dict_or_path": ANY}),
    ("deepspeed.zero:register_external_parameter", (ANY, ANY), {}),
    ("deepspeed.runtime.zero.partition_parameters:zero_wrapper_for_fp_tensor_constructor", (ANY, ANY), {}),
    (
        "deepspeed.runtime.zero.partition_parameters:zero_wrapper_for_fp_tensor_constructor",
        (ANY, ANY),
        {"target_device": ANY},
    ),
]

ENGINE = "deepspeed.engine.engine:DeepSpeedEngine."
ENGINE_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("set_gradient_accumulation_boundary", (), {"is_boundary": True}),
    ("backward", (ANY,), {"scale_wrt_gas": False}),
    ("backward", (ANY,), {"retain_graph": True, "create_graph": True}),
    ("step", (), {}),
    ("get_global_grad_norm", (), {}),
    ("compile", (), {"backend": ANY, "compile_kwargs": ANY}),
    ("save_checkpoint", (ANY, "pytorch_model"), {}),
    ("save_checkpoint", (ANY,), {"exclude_frozen_parameters": True}),
    ("save_checkpoint", (ANY,), {"client_state": ANY, "tag": "checkpoint", "exclude_frozen_parameters": False}),
    ("load_checkpoint", (ANY, "pytorch_model"), {}),
    (
        "load_checkpoint",
        (ANY,),
        {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True},
    ),
    ("load_checkpoint", (ANY,), {"tag": "checkpoint", "load_module_strict": False}),
    ("zero_gather_16bit_weights_on_model_save", (), {}),
    ("_zero3_consolidated_16bit_state_dict", (), {"exclude_frozen_parameters": True}),
    ("_consolidated_16bit_state_dict", (), {}),
    ("destroy", (), {}),
    ("train", (), {}),
    ("eval", (), {}),
    ("parameters", (), {}),
    ("modules", (), {}),
]

# ---- not in this version --------------------------------------------------------------------------------------------

# What libraries probe on parameters of stage 3 is in test_contract_stage3.py: ds_id, ds_shape, ds_numel,
# ds_status, ds_tensor, ds_active_sub_modules, partition_numel(), all_gather(), partition(), ds_external_parameters().
CONFIGS_OUT_OF_SCOPE: dict[str, dict[str, Any]] = {
    "DeepCompile": {"compile": {"deepcompile": True}},
}


def find(address: str) -> Any:
    """The object at "package.module:name.name"."""
    module_name, _, path = address.partition(":")
    value = importlib.import_module(module_name)
    for name in path.split("."):
        value = getattr(value, name)
    return value


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_the_distribution_is_there_as_libraries_ask_for_it() -> None:
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    found = importlib.metadata.version("deepspeed")
    assert found == deepspeed.__version__
    # transformers; accelerate's floor and its newest branch; Lightning's floor, and its branch for old versions
    for wanted in (">=0.9.3", ">=0.18.2", ">=0.19.6", ">=0.16.0"):
        assert SpecifierSet(wanted).contains(found)
    assert not SpecifierSet("<0.6.6").contains(found)


def test_the_compat_distribution_has_no_code_and_our_version() -> None:
    text = (Path(__file__).parents[3] / "compat" / "deepspeed" / "pyproject.toml").read_text()
    assert f'version = "{deepspeed.__version__}"' in text
    assert "packages = []" in text


@pytest.mark.parametrize(
    "flags",
    [
        "--node_rank 1 --no_ssh --num_gpus 2",
        "--no_local_rank --launcher pdsh --exclude localhost:0 --master_addr localhost",
        "--no_local_rank --launcher openmpi --include localhost:0 --module",
    ],
)
def test_the_launcher_knows_the_flags_that_accelerate_gives(flags: str) -> None:
    given = ["--hostfile", "hosts", *flags.split(), "--master_port", "29501", "script.py", "--flag"]
    args = create_parser().parse_args(given)
    assert (args.user_script, args.user_args) == ("script.py", ["--flag"])


def test_public_names_need_no_other_import() -> None:
    lines = [f"deepspeed.{name}" for name in PUBLIC.split()]
    # the first line: what `import deepspeed` alone may not load
    program = "import sys, deepspeed\nassert 'torch' not in sys.modules\n" + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("address", [f"{module}:{name}" for module, names in IMPORTS.items() for name in names.split()])
def test_imports(address: str) -> None:
    assert find(address) is not None


@pytest.mark.parametrize("old", SAME_MODULE)
def test_an_old_address_is_the_new_module(old: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(SAME_MODULE[old])


@pytest.mark.parametrize(("address", "args", "kwargs"), CALLS, ids=lambda value: value if type(value) is str else "")
def test_calls_fit_the_signature(address: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inspect.signature(find(address)).bind(*args, **kwargs)


@pytest.mark.parametrize(
    ("method", "args", "kwargs"), ENGINE_CALLS, ids=lambda value: value if type(value) is str else ""
)
def test_calls_fit_the_engine(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inspect.signature(find(ENGINE + method)).bind(object(), *args, **kwargs)


def test_transformers_can_replace_the_constructor_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import partition_parameters as pp
    from deepspeed.zero import construct

    monkeypatch.setattr(pp, "zero_wrapper_for_fp_tensor_constructor", lambda fn, *args, **kwargs: "replaced")
    assert construct.zero_wrapper_for_fp_tensor_constructor(torch.empty) == "replaced"


def test_the_constructor_wrapper_places_and_casts() -> None:
    from deepspeed.runtime.zero import partition_parameters as pp

    empty = pp.zero_wrapper_for_fp_tensor_constructor(torch.zeros, torch.float16, target_device="meta")
    assert (empty(3).dtype, empty(3).device.type) == (torch.float16, "meta")
    arange = pp.zero_wrapper_for_fp_tensor_constructor(pp._orig_torch_arange, torch.float16, target_device="cpu")
    assert arange(4).dtype == torch.int64
    assert arange(4, device="meta").device.type == "meta"


def test_what_is_not_here_says_so() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = deepspeed.nonsense
    with pytest.raises(ValueError, match="DominoTransformer: Domino is not in this version"):
        importlib.import_module("deepspeed.runtime.domino.transformer").DominoTransformer()


@pytest.mark.parametrize("feature", CONFIGS_OUT_OF_SCOPE)
def test_configs_not_in_this_version(feature: str) -> None:
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, **CONFIGS_OUT_OF_SCOPE[feature]}, world_size=1)
    with pytest.raises(ValueError, match="not (yet )?in this version"):
        config.check_supported()
