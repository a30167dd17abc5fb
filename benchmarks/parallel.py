"""Time of a tensor-parallel training step against torch's parallelize_module, on the same model and data.

    python benchmarks/parallel.py --ranks 2 --rounds 15

The model is transformers' Llama with random weights: sharded by `tp_model_init`, sharded by parallelize_module with the
plan of torch's tutorial, and whole on one rank with one core. A step is forward, backward and SGD in fp32. Each rank
has one core and one thread. The variants share the ranks and take turns. Prints medians over the rounds, after three
warm-up rounds. The losses of the variants are compared. Pipelines: `pipeline.py`; experts: `moe.py`; sequences:
`sequence.py`.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import rank_processes
import torch
from torch import nn

OURS, PEER, WHOLE = "ds-core, tp_model_init", "torch, parallelize_module", "whole, on one rank"
WARM_UP, LR = 3, 1e-3


def create(args: argparse.Namespace) -> nn.Module:
    """Create the model, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 64 * 64,  # torch needs an even division
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def divided_by_torch(model: nn.Module) -> nn.Module:
    """Shard the model over the ranks as in torch's tutorial for Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layer = "model.layers.*."
    plan = {f"{layer}{name}": ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
    plan |= {f"{layer}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{layer}{name}": RowwiseParallel() for name in ("mlp.down_proj", "self_attn.o_proj")}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plan)


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return variant -> (seconds of a step, loss) of each round."""
    import deepspeed
    import deepspeed.comm as dist

    model, size = create(args), torch.distributed.get_world_size()
    variants = {WHOLE: model}
    if size > 1:
        deepspeed.init_distributed()
        peer = divided_by_torch(copy.deepcopy(model))
        variants = {OURS: deepspeed.tp_model_init(model, size), PEER: peer}
    steps = {name: step_of(each) for name, each in variants.items()}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    orders = random.Random(0)  # the same on all ranks
    for number in range(WARM_UP + args.rounds):
        tokens = torch.randint(0, 1000, (args.batch, args.length), generator=torch.Generator().manual_seed(number))
        for name in orders.sample(list(steps), len(steps)):
            if size > 1:
                dist.barrier()
            start_s = time.perf_counter()
            loss = steps[name](tokens)
            if number >= WARM_UP:
                figures[name].append((time.perf_counter() - start_s, loss))
    return figures


def step_of(model: nn.Module) -> Callable[[torch.Tensor], float]:
    """Return a function that runs forward, backward and SGD, and returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(tokens: torch.Tensor) -> float:
        loss: Any = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    figures = rank_processes.run(1, measure, args)[0] | rank_processes.run(args.ranks, measure, args)[0]
    losses = {name: each[-1][1] for name, each in figures.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    peer_s = statistics.median(step_s for step_s, _ in figures[PEER])
    print(f"{'':28s} {'ms':>8s} {'smallest':>9s} {'largest':>8s} {'to torch':>9s}")
    for name, each in figures.items():
        times_ms = [1e3 * step_s for step_s, _ in each]
        median_ms = statistics.median(times_ms)
        print(f"{name:28s} {median_ms:8.1f} {min(times_ms):9.1f} {max(times_ms):8.1f} {median_ms / peer_s / 1e3:9.2f}")


if __name__ == "__main__":
    main()
