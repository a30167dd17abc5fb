"""What third-party libraries do with an engine: the configurations that they give, and what they read and call.

Read from the libraries' sources, as `test_contract.py`, which has names and signatures. The libraries themselves run in
`downstream/recipes`.
"""

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.testing.distributed import run_ranks

# ---- configs as the libraries hand them over ------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "accelerate": {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    },
    "lightning": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200000000,
            "reduce_bucket_size": 200000000,
            "sub_group_size": 1000000000000,
        },
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
    },
    "lightning fp16": {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    },
    "lightning, stage 3 with offload": {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1000000000000,
            "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 4, "pin_memory": False},
        },
    },
    "transformers, stage 3": {
        "train_batch_size": 4,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1024,
            "stage3_prefetch_bucket_size": 921,
            "stage3_param_persistence_threshold": 320,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "trl": {  # keys with dots are no keys; they must be tolerated
        "train_batch_size": 1,
        "zero_optimization": {"stage": 0},
        "zero_optimization.reduce_bucket_size": 4096,
    },
    "transformers": {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1024},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1}},
    },
}

# ---- top-level keys of a checkpoint, which Lightning keeps out of client states -------------------------------------

CLIENT_STATE_MAY_NOT_HAVE = """
    module buffer_names optimizer param_shapes lr_scheduler sparse_tensor_module_names skipped_steps global_steps
    global_samples dp_world_size mp_world_size ds_config ds_version
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_taken(name: str) -> None:
    config = deepspeed.DeepSpeedConfig(CONFIGS[name], world_size=1)
    config.check_supported()
    assert config.raw is CONFIGS[name]


# ---- the engine, built as each library builds it --------------------------------------------------------------------


SHARD_ALL = {"stage3_param_persistence_threshold": 0}  # matters to stage 3 only


def optimizers_of_accelerate(stage: int) -> list[bool]:
    """Accelerate's replacement of a torch optimizer under offload, made from its groups."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    changed = []
    for cls, kwargs in ((DeepSpeedCPUAdam, {"adamw_mode": True}), (DeepSpeedCPUAdagrad, {}), (DeepSpeedCPULion, {})):
        model = torch.nn.Linear(4, 2)
        before = model.weight.detach().clone()
        given = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=0.1)
        config = {
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = cls(given.param_groups, lr=0.1, weight_decay=0.01, **kwargs)
        engine, *_ = deepspeed.initialize(model=model, config_params=config, optimizer=optimizer)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.destroy()
        changed.append(not torch.equal(model.weight, before))
    return changed


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_optimizers_on_the_host(stage: int) -> None:
    assert run_ranks(1, optimizers_of_accelerate, stage) == [[True, True, True]]


def as_transformers(stage: int, folder: str) -> dict[str, Any]:
    """The Trainer: optimizer and schedule from the config, a checkpoint without a tag, groups of no parallelism."""
    from deepspeed.utils import groups, logger

    level = logger.level
    logger.setLevel(30)
    model = torch.nn.Linear(4, 2)
    config = {**CONFIGS["transformers"], "zero_optimization": {"stage": stage, **SHARD_ALL}}
    engine, face, _, scheduler = deepspeed.initialize(
        model=model, config_params=config, model_parameters=list(model.parameters())
    )
    logger.setLevel(level)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(engine(torch.ones(4, 4)).sum(), scale_wrt_gas=False)
    engine.step()
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    path, _ = engine.load_checkpoint(
        folder, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    facts = {
        "folders": sorted(each.name for each in Path(folder).glob("global_step*")),
        "path": path is not None,
        "scheduler": scheduler.get_last_lr() == [group["lr"] for group in face.param_groups],
        "stage": engine.config.get("zero_optimization", {}).get("stage"),
        "norm": engine.get_global_grad_norm() > 0,
        "sequence parallel": (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()),
        "device": deepspeed.accelerator.get_accelerator().current_device_name(),
        "rank": deepspeed.comm.get_rank(),
    }
    scheduler.load_state_dict(scheduler.state_dict())
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_transformers_engine(stage: int, tmp_path: Path) -> None:
    (facts,) = run_ranks(1, as_transformers, stage, str(tmp_path))
    assert facts == {
        "folders": ["global_step1"],
        "path": True,
        "scheduler": True,
        "stage": stage,
        "norm": True,
        "sequence parallel": (1, 0),
        "device": "cpu",
        "rank": 0,
    }
    assert (tmp_path / "latest").read_text() == "global_step1"


def as_accelerate(stage: int, folder: str) -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {**CONFIGS["accelerate"], "zero_optimization": {"stage": stage, **SHARD_ALL}, "an_unknown_key": {"a": 1}}
    engine, face, loader, scheduler = deepspeed.initialize(
        model=model,
        config_params=config,
        optimizer=optimizer,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1),
    )
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum(), scale_wrt_gas=False)
    engine.step()
    engine.save_checkpoint(folder, "pytorch_model")
    path, client_state = engine.load_checkpoint(folder, "pytorch_model")
    norm = engine.get_global_grad_norm()
    facts = {
        "loader": loader,
        "is a module": isinstance(engine, torch.nn.Module),
        "config is a dict": type(engine.config) is dict and engine.config["zero_optimization"]["stage"] == stage,
        "norm is a number": float(norm) > 0,
        "overflow": face.overflow,
        "optimizer": all(hasattr(face, name) for name in ("param_groups", "state", "defaults", "state_dict")),
        "scheduler": scheduler.get_last_lr() == [0.1 * 0.1],
        "device": engine.device.type == engine.module.weight.device.type,
        "gathers": engine.zero_gather_16bit_weights_on_model_save(),
        "path": path is not None,
        "client state": client_state,
        "weights": sorted(engine._consolidated_16bit_state_dict()),
    }
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerates_engine(stage: int, tmp_path: Path) -> None:
    (facts,) = run_ranks(1, as_accelerate, stage, str(tmp_path))
    assert facts == {
        "loader": None,
        "is a module": True,
        "config is a dict": True,
        "norm is a number": True,
        "overflow": False,
        "optimizer": True,
        "scheduler": True,
        "device": True,
        "gathers": False,
        "path": True,
        "client state": {},
        "weights": ["bias", "weight"],
    }
    assert (tmp_path / "latest").read_text() == "pytorch_model"


