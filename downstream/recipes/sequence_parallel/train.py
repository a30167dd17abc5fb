"""A tiny GPT-2 on sequences divided between two ranks, through transformers alone, Accelerate or the Trainer.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank train.py --through trainer --stage 3 --folder out

`test_train.py` runs it. Writes the loss of each micro-batch (of each step, for the Trainer) to `<folder>/result.json`.
`--stage none` trains on whole sequences in plain torch, on each rank by itself.
"""

import argparse
import json
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, GradientAccumulationPlugin
from hugging_face import common_arguments, ds_config, read_log
from task import LENGTH, create_model, create_samples, parse
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

NUM_STEPS, ACCUMULATION, BATCH, LEARNING_RATE, SP = 8, 2, 2, 3e-3, 2


def samples() -> list[dict[str, torch.Tensor]]:
    """Those of the task, with prompts of different lengths that do not count, so that ranks have unequal tokens."""
    made = create_samples(NUM_STEPS * ACCUMULATION * BATCH)
    for number, sample in enumerate(made):
        sample["labels"] = sample["labels"].clone()
        sample["labels"][: 2 + number % 9] = -100
    return made


def train_plain(model: Any) -> list[float]:
    """The loss of each micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for number, batch in enumerate(DataLoader(samples(), batch_size=BATCH), start=1):
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if number % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_engine(model: Any, stage: int, attention: str) -> list[float]:
    """transformers and deepspeed, as DeepSpeed's tutorial has it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=attention,
        sequence_parallel_size=SP,
        micro_batch_size=BATCH,
        seq_length=LENGTH,
        seq_length_is_variable=False,
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    sp_rank, group = groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_group()
    mine = [batch for number, batch in enumerate(DataLoader(samples(), batch_size=BATCH)) if number % SP == sp_rank]
    losses = []
    for batch in UlyssesSPDataLoaderAdapter(mine, sp_rank, group, SP, engine.device):
        loss = weighted(engine.module, engine(**batch), batch["shift_labels"], group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    UlyssesSPAttentionHF.unregister_from_transformers(attention)
    return losses


def weighted(model: Any, outputs: Any, shift_labels: torch.Tensor, group: Any) -> torch.Tensor:
    """The documented aggregation: losses gathered over the ranks of the sequence, weighted by the tokens that count."""
    loss = model.loss_function(
        logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=model.config.vocab_size
    )
    good_tokens = (shift_labels != -100).view(-1).sum()
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather(good_tokens, group=group)
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count > 0)
    return total / max(sum(counts), 1)


def parallelism(attention: str) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation=attention
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=SP, sp_handler=handler)


def train_accelerate(model: Any, stage: int, attention: str) -> list[float]:
    """Accelerate registers, and adapts the loader."""
    # two steps come from the loader's last batch, and the first of them is not the end of the epoch
    accumulation = GradientAccumulationPlugin(num_steps=ACCUMULATION, sync_with_dataloader=False)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            zero_stage=stage, gradient_clipping=1.0, gradient_accumulation_steps=ACCUMULATION
        ),
        gradient_accumulation_plugin=accumulation,
        parallelism_config=parallelism(attention),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    from deepspeed.utils import groups

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH))
    group = groups._get_sequence_parallel_group()
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = weighted(accelerator.unwrap_model(model), model(**batch), batch["shift_labels"], group)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.end_training()
    return losses


class InOrder(Trainer):
    """Takes the samples as they come."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def train_trainer(model: Any, args: argparse.Namespace) -> list[float]:
    """`TrainingArguments(parallelism_config=...)` is all that the Trainer needs. The loss of each step."""
    common = {
        **common_arguments(args, ds_config(int(args.stage))),
        "max_steps": NUM_STEPS,
        "save_strategy": "no",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "parallelism_config": parallelism(args.attention),
    }
    trainer = InOrder(model=model, args=TrainingArguments(**common), train_dataset=samples())
    trainer.train()
    return list(read_log(trainer)["losses"])


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--through", choices=("engine", "accelerate", "trainer"), default="engine")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.stage == "none":
        losses = train_plain(create_model())
    else:
        model = create_model()
        model.set_attn_implementation(args.attention)
        if args.through == "engine":
            losses = train_engine(model, int(args.stage), args.attention)
        elif args.through == "accelerate":
            losses = train_accelerate(model, int(args.stage), args.attention)
        else:
            losses = train_trainer(model, args)
    if args.stage == "none" or PartialState().is_main_process:
        (args.folder / "result.json").write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
