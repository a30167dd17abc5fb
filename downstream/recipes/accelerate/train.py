"""A tiny GPT-2 trained through Accelerate's DeepSpeed plugin; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    accelerate launch --use_deepspeed --num_processes 2 train.py --stage 2 --folder out
    accelerate launch --use_deepspeed --num_processes 2 train.py --stage 2 --folder out --resume

Writes the loss of each step to `<folder>/result.json`. `--stage none` trains without DeepSpeed. `backend="gloo"` is
what Accelerate needs on a machine without an accelerator that it knows; elsewhere the argument goes.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from task import create_model, create_samples, parse
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

NUM_STEPS, SAVED_AFTER, ACCUMULATION, LEARNING_RATE, NUM_WARMUP_STEPS = 16, 8, 2, 3e-3, 4


def config_plugin(stage: int, bf16: bool, tensor_parallel: int) -> DeepSpeedPlugin:
    """Optimizer and schedule from the DeepSpeed config, with Accelerate's placeholders in the script."""
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "tensor_parallel": {"autotp_size": tensor_parallel},
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
            },
        }
    )


def script_plugin(stage: int) -> DeepSpeedPlugin | None:
    """Optimizer and schedule from the script; None under `accelerate launch --use_deepspeed`, with its flags."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return None
    return DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True)


def warmup(step: int) -> float:
    """What DeepSpeed's WarmupLR does to the learning rate. Accelerate counts a step of two ranks as two."""
    return min(1.0, max(0, step // 2 - 1) / NUM_WARMUP_STEPS)


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--from-config", action="store_true", help="optimizer and schedule come from the config")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a model; with --from-config")
    args = parser.parse_args()

    set_seed(0)
    plugin = None
    if args.stage != "none":
        stage = int(args.stage)
        plugin = config_plugin(stage, args.bf16, args.tensor_parallel) if args.from_config else script_plugin(stage)
    accelerator = Accelerator(
        cpu=args.stage == "none",
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
        mixed_precision="bf16" if args.bf16 else None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    # no dropout: Accelerate's data loader draws random numbers again when it resumes
    model = create_model()
    loader = DataLoader(create_samples(NUM_STEPS * ACCUMULATION * 4), batch_size=2 * args.tensor_parallel)
    if args.from_config:
        optimizer = DummyOptim(model.parameters(), lr=LEARNING_RATE)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=NUM_WARMUP_STEPS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    result = train(accelerator, model, optimizer, scheduler, loader, args.folder, args.resume)
    assert type(accelerator.unwrap_model(model)) is GPT2LMHeadModel
    accelerator.save_model(model, str(args.folder / "model"))
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save({name: value.float() for name, value in weights.items()}, args.folder / "weights.pt")
        result["stage"] = model.zero_optimization_stage() if args.stage != "none" else None
        (args.folder / "result.json").write_text(json.dumps(result))
    # DDP's C++ half may not outlive the groups: see ../torch_checkpoint/train.py.
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    accelerator.end_training()


def train(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any, folder: Path, resume: bool
) -> dict[str, Any]:
    """Each step's gradient norm, and its loss over micro-batches and ranks.

    Saves after SAVED_AFTER steps, or starts there.
    """
    step, losses, norms, waiting = 0, [], [], []
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, SAVED_AFTER * ACCUMULATION)
        step = SAVED_AFTER
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        waiting.append(accelerator.gather(loss.detach().float()).mean().item())
        if accelerator.sync_gradients:
            step += 1
            losses.append(sum(waiting) / len(waiting))
            waiting = []
            if step == SAVED_AFTER and not resume:
                accelerator.save_state(str(folder / "state"))
    return {"losses": losses, "norms": norms}


if __name__ == "__main__":
    main()
