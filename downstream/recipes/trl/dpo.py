"""Direct preference optimization of a tiny GPT-2 by TRL's `DPOTrainer`; run by `test_dpo.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank dpo.py --stage 2 --folder out

The frozen reference model is an engine of its own, without an optimizer; under stage 3 its weights are sharded too.
Writes loss and gradient norm of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed.
"""

import json

from hugging_face import common_arguments, ds_config, read_log
from preferences import create_pairs, create_tokenizer
from task import create_model, parse
from transformers import set_seed
from trl import DPOConfig, DPOTrainer


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--precompute", action="store_true", help="the reference's log probabilities, before training")
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    arguments = DPOConfig(
        **common_arguments(args, config),
        max_length=16,
        gradient_checkpointing=False,
        precompute_ref_log_probs=args.precompute,
    )
    trainer = DPOTrainer(
        model=create_model(),
        ref_model=None if args.precompute else create_model(),
        args=arguments,
        train_dataset=create_pairs(128, args.folder / "data"),
        processing_class=create_tokenizer(),
    )
    set_seed(0)
    trainer.train()
    if trainer.is_world_process_zero():
        reference = trainer.ref_model.zero_optimization_stage() if config is not None and trainer.ref_model else None
        (args.folder / "result.json").write_text(json.dumps({"reference": reference, **read_log(trainer)}))


if __name__ == "__main__":
    main()
