"""A tiny GPT-2 trained by Hugging Face's `Trainer(deepspeed=...)`; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 2 --folder out
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 2 --folder out --resume-from out/checkpoint-8

Writes loss and gradient norm of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed.
"""

import json
import os
from typing import Any

from accelerate import PartialState
from task import create_model, create_samples, parse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def ds_config(stage: int, sections: list[str], offload: bool) -> dict[str, Any]:
    """A config with Hugging Face's "auto" values, which the Trainer fills in.

    Args:
        sections: "optimizer" and "scheduler" for those that are not to be the Trainer's own.
    """
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
    if "optimizer" in sections:
        adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": adamw}
    if "scheduler" in sections:
        names = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    return config


def start_without_known_device(uses_deepspeed: bool) -> dict[str, bool]:
    """Tell Accelerate the backend on a machine without an accelerator that it knows; elsewhere nothing is needed.

    Without it the Trainer would take each rank for a world of its own. Returns what TrainingArguments gets.
    """
    if uses_deepspeed:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=not uses_deepspeed, backend="gloo")
    return {"use_configured_state": True}


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--from-config", nargs="*", choices=("optimizer", "scheduler"), default=[])
    parser.add_argument("--from-pretrained", help="a folder with a saved model to start from")
    parser.add_argument("--resume-from", help="a checkpoint folder of an earlier run")
    parser.add_argument("--resize", action="store_true", help="give the embedding eight more rows")
    parser.add_argument("--evaluate-first", action="store_true", help="under stage 3 only: the Trainer's own limit")
    args = parser.parse_args()

    set_seed(0)
    uses_deepspeed = args.stage != "none"
    # before the model, as the Trainer's documentation asks: it makes the DeepSpeed config known to transformers
    arguments = TrainingArguments(
        output_dir=str(args.folder),
        deepspeed=ds_config(int(args.stage), args.from_config, args.offload) if uses_deepspeed else None,
        accelerator_config=start_without_known_device(uses_deepspeed),
        bf16=args.bf16,
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
    if args.from_pretrained:
        model = AutoModelForCausalLM.from_pretrained(args.from_pretrained)
    else:
        model = create_model(dropout=0.1)
    if args.resize:
        model.resize_token_embeddings(40, mean_resizing=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=create_samples(256), eval_dataset=create_samples(8))
    before = trainer.evaluate()["eval_loss"] if args.evaluate_first else None
    set_seed(0)  # dropout has the same masks in every run
    trainer.train(resume_from_checkpoint=args.resume_from)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.folder / "saved"))

    if trainer.is_world_process_zero():
        log = trainer.state.log_history
        result = {
            "stage": trainer.model_wrapped.zero_optimization_stage() if uses_deepspeed else None,
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
            "evaluated": {"before": before, "after": after},
        }
        (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
