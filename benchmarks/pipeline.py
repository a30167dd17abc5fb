"""Pipeline schedules: time of a step and share of it in which stages are idle, beside torch.distributed.pipelining.

    python benchmarks/pipeline.py --micro-batches 4 8 16
    python benchmarks/pipeline.py --stages 4 --waits 4          # layers that wait 4 ms in place of computing

A stage per rank, one core and one thread each; so there are as many stages as cores, unless layers only wait. All
variants live in the same ranks and take turns, and printed are medians over the rounds. The *idle share* is that of all
stages' time between the first start of a pass and the end of the last one; the *ideal* one is that of the schedule on
paper, (p - 1) / (m + p - 1) for 1F1B with m micro-batches on p stages. A step has the optimizer in it (SGD).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import rank_processes
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
PEER = "torch 1F1B"
LR = 1e-3


class Block(nn.Module):
    """Two matrix products and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, grad.sum(), None


class Waiting(nn.Module):
    """Waits in its forward, and twice as long in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        return _Wait.apply(hidden, self.weight, self.seconds)


def measure(args: argparse.Namespace, num_micros: int) -> dict[str, list[tuple[float, float]]]:
    """On each rank by variant: (seconds of a step, idle share; nan for the peer) of each round."""
    import deepspeed
    import deepspeed.comm as dist

    torch.manual_seed(0)
    build = partial(Waiting, args.waits / 1e3) if args.waits else partial(Block, args.width)
    spec = (Waiting, args.waits / 1e3) if args.waits else (Block, args.width)
    shape = (args.rows, args.width)
    batch = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_micros)]
    steps: dict[str, Callable[[], Any]] = {}
    passes: dict[str, list[tuple[float, float]]] = {}
    for name in args.schedules:
        interleave = 2 if name == "interleaved" else 1
        layers = [deepspeed.pipe.LayerSpec(*spec) for _ in range(args.layers)]
        model = deepspeed.pipe.PipelineModule(
            layers, num_stages=args.stages, loss_fn=F.mse_loss, partition_method="uniform", interleave=interleave
        )
        config = {
            "train_micro_batch_size_per_gpu": args.rows,
            "gradient_accumulation_steps": num_micros,
            "pipeline": {"schedule": name},
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        passes[name] = []
        for method in ("forward", "loss", "backward", "backward_weights"):
            _time_passes(engine._compute, method, passes[name])
        steps[name] = lambda engine=engine: engine.train_batch(iter(batch))
    if PEER in args.peers:
        steps[PEER] = _peer(args, num_micros, build, batch)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    orders = random.Random(0)  # the same on all ranks
    for round_number in range(1 + args.rounds):
        for name in orders.sample(list(steps), len(steps)):
            passes.get(name, []).clear()
            dist.barrier()
            start_s = time.perf_counter()
            steps[name]()
            dist.barrier()
            step_s = time.perf_counter() - start_s
            if round_number:
                figures[name].append((step_s, _idle_share(passes[name]) if name in passes else float("nan")))
    return figures


def _time_passes(compute: Any, method: str, passes: list[tuple[float, float]]) -> None:
    """Write down when each call of a method begins and ends."""
    inner = getattr(compute, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        result = inner(*args, **kwargs)
        passes.append((start_s, time.perf_counter()))
        return result

    setattr(compute, method, call)


def _idle_share(passes: list[tuple[float, float]]) -> float:
    """Of all ranks; the clock is that of the machine."""
    from deepspeed.comm.values import all_gather_values

    everyone = [[tuple(each) for each in theirs] for theirs in all_gather_values(passes)]
    span_s = max(stop for theirs in everyone for _, stop in theirs) - min(
        start for each in everyone for start, _ in each
    )
    return 1 - sum(stop - start for theirs in everyone for start, stop in theirs) / (span_s * len(everyone))


def _peer(
    args: argparse.Namespace, num_micros: int, build: Callable[[], nn.Module], batch: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """A step of torch's own 1F1B over the same layers."""
    import torch.distributed as torch_dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = torch_dist.get_rank()
    own = nn.Sequential(*(build() for _ in range(args.layers // args.stages)))
    optimizer = torch.optim.SGD(own.parameters(), lr=LR)
    stage = PipelineStage(own, rank, args.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micros, loss_fn=F.mse_loss)
    inputs, labels = (torch.cat(each) for each in zip(*batch, strict=True))

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == args.stages - 1:
            schedule.step(target=labels, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ideal(name: str, num_micros: int, num_stages: int) -> float:
    """Idle share of a schedule on paper."""
    from deepspeed.pipe.schedule import InterleavedSchedule, TrainSchedule, ZeroBubbleSchedule
    from deepspeed.pipe.timeline import idle_share, timeline

    kinds = {"1f1b": TrainSchedule, "interleaved": InterleavedSchedule, "zero_bubble": ZeroBubbleSchedule}
    return idle_share(timeline([kinds[name](num_micros, num_stages, stage) for stage in range(num_stages)]))


def rows(args: argparse.Namespace) -> Iterator[tuple[int, str, float, float, float]]:
    """(micro-batches, variant, ms, idle share, ideal)."""
    for num_micros in args.micro_batches:
        figures = rank_processes.run(args.stages, measure, args, num_micros)[0]
        for name, each in figures.items():
            wanted = float("nan") if name == PEER else ideal(name, num_micros, args.stages)
            step_s, idle = (statistics.median(column) for column in zip(*each, strict=True))
            yield num_micros, name, 1e3 * step_s, idle, wanted


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--waits", type=float, default=0, help="ms that a layer waits in place of computing")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--peers", nargs="*", default=[PEER])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.waits:
        args.schedules = [name for name in args.schedules if name != "zero_bubble"]  # it divides matrix products only
    print(
        f"{args.stages} stages, {args.layers} layers; idle / ideal is of the step's working time, 1 - ideal : 1 - idle"
    )
    print(f"{'m':>4}  {'variant':<14}{'ms':>9}{'idle':>9}{'ideal':>9}{'ratio':>9}")
    for num_micros, name, step_ms, idle, wanted in rows(args):
        ratio = (1 - wanted) / (1 - idle)
        print(f"{num_micros:>4}  {name:<14}{step_ms:>9.1f}{idle:>9.3f}{wanted:>9.3f}{ratio:>9.3f}")


if __name__ == "__main__":
    main()
