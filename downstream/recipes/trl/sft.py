"""Supervised fine-tuning of a tiny GPT-2 by TRL's `SFTTrainer`; run by `test_sft.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank sft.py --stage 2 --folder out

Writes loss and gradient norm of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed.
"""

import json

from hugging_face import common_arguments, ds_config, read_log
from peft import LoraConfig
from preferences import create_texts, create_tokenizer
from task import create_model, parse
from transformers import set_seed
from trl import SFTConfig, SFTTrainer


def create_adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["c_attn", "c_fc"], modules_to_save=["ln_f"], fan_in_fan_out=True)


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    common = common_arguments(args, config) | ({"learning_rate": 5e-2} if args.lora else {})
    arguments = SFTConfig(**common, max_length=16, gradient_checkpointing=args.lora)
    trainer = SFTTrainer(
        model=create_model(),
        args=arguments,
        train_dataset=create_texts(256),
        processing_class=create_tokenizer(),
        peft_config=create_adapters() if args.lora else None,
    )
    set_seed(0)
    trainer.train()
    if trainer.is_world_process_zero():
        (args.folder / "result.json").write_text(json.dumps(read_log(trainer)))


if __name__ == "__main__":
    main()
