"""A tiny GPT-2 trained by Lightning's `Fabric` with its `DeepSpeedStrategy`; run by `test_fabric.py` on two ranks.

    export PYTHONPATH=downstream/shared
    torchrun --nproc_per_node 2 fabric.py --stage 2 --folder out
    torchrun --nproc_per_node 2 fabric.py --stage 2 --folder out --resume

Writes the loss of each step to `<folder>/result.json`. `--stage none` trains with Fabric's DDP strategy.
"""

import json
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from host_accelerator import HostFabricAccelerator
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
from task import create_model, create_samples, parse
from torch.utils.data import DataLoader

NUM_STEPS, SAVED_AFTER = 16, 8


def create_fabric(stage: str, bf16: bool, offload: bool) -> Fabric:
    precision = "bf16-true" if bf16 else "32-true"
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if stage != "none":
        strategy = DeepSpeedStrategy(
            stage=int(stage),
            process_group_backend="gloo",
            logging_batch_size_per_gpu=2,
            offload_optimizer=offload,
            offload_parameters=offload,
        )
    accelerator = "cpu" if stage == "none" else HostFabricAccelerator()
    return Fabric(accelerator=accelerator, devices=2, strategy=strategy, precision=precision)


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--offload", action="store_true", help="states and parameters in host memory (stage 3)")
    parser.add_argument("--init-module", action="store_true", help="build it inside zero.Init (stage 3)")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    fabric = create_fabric(args.stage, args.bf16, args.offload)
    fabric.launch()
    with fabric.init_module() if args.init_module else nullcontext():
        model = create_model()
    adamw = DeepSpeedCPUAdam if args.offload else torch.optim.AdamW
    model, optimizer = fabric.setup(model, adamw(model.parameters(), lr=3e-3, weight_decay=0.01))
    loader = fabric.setup_dataloaders(DataLoader(create_samples(NUM_STEPS * 4), batch_size=2))

    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.folder / "state", state)
    losses = []
    for step, batch in enumerate(loader):
        if step < state["step"]:
            continue
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach().float(), reduce_op="mean").item())
        if step + 1 == SAVED_AFTER and not args.resume:
            state["step"] = SAVED_AFTER
            fabric.save(args.folder / "state", state)
            state["step"] = 0
    if fabric.is_global_zero:
        (args.folder / "result.json").write_text(json.dumps({"losses": losses, "moved_to": str(fabric.device)}))


if __name__ == "__main__":
    main()
