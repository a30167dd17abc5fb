"""A run that is wrong but raises no error: `ds_verify examples/broken_decay.py` finds the tensor.

The script shrinks the weights of the second layer a little after each step. These weights are in bf16, rounded from the
optimizer's fp32 master weights. The next step rounds the master weights again, so the change is lost; plain torch would
keep it. Write to the master weights instead (`deepspeed.utils.safe_set_full_fp32_param`), or set the optimizer's
`weight_decay`.
"""

import argparse

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    batches = torch.randn(16, 4, 16, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    for batch in batches:
        loss = engine(batch * (1 + engine.global_rank)).float().square().mean()
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            model[2].weight.mul_(0.99)  # lost: the next step rounds the master weights again


if __name__ == "__main__":
    main()
