"""A tiny GPT-2 trained by Lightning's `Trainer` with its `DeepSpeedStrategy`; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    torchrun --nproc_per_node 2 train.py --stage 2 --folder out
    torchrun --nproc_per_node 2 train.py --stage 2 --folder out --resume
    python train.py --stage 2 --folder out --resume --devices 1
    torchrun --nproc_per_node 2 train.py --stage 2 --folder out --again

Writes the loss of each step to `<folder>/result.json`, and what a test finds after the training and with the weights of
the first epoch's checkpoint, which the Trainer loads. `--stage none` trains with Lightning's DDP strategy.
"""

import argparse
import json
from typing import Any

import lightning.pytorch as pl
import torch
from host_accelerator import HostTrainerAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from task import create_model, create_samples, parse
from torch.utils.data import DataLoader

NUM_EPOCHS, NUM_STEPS = 2, 8  # steps of an epoch


class Counter(pl.LightningModule):
    """Trains the model; `losses` has the loss of each step, averaged over ranks."""

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """The Trainer calls it inside `zero.Init` under stage 3, and again before a test."""
        if self.model is None:
            self.model = create_model()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach().float().clone(), reduce_op="mean").item())
        return loss

    def test_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("test_loss", self.model(**batch).loss.float(), sync_dist=True)


def create_strategy(stage: str) -> Any:
    if stage == "none":
        return DDPStrategy(process_group_backend="gloo")
    return DeepSpeedStrategy(stage=int(stage), process_group_backend="gloo")


def create_trainer(args: argparse.Namespace) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu" if args.stage == "none" else HostTrainerAccelerator(),
        devices=args.devices,
        strategy=create_strategy(args.stage),
        precision="bf16-mixed" if args.bf16 else "32-true",
        max_epochs=NUM_EPOCHS,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        callbacks=[ModelCheckpoint(args.folder, "{epoch}", every_n_epochs=1, save_top_k=-1)],
        default_root_dir=args.folder,
    )


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--configure-model", action="store_true", help="build it inside zero.Init (stage 3)")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint of an earlier run")
    parser.add_argument("--devices", type=int, default=2, help="ranks; the batches of a step are the same")
    parser.add_argument("--again", action="store_true", help="destroy the engine and train the module again")
    args = parser.parse_args()

    trainer = create_trainer(args)
    model = Counter() if args.configure_model else Counter(create_model())
    loader = DataLoader(create_samples(NUM_STEPS * 4), batch_size=4 // args.devices)
    checkpoint = args.folder / "epoch=0.ckpt"
    trainer.fit(model, loader, ckpt_path=str(checkpoint) if args.resume else None)
    result: dict[str, Any] = {"losses": model.losses}
    if args.again:
        if args.stage != "none":
            trainer.strategy.deepspeed_engine.destroy()  # before a test, which has an engine of its own there
        model.losses = []
        trainer = create_trainer(args)
        trainer.fit(model, loader)
        result["again"] = model.losses
    tests = DataLoader(create_samples(8), batch_size=2)
    result["tested"] = trainer.test(model, tests, verbose=False)[0]["test_loss"]
    result["tested_first"] = trainer.test(model, tests, str(checkpoint), verbose=False)[0]["test_loss"]
    if trainer.is_global_zero:
        (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
