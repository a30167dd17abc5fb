"""A tiny GPT-2 trained through Accelerate's DeepSpeed plugin; run by `test_recipe.py` on two ranks.

    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 1 --folder out
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 1 --folder out --resume

Every run writes the loss of each of its steps to `<folder>/losses.json`. `backend="gloo"` is what Accelerate needs on
a machine without an accelerator that it knows; elsewhere the argument goes.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

NUM_STEPS, SAVED_AFTER, ACCUMULATION, LEARNING_RATE = 16, 8, 2, 3e-3


def create_model() -> GPT2LMHeadModel:
    """Random weights. No dropout: Accelerate's data loader draws random numbers anew when it resumes."""
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def create_samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards from anywhere: the next token can be learned."""
    starts = torch.randint(0, 32, (count, 1), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": tokens, "labels": tokens} for tokens in (starts + torch.arange(16)) % 32]


def config_plugin() -> DeepSpeedPlugin:
    """Optimizer and schedule from the DeepSpeed config, with Accelerate's placeholders in the script."""
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--from-config", action="store_true", help="optimizer and schedule come from the config")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    set_seed(0)
    plugin = config_plugin() if args.from_config else DeepSpeedPlugin(zero_stage=args.stage, gradient_clipping=1.0)
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = create_model()
    loader = DataLoader(create_samples(NUM_STEPS * ACCUMULATION * 4), batch_size=2)
    if args.from_config:
        optimizer = DummyOptim(model.parameters(), lr=LEARNING_RATE)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses = train(accelerator, model, optimizer, scheduler, loader, args.folder, args.resume)
    assert type(accelerator.unwrap_model(model)) is GPT2LMHeadModel
    assert set(accelerator.get_state_dict(model)) == set(accelerator.unwrap_model(model).state_dict())
    if accelerator.is_main_process:
        stage = model.zero_optimization_stage()
        (args.folder / "losses.json").write_text(json.dumps({"stage": stage, "losses": losses}))
    accelerator.end_training()


def train(accelerator, model, optimizer, scheduler, loader, folder: Path, resume: bool) -> dict[int, float]:
    """Step -> mean loss over its micro-batches and ranks; saves after SAVED_AFTER steps, or starts there."""
    step, losses, waiting = 0, {}, []
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, SAVED_AFTER * ACCUMULATION)
        step = SAVED_AFTER
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        waiting.append(accelerator.gather(loss.detach().float()).mean().item())
        if accelerator.sync_gradients:
            step += 1
            losses[step], waiting = sum(waiting) / len(waiting), []
            if step == SAVED_AFTER and not resume:
                accelerator.save_state(str(folder / "state"))
    return losses


if __name__ == "__main__":
    main()
