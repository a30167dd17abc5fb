"""Group relative policy optimization of a tiny GPT-2 by TRL's `GRPOTrainer`; run by `test_grpo.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank grpo.py --stage 3 --folder out

The reward counts even tokens in a completion. Writes loss, reward and gradient norm of each step to
`<folder>/result.json`. `--stage none` trains without DeepSpeed. `--hybrid` generates through the hybrid engine.
"""

import json
from typing import Any

from hugging_face import common_arguments, ds_config, read_log
from preferences import create_prompts, create_tokenizer
from task import create_model, parse
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer


def reward_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--hybrid", action="store_true", help="with hybrid_engine.enabled")
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    if args.hybrid:
        assert config is not None
        config["hybrid_engine"] = {"enabled": True}
    arguments = GRPOConfig(
        **(common_arguments(args, config) | {"max_steps": 8, "save_steps": 8}),
        num_generations=4,
        max_completion_length=8,
        gradient_checkpointing=False,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=create_model(),
        reward_funcs=reward_even,
        args=arguments,
        train_dataset=create_prompts(64),
        processing_class=create_tokenizer(),
    )
    set_seed(0)
    trainer.train()
    if trainer.is_world_process_zero():
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        engine = type(trainer.model_wrapped).__name__
        (args.folder / "result.json").write_text(
            json.dumps({"rewards": rewards, "engine": engine, **read_log(trainer)})
        )


if __name__ == "__main__":
    main()
