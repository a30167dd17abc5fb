"""Trains, saves and loads with whichever `deepspeed` is imported: the original, or this project's.

    python train.py save FOLDER WORLD CASE...    3 steps, a checkpoint FOLDER/CASE, 3 more steps
    python train.py load FOLDER WORLD CASE=AS... load FOLDER/CASE in an engine of case AS, 3 more steps

A case is a stage and a precision: `2-bf16`; `3-fp32-subgroups` has several sub-groups in a group, what
`3-fp32-written` saves is for DeepSpeed (`checkpoint.format`), and `3-fp32-universal` loads a universal checkpoint.
`1-fp32-pipe` is a pipeline of as many stages as ranks, `1-fp32-moe` has experts that two of them divide.
The losses, each the mean over all ranks, go to FOLDER/CASE.save.json and FOLDER/CASE.AS.WORLD.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_SAMPLES = 6  # of a step, over all ranks


class Net(nn.Module):
    """A frozen layer, a small parameter, a buffer; no number of ranks divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.block = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 11)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(self.tokens(tokens_BT))) * self.gain
        logits_BTV = self.head(self.block(x))
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT.flip(1).flatten())


class Block(nn.Module):
    """A layer of a pipeline, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x_BTH: Tensor) -> Tensor:
        return x_BTH + torch.tanh(self.inner(x_BTH)) * self.scale


class Embed(nn.Embedding):
    """Shared by the first layer and the last."""

    def __init__(self) -> None:
        super().__init__(11, 7)


def as_logits(embed: nn.Module, x_BTH: Tensor) -> Tensor:
    return x_BTH @ embed.weight.t()


def create_pipeline(num_stages: int) -> Any:
    """Shared weights, a layer without parameters, one that is a function."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [TiedLayerSpec("embed", Embed), LayerSpec(Block), nn.Tanh(), LayerSpec(Block), torch.sin]
    layers += [LayerSpec(Block), TiedLayerSpec("embed", Embed, forward_fn=as_logits)]

    def loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())

    return PipelineModule(layers, num_stages=num_stages, loss_fn=loss, partition_method="uniform")


class Mixture(nn.Module):
    """Two layers of experts, of which every rank trains on all samples."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.tokens = nn.Embedding(11, 7)
        ep_size = 2 if dist.get_world_size() % 2 == 0 else 1
        sizes = {"hidden_size": 7, "num_experts": 4, "ep_size": ep_size}
        routing = {"k": 1, "drop_tokens": False, "use_rts": False}
        self.mixtures = nn.ModuleList(MoE(expert=nn.Linear(7, 7), **sizes, **routing) for _ in range(2))
        self.head = nn.Linear(7, 11)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.tokens(tokens_BT)
        for mixture in self.mixtures:
            x = x + mixture(x)[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens_BT.flip(1).flatten())


def create_divided(case: str, seed: int) -> Any:
    """An engine of a pipeline, or of experts."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    stage, _, *more = case.split("-")
    torch.manual_seed(seed)
    net = create_pipeline(dist.get_world_size()) if "pipe" in more else Mixture()
    params: Any = [param for param in net.parameters() if param.requires_grad]
    if "moe" in more:
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "dense"})
    config = {
        "train_batch_size": NUM_SAMPLES if "pipe" in more else NUM_SAMPLES * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2 if "pipe" in more else NUM_SAMPLES,
        "zero_optimization": {"stage": int(stage)},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(params, lr=1e-2), config=config)[0]


def create_engine(case: str, seed: int) -> Any:
    """An engine of a case, with a torch optimizer of two groups and a schedule."""
    import deepspeed

    stage, precision, *more = case.split("-")
    if {"pipe", "moe"} & set(more):
        return create_divided(case, seed)
    torch.manual_seed(seed)
    net = Net()
    zero = {"stage": int(stage), "stage3_param_persistence_threshold": 10}
    config = {
        "train_batch_size": NUM_SAMPLES,
        "train_micro_batch_size_per_gpu": NUM_SAMPLES // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {**zero, "sub_group_size": 50} if "subgroups" in more else zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
    }
    if "universal" in more:
        config["checkpoint"] = {"load_universal": True}
    if "written" in more:
        config["checkpoint"] = {"format": "deepspeed"}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    rest = {"params": [*net.block.parameters(), *net.head.parameters()], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": [net.tokens.weight, net.gain]}, rest], lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    """The mean losses of the ranks in steps first .. last - 1, whose samples do not depend on their number."""
    losses = []
    for step in range(first, last):
        samples = torch.randint(11, (NUM_SAMPLES, 6), generator=torch.Generator().manual_seed(step))
        if hasattr(engine, "train_batch"):
            losses.append(float(engine.train_batch(iter([(each, each.flip(1)) for each in samples.split(2)]))))
            continue
        is_whole = engine.train_batch_size() > NUM_SAMPLES
        loss = engine(samples if is_whole else samples.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def save(folder: Path, case: str) -> None:
    """Train, save, and train on."""
    engine = create_engine(case, seed=0)
    losses = train(engine, 0, 3)
    engine.save_checkpoint(str(folder / case), client_state={"epoch": 3})
    losses += train(engine, 3, 6)
    _write(folder / f"{case}.save.json", losses)
    engine.destroy()


def load(folder: Path, case: str, target: str) -> None:
    """Load into an engine of other weights, and train on."""
    engine = create_engine(target, seed=1)
    _, client = engine.load_checkpoint(str(folder / case))
    assert client["epoch"] == 3, client
    assert engine.global_steps == 3, engine.global_steps
    _write(folder / f"{case}.{target}.{dist.get_world_size()}.json", train(engine, 3, 6))
    engine.destroy()


def _write(path: Path, losses: list[float]) -> None:
    if dist.get_rank() == 0:
        path.write_text(json.dumps(losses))


def _run_rank(rank: int, port: int, action: str, folder: Path, world_size: int, cases: list[str]) -> None:
    import deepspeed

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    deepspeed.init_distributed("gloo")
    for case in cases:
        if action == "save":
            save(folder, case)
        else:
            load(folder, *case.split("="))
    dist.barrier()


def main() -> None:
    """Start the ranks and wait for them."""
    from torch.distributed import TCPStore
    from torch.multiprocessing import start_processes

    action, folder, world_size, *cases = sys.argv[1:]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    arguments = (port, action, Path(folder), int(world_size), cases)
    start_processes(_run_rank, arguments, nprocs=int(world_size), start_method="spawn")


if __name__ == "__main__":
    main()
