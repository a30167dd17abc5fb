"""Supervised fine-tuning of a tiny GPT-2, or adapters of a tiny Llama, by TRL's `SFTTrainer`; run by `test_sft.py`.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank sft.py --stage 2 --folder out

Writes loss and gradient norm of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed. `--lora`
trains LoRA adapters of PEFT in every linear layer of a frozen Llama.
"""

import json

import torch
from hugging_face import common_arguments, ds_config, read_log
from peft import LoraConfig
from preferences import create_texts, create_tokenizer
from task import LENGTH, VOCABULARY, create_model, parse
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer


def create_llama() -> LlamaForCausalLM:
    """The same random weights in every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    rate = {"initializer_range": 0.2}  # the frozen output layer tells tokens apart
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **rate))


def create_adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", modules_to_save=["norm"])


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    common = common_arguments(args, config) | {"max_steps": args.steps} | ({"learning_rate": 2e-2} if args.lora else {})
    arguments = SFTConfig(**common, max_length=16, gradient_checkpointing=args.lora)
    trainer = SFTTrainer(
        model=create_llama() if args.lora else create_model(),
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
