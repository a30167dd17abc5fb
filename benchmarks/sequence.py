"""Time of a sequence-parallel training step against plain torch on the same tokens, and bytes against the formula.

    python benchmarks/sequence.py --ranks 2 --length 2048 --rounds 9

The model is a causal GPT with random weights in fp32. A step is forward, backward, averaging of gradients and SGD, on
one sequence per rank. The variants share the ranks (one core and one thread each) and take turns. Prints medians over
the rounds, after two warm-up rounds. The losses of all variants are compared.

    Ulysses, ds-core      DistributedAttention: two all-to-alls per attention, engine at stage 0
    Ulysses, plain torch  four calls of all_to_all_single per attention, as in arXiv 2309.14509, section 3; DDP
    ring, zigzag          RingAttention, neighboring tokens or balanced chunks, engine at stage 0
    DDP                   whole sequences per rank: no exchange of activations, but also no longer sequences

torch's own context parallelism has no kernels for the CPU (2.13: flash, efficient and cuDNN attention only).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import rank_processes
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn

OURS, PEER, RING, ZIGZAG, DDP = "Ulysses, ds-core", "Ulysses, plain torch", "ring, ds-core", "zigzag, ds-core", "DDP"
VOCABULARY, HEADS, WARM_UP, LR = 512, 8, 2, 1e-2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, T, H, K] each


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True).transpose(1, 2)


class _Exchange(torch.autograd.Function):
    """All-to-all in plain torch: splits dim `scatter`, concatenates dim `gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.dims = scatter, gather
        size = torch_dist.get_world_size()
        sent = torch.stack(x.chunk(size, scatter)).contiguous()
        received = torch.empty_like(sent)
        torch_dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scatter, gather = ctx.dims
        return _Exchange.apply(grad, gather, scatter), None, None


def ulysses_of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (_Exchange.apply(each, 2, 1) for each in (q, k, v))
    return _Exchange.apply(local(q, k, v), 1, 2)


class Block(nn.Module):
    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attend = [attend]  # a list hides the modules, which have no parameters

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attend[0](q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, attend) for _ in range(args.layers)))
        self.head = nn.Linear(args.width, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(tokens))).flatten(0, 1), labels.flatten())


def engine_step(model: nn.Module, size: int) -> Callable[[Tensor, Tensor], Tensor]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": size,
        "mesh": {"sp": size},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def ddp_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = wrapped(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def count_bytes(args: argparse.Namespace) -> tuple[int, int]:
    """Return the bytes that this rank sends in an attention's forward and backward: counted, and by the formula."""
    from deepspeed.comm.torch_group import TorchGroup, serve_by
    from deepspeed.sequence.layer import DistributedAttention

    sent = 0

    class Counting(TorchGroup):
        def all_to_all(self, output_N: Tensor, input_N: Tensor, *numels: Any, tag: str | None = None) -> Any:
            nonlocal sent
            if tag == "sequence":
                sent += (sum(numels[1]) - numels[1][self.rank]) * input_N.element_size()
            return super().all_to_all(output_N, input_N, *numels, tag=tag)

    serve_by(Counting)
    size, width = torch_dist.get_world_size(), args.width // HEADS
    group = torch_dist.new_group(range(size))
    q, k, v = (torch.randn(size, args.length // size, HEADS, width, requires_grad=True) for _ in range(3))
    DistributedAttention(local, group, 2, 1)(q, k, v).sum().backward()
    serve_by(None)
    of_tensor = size * args.length * HEADS * width * 4 * (size - 1) // size**2
    return sent, 2 * 4 * of_tensor


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float], tuple[int, int]]:
    """Return the seconds of a step by variant, the mean losses of the last step, and the bytes."""
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.sequence.ring import RingAttention, zigzag_part

    deepspeed.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    counted = count_bytes(args)
    group = dist.get_world_group()

    def ring(zigzag: bool) -> Attend:
        attention = RingAttention(group, zigzag=zigzag)
        return lambda q, k, v: attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)

    def neighbors(x: Tensor) -> Tensor:
        return x.chunk(size, 1)[rank]

    variants = {
        OURS: (engine_step(Model(args, DistributedAttention(local, group, 2, 1)), size), neighbors),
        PEER: (ddp_step(Model(args, ulysses_of_torch)), neighbors),
        RING: (engine_step(Model(args, ring(False)), size), neighbors),
        ZIGZAG: (engine_step(Model(args, ring(True)), size), lambda x: zigzag_part(x, rank, size, 1)),
        DDP: (ddp_step(Model(args, local)), lambda x: x.chunk(size, 0)[rank]),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, float] = {}
    orders = random.Random(0)  # the same on all ranks
    for number in range(WARM_UP + args.rounds):
        whole = torch.randint(0, VOCABULARY, (size, args.length + 1), generator=torch.Generator().manual_seed(number))
        for name in orders.sample(list(variants), len(variants)):
            step, part = variants[name]
            tokens, labels = (part(each).contiguous() for each in (whole[:, :-1], whole[:, 1:]))
            dist.barrier()
            start_s = time.perf_counter()
            loss = step(tokens, labels)
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start_s)
            dist.all_reduce(loss)
            losses[name] = loss.item() / size
    return times, losses, counted


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    times, losses, (sent, formula) = rank_processes.run(args.ranks, measure, args)[0]
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    assert sent == formula, (sent, formula)
    peer_s = statistics.median(times[PEER])
    print(f"{'':22s} {'ms':>8s} {'smallest':>9s} {'largest':>8s} {'to torch':>9s}")
    for name, each in times.items():
        times_ms = [1e3 * step_s for step_s in each]
        median_ms = statistics.median(times_ms)
        print(f"{name:22s} {median_ms:8.1f} {min(times_ms):9.1f} {max(times_ms):8.1f} {median_ms / peer_s / 1e3:9.2f}")
    print(f"bytes that a rank sends per attention, forward and backward: {sent}; by the formula: {formula}")


if __name__ == "__main__":
    main()
