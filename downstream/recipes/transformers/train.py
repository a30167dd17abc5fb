"""A tiny GPT-2 trained by Hugging Face's `Trainer(deepspeed=...)`; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 2 --folder out
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 2 --folder out --resume-from out/checkpoint-8

Writes loss and gradient norm of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed.
"""

import json
from typing import Any

from hugging_face import common_arguments, ds_config, read_log
from task import create_config, create_model, create_samples, parse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def add_sections(config: dict[str, Any], names: list[str]) -> None:
    """Let "optimizer" and "scheduler" come from the config instead of the Trainer."""
    if "optimizer" in names:
        adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": adamw}
    if "scheduler" in names:
        params = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(params, "auto")}


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--from-config", nargs="*", choices=("optimizer", "scheduler"), default=[])
    parser.add_argument("--from-pretrained", help="a folder with a saved model to start from")
    parser.add_argument("--resume-from", help="a checkpoint folder of an earlier run")
    parser.add_argument("--resize", action="store_true", help="give the embedding eight more rows")
    parser.add_argument("--only-evaluate", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a model (autotp_size)")
    parser.add_argument("--deterministic", action="store_true", help="the same bits on any number of ranks")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step on a rank")
    args = parser.parse_args()

    set_seed(0)
    uses_deepspeed = args.stage != "none"
    config = ds_config(int(args.stage), offload=args.offload) if uses_deepspeed else None
    if config is not None:
        add_sections(config, args.from_config)
        config["deterministic"] = {"enabled": args.deterministic}
    common = common_arguments(args, config)
    common["gradient_accumulation_steps"] = args.accumulation
    if args.deterministic:
        common["optim"] = "adamw_torch"  # the default is torch's fused one, which deterministic training refuses
    if args.tensor_parallel > 1:
        common["per_device_train_batch_size"] *= args.tensor_parallel  # they get the same samples
    arguments = TrainingArguments(**common)
    if args.from_pretrained:
        model = AutoModelForCausalLM.from_pretrained(args.from_pretrained, config=create_config(args.dropout))
    else:
        model = create_model(dropout=args.dropout)
    if args.tensor_parallel > 1:  # transformers loads no weights under stage 3 if the section is there before
        arguments.hf_deepspeed_config.config["tensor_parallel"] = {"autotp_size": args.tensor_parallel}
    if args.resize:
        model.resize_token_embeddings(40, mean_resizing=False)
    set_seed(0)
    trainer = Trainer(model=model, args=arguments, train_dataset=create_samples(256), eval_dataset=create_samples(8))
    if not args.only_evaluate:
        trainer.train(resume_from_checkpoint=args.resume_from)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.folder / "saved"))

    if trainer.is_world_process_zero():
        stage = trainer.model_wrapped.zero_optimization_stage() if uses_deepspeed else None
        result = {"stage": stage, "evaluated": evaluated, **read_log(trainer)}
        (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
