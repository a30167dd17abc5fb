"""A tiny GPT-2 trained by Hugging Face's `Trainer(deepspeed=...)`; run by `test_recipe.py` on two ranks.

    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 1 --folder out
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 1 --folder out --resume-from out/checkpoint-8

Every run writes loss and gradient norm of each of its steps to `<folder>/losses.json`.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def ds_config(stage: int, from_config: bool) -> dict[str, Any]:
    """A config with Hugging Face's "auto" values, which the Trainer fills in."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"},
    }
    if from_config:
        adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        schedule = {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        }
        config["optimizer"] = {"type": "AdamW", "params": adamw}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": schedule}
    return config


def create_samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards from anywhere: the next token can be learned."""
    starts = torch.randint(0, 32, (count, 1), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": tokens, "labels": tokens} for tokens in (starts + torch.arange(16)) % 32]


def start_without_known_device() -> dict[str, bool]:
    """Tell Accelerate the backend on a machine without an accelerator that it knows; elsewhere nothing is needed.

    Without it the Trainer would take each rank for a world of its own. Returns what TrainingArguments gets.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"use_configured_state": True}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--from-config", action="store_true", help="optimizer and schedule come from the config")
    parser.add_argument("--resume-from", help="a checkpoint folder of an earlier run")
    args = parser.parse_args()

    set_seed(0)
    # before the model, as the Trainer's documentation asks: it makes the DeepSpeed config known to transformers
    arguments = TrainingArguments(
        output_dir=str(args.folder),
        deepspeed=ds_config(args.stage, args.from_config),
        accelerator_config=start_without_known_device(),
        bf16=args.from_config,
        use_cpu=True,  # or the Trainer refuses bf16 on a machine without a device that it knows
        max_steps=16,
        save_steps=8,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    sizes = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(model=GPT2LMHeadModel(sizes), args=arguments, train_dataset=create_samples(256))
    trainer.train(resume_from_checkpoint=args.resume_from)

    if trainer.is_world_process_zero():
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        norms = {entry["step"]: entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry}
        stage = trainer.model_wrapped.zero_optimization_stage()
        text = json.dumps({"stage": stage, "losses": losses, "norms": norms})
        (args.folder / "losses.json").write_text(text)


if __name__ == "__main__":
    main()
