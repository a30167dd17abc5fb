"""A tiny Llama trained in bf16 by `Trainer`, with positions far apart; run by `test_rotary.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank rotary.py --stage 3 --bf16 --folder out

Its rotary frequencies are an fp32 buffer, of which bf16 would keep three digits. Writes loss and gradient norm of each
step, and what became of the buffer, to `<folder>/result.json`. `--stage none` trains without DeepSpeed, under autocast.
"""

import json
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from hugging_face import common_arguments, ds_config, read_log
from task import LENGTH, VOCABULARY, create_samples, parse
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

APART = 128  # positions from one token to the next
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH * APART}


def create_model() -> LlamaForCausalLM:
    """The same random weights in every call; attention looks far from the start."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.2, bos_token_id=0, eos_token_id=0))


def create_spread_samples(count: int) -> list[dict[str, torch.Tensor]]:
    positions = torch.arange(LENGTH) * APART
    return [{**sample, "position_ids": positions} for sample in create_samples(count)]


def of_buffer(module: Any) -> dict[str, Any]:
    """The type of the frequencies, and how far the angle at the last position is from that of a new model."""
    found, wanted = (each.model.rotary_emb.inv_freq for each in (module, create_model()))
    return {"dtype": str(found.dtype), "angle_error": float((found.float() - wanted).abs().max() * LENGTH * APART)}


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--init", action="store_true", help="build it inside zero.Init (stage 3)")
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    arguments = TrainingArguments(**common_arguments(args, config))
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed) if args.init else nullcontext():
        model = create_model()
    trainer = Trainer(model=model, args=arguments, train_dataset=create_spread_samples(256))
    trainer.train()
    result = {"weights": str(next(trainer.model.parameters()).dtype), **of_buffer(trainer.model), **read_log(trainer)}
    if trainer.is_world_process_zero():
        (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
