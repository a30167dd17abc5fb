"""A tiny GPT-2 whose weights torch.distributed.checkpoint saves and loads; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    torchrun --nproc_per_node 2 train.py --stage 3 --folder out
    torchrun --nproc_per_node 2 train.py --stage 1 --folder other --load out/weights

`Weights` is what a library that knows nothing of DeepSpeed has: a `Stateful` around a module, for DCP to ask. Writes
the loss of each step to `<folder>/result.json`, and the weights after half of the steps to `<folder>/weights`.
`--stage none` trains with DDP.
"""

import json
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import create_model, create_samples, parse
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

NUM_STEPS, SAVED_AFTER, BATCH = 16, 8, 2


class Weights(Stateful):
    """DCP calls it in a save and in a load."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.module, state_dict)


def create_engine(stage: str, bf16: bool) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,  # plain torch does not clip
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 10},
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=create_model(), config=config)[0]


class Plain:
    """The same calls around plain torch."""

    def __init__(self) -> None:
        self.module = create_model()
        self.replica = nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.3)

    def __call__(self, **batch: Any) -> Any:
        return self.replica(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--load", help="a folder of weights to start from, after half of the steps")
    args = parser.parse_args()

    deepspeed.init_distributed()
    engine = Plain() if args.stage == "none" else create_engine(args.stage, args.bf16)
    weights = Weights(engine.module)
    first = 0
    if args.load:
        dcp.load({"model": weights}, checkpoint_id=args.load)
        first = SAVED_AFTER
    losses = []
    samples = create_samples(NUM_STEPS * BATCH * 2)
    for step in range(first, NUM_STEPS):
        own = samples[(step * 2 + dist.get_rank()) * BATCH :][:BATCH]
        batch = {name: torch.stack([sample[name] for sample in own]) for name in own[0]}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step + 1 == SAVED_AFTER:
            dcp.save({"model": weights}, checkpoint_id=os.fspath(args.folder / "weights"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(engine.module, options=options)
    if dist.get_rank() == 0:
        torch.save({name: value.float() for name, value in whole.items()}, args.folder / "whole.pt")
        (args.folder / "result.json").write_text(json.dumps({"losses": losses}))
    # DDP's C++ half may not outlive the groups: it would join gloo's thread while it holds the interpreter lock, which
    # that thread may be waiting for (seen with torch 2.13).
    del engine
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
