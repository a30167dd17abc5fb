"""What the recipes give every `TrainingArguments` (those of transformers, and TRL's, which derive from them)."""

import argparse
import os
from typing import Any

from accelerate import PartialState


def ds_config(stage: int, *, offload: bool = False) -> dict[str, Any]:
    """A config with Hugging Face's "auto" values, which the Trainer fills in."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


def common_arguments(args: argparse.Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments; `config` is None for a run without DeepSpeed.

    Make TrainingArguments before the model, as their documentation asks: they make the config known to transformers.
    """
    return {
        "output_dir": str(args.folder),
        "deepspeed": config,
        "accelerator_config": _start_without_known_device(config is not None),
        "bf16": args.bf16,
        "use_cpu": True,  # or bf16 is refused on a machine without a device that the Trainer knows
        "max_steps": 16,
        "save_steps": 8,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _start_without_known_device(uses_deepspeed: bool) -> dict[str, bool]:
    """Tell Accelerate the backend on a machine without an accelerator that it knows; elsewhere nothing is needed.

    Without it the Trainer would take each rank for a world of its own. Returns what TrainingArguments gets.
    """
    if uses_deepspeed:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=not uses_deepspeed, backend="gloo")
    return {"use_configured_state": True}


def read_log(trainer: Any) -> dict[str, Any]:
    """Loss and gradient norm of each step."""
    log = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
    }
