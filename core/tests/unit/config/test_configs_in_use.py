"""Configs as users have them: each one builds, or is refused for the reason it should be."""

import json

import pytest
import torch
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.optim import create_optimizer, create_scheduler
from torch.nn import Parameter

ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
SIZES = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
HF_AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
HF_AUTO = {
    "fp16": {**FP16, "enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": HF_AUTO_OPTIMIZER,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
HF_ZERO2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
HF_ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
LIGHTNING_ZERO = {
    "stage": 2,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "sub_group_size": 1_000_000_000_000,
}
ACCELERATE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": float("inf"),
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}
MEGATRON = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": False},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {**FP16, "loss_scale_window": 500, "initial_scale_power": 11},
    "bf16": {"enabled": False},
    "curriculum_learning": {
        "enabled": False,
        "curriculum_type": "seqlen",
        "min_difficulty": 80,
        "max_difficulty": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100000, "difficulty_step": 8},
    },
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
}

BUILDS = {
    "Hugging Face, stage 3": {
        **SIZES,
        "bf16": {"enabled": True},
        "zero_optimization": {
            **HF_ZERO3,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 900_000,
            "stage3_param_persistence_threshold": 10_000,
        },
    },
    "CIFAR": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {**FP16, "loss_scale_window": 500, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    },
    "BERT": {
        **SIZES,
        "optimizer": {
            "type": "Lamb",
            "params": {
                "lr": 11e-3,
                "weight_decay": 0.01,
                "bias_correction": False,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
            },
        },
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
        "sparse_attention": None,
    },
    "GPT-2 of the early pages": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "zero_optimization": True,
        "fp32_allreduce": True,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": FP16,
        "activation_checkpointing": {
            "partition_activations": False,
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": False,
        },
    },
    "Megatron, stage 1": MEGATRON,
    "Hugging Face, stage 2, filled": {
        **SIZES,
        "fp16": {**FP16, "enabled": False},
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": HF_ZERO2,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "Lightning's default": {
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
        "zero_optimization": LIGHTNING_ZERO,
        "fp16": FP16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    },
    "Accelerate's default": ACCELERATE,
    "Megatron with a curriculum": {
        **MEGATRON,
        "curriculum_learning": {**MEGATRON["curriculum_learning"], "enabled": True},
    },
    "documentation, optimizer states on NVMe": {
        **SIZES,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4},
        },
    },
    "documentation, monitors": {
        "train_batch_size": 8,
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "csv_monitor": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": False, "group": "my_group", "team": "my_team", "project": "my_project"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}

REFUSED = {
    "Hugging Face, auto left": (
        {**HF_AUTO, "zero_optimization": HF_ZERO2},
        "train_batch_size: found 'auto', which only Hugging Face's Trainer",
    ),
    "a mu-optimizer": (
        {**SIZES, "optimizer": {"type": "MuAdam", "params": {"lr": 2e-4}}},
        "optimizer.type: found 'MuAdam', but it is not in this version",
    ),
    "an elastic job with a batch of its own": (
        {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}, **SIZES},
        "train_batch_size: found 32 beside elasticity",
    ),
    "both precisions": (
        {**SIZES, "fp16": FP16, "bf16": {"enabled": True}},
        "bf16.enabled: found true together with fp16.enabled",
    ),
    "optimizer arguments one level up": (
        {**SIZES, "optimizer": {"type": "AdamW", "lr": 1e-4}},
        "optimizer.lr: found an unknown key; allowed: legacy_fusion, params, type",
    ),
    "loss scaling under bf16": (
        {**SIZES, "bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10}},
        "bf16.loss_scale: found an unknown key; allowed: bf16_master_weights_and_grads,",
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_it_builds_without_a_warning(name, said):
    for source in (BUILDS[name], json.dumps(BUILDS[name])):
        config = DeepSpeedConfig(source, world_size=1)
        config.check_supported()
        if config.optimizer:
            optimizer = create_optimizer(config.optimizer.type, config.optimizer.params, [Parameter(torch.ones(2))])
            if config.scheduler:
                assert create_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    assert [line for line in said() if "is deprecated" not in line] == []


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_its_reason(name):
    config, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        DeepSpeedConfig(json.dumps(config)).check_supported()
    assert str(caught.value).startswith(reason)


def test_hugging_faces_stage_2_builds_once_its_trainer_filled_the_sizes():
    config = DeepSpeedConfig({**HF_AUTO, **SIZES, "zero_optimization": HF_ZERO2})
    config.check_supported()
    assert config.unresolved_auto()[:2] == ["fp16.enabled", "bf16.enabled"]
