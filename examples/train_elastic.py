"""An elastic job: kill a rank during training, or stop the job by SIGTERM, and training continues where it stopped.

    deepspeed --elastic_training --num_accelerators 2 examples/train_elastic.py
    kill -9 PID                 # of one rank, printed by the script: all ranks restart from the last step
    kill PID                    # of the deepspeed command: the job saves; restart it with any number of ranks

The global batch is the same for 1, 2, 3, 4, 6 and 12 ranks (`ds_elastic -c` prints it for a configuration), so a
restart does not change training. See docs/howto/survive-lost-hosts.md.
"""

import argparse
import os

import deepspeed
import torch

CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2], "max_gpus": 12},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "checkpoint": {"async_save": True, "keep_last": 2, "on_sigterm": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", default="runs/elastic")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(24 * 100, 64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, config=CONFIG, training_data=dataset)
    print(f"rank {engine.global_rank} is process {os.getpid()}", flush=True)

    engine.load_checkpoint(arguments.output)  # the last checkpoint, of any number of ranks; no effect if there is none
    loader.resume(engine.global_samples)
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    while engine.global_steps < arguments.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = (each.to(engine.device) for each in next(batches))
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(arguments.output)
        if engine.global_rank == 0 and engine.global_steps % 20 == 0:
            print(f"step {engine.global_steps} on {engine.dp_world_size} ranks: loss {loss.item():.2f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