def as_lightning(stage: int, folder: str) -> dict[str, Any]:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    config = {**CONFIGS["lightning"], "zero_optimization": {"stage": stage, **SHARD_ALL}}
    engine, face, _, _ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        config=config,
        model=model,
        model_parameters=filter(lambda param: param.requires_grad, model.parameters()),
        optimizer=optimizer,
        lr_scheduler=None,
        dist_init_required=False,
    )
    engine.lr_scheduler = None
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3}, tag="checkpoint", exclude_frozen_parameters=False)
    _, client_state = engine.load_checkpoint(
        folder, load_optimizer_states=True, load_lr_scheduler_states=False, load_module_strict=True
    )
    facts = {
        "optimizer": isinstance(face, DeepSpeedOptimizer) and isinstance(engine.optimizer, torch.optim.Optimizer),
        "inner optimizer": face.optimizer is optimizer,
        "optimizable": callable(engine) and callable(engine.step),
        "client state": client_state,
    }
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightnings_engine(stage: int, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    (facts,) = run_ranks(1, as_lightning, stage, str(tmp_path))
    assert facts == {"optimizer": True, "inner optimizer": True, "optimizable": True, "client state": {"epoch": 3}}

    folder = tmp_path / "checkpoint"
    (optim_file,) = get_optim_files(str(folder))
    state = torch.load(optim_file, map_location="cpu", weights_only=True)["optimizer_state_dict"]
    assert state["zero_stage"] == stage
    model = torch.load(get_model_state_file(str(folder), stage), map_location="cpu", weights_only=True)
    assert set(CLIENT_STATE_MAY_NOT_HAVE.split()) <= set(model)
    assert (tmp_path / "zero_to_fp32.py").is_file()


def as_trl() -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    engine, face, _, _ = deepspeed.initialize(model=model, config=dict(CONFIGS["trl"]))
    engine.eval()
    with torch.no_grad():
        output = engine(torch.ones(1, 4))
    facts = {"optimizer": face, "output": list(output.shape), "training": engine.module.training}
    engine.destroy()
    return facts


def test_trls_reference_model_needs_no_optimizer() -> None:
    assert run_ranks(1, as_trl) == [{"optimizer": None, "output": [1, 2], "training": False}]


def whole_parameters(folder: str) -> dict[str, Any]:
    """peft, transformers: contexts around parameters below stage 3."""
    model = torch.nn.Linear(4, 2)
    unfilled = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    with deepspeed.zero.Init(config_dict_or_path=unfilled, enabled=False):
        built = torch.nn.Linear(3, 3)
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0, fwd_module=model):
        torch.nn.init.ones_(model.weight)
    with deepspeed.zero.GatheredParameters(model.weight, modifier_rank=None):
        total = model.weight.sum().item()
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, _, _, _ = deepspeed.initialize(model=model, config={**config, "zero_optimization": {"stage": 2}})
    engine.backward(engine(torch.ones(1, 4)).sum())
    grad = deepspeed.utils.safe_get_full_grad(model.weight)
    facts = {"built": list(built.weight.shape), "total": total, "grad": grad.tolist(), "dtype": str(built.weight.dtype)}
    engine.destroy()
    return facts


def test_contexts_and_gradients_of_whole_parameters(tmp_path: Path) -> None:
    (facts,) = run_ranks(1, whole_parameters, str(tmp_path))
    assert facts == {"built": [3, 3], "total": 8.0, "grad": [[1.0] * 4] * 2, "dtype": "torch.float32"}
