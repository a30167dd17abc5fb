"""Pipeline schedules: step time and idle share of the stages, against torch.distributed.pipelining.

    python benchmarks/pipeline.py --micro-batches 4 8 16
    python benchmarks/pipeline.py --stages 4 --waits 4          # layers wait 4 ms instead of computing

Each rank runs one stage, with one core and one thread. So stages need as many cores, unless layers only wait. All
variants share the ranks and take turns. Prints medians over the rounds. The *idle share* is the idle part of all
stages' time between the start of the first pass and the end of the last pass. *ideal* is the idle share of the schedule
itself: (p - 1) / (m + p - 1) for 1F1B with m micro-batches on p stages. The rest is shown by kind, in percent
(`pipeline_idle.py`). All stages have the same work. A step includes the optimizer (SGD).
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
from deepspeed.pipe.timeline import Pass
from torch import Tensor, nn

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
PEER = "torch 1F1B"
LR = 1e-3


class Block(nn.Module):
    """A block of two matrix products and a residual connection. The first block also computes a gradient of its
    inputs, so that all stages have the same work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
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
    """A layer that waits in its forward, and twice as long in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        return _Wait.apply(hidden, self.weight, self.seconds)


class PassClock:
    """Records when each pass of an engine begins and ends."""

    def __init__(self, engine: Any, num_micros: int) -> None:
        self._times: list[tuple[float, float]] = []
        self._schedules = [engine._schedule_type(num_micros, engine.num_stages, at) for at in range(engine.num_stages)]
        for method in ("forward", "backward", "backward_weights"):
            self._time(engine._compute, method)
        self._time(engine._compute, "loss", belongs_to_last=True)

    def start(self) -> None:
        """Drop the records before a step."""
        self._times.clear()

    def passes(self) -> list[Pass]:
        """Return the passes of all stages in the step, with times of the machine's clock. A collective."""
        from deepspeed.comm.values import all_gather_values
        from pipeline_idle import measured

        everyone = [[tuple(each) for each in theirs] for theirs in all_gather_values(self._times)]
        return measured(self._schedules, everyone)

    def idle(self) -> dict[str, float]:
        """Return the idle shares of the step by kind. A collective."""
        from pipeline_idle import idle_by_kind

        return idle_by_kind(self._schedules, self.passes())

    def _time(self, compute: Any, method: str, *, belongs_to_last: bool = False) -> None:
        inner = getattr(compute, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = self._times.pop()[0] if belongs_to_last else time.perf_counter()
            result = inner(*args, **kwargs)
            self._times.append((start_s, time.perf_counter()))
            return result

        setattr(compute, method, call)


def measure(args: argparse.Namespace, num_micros: int) -> dict[str, list[dict[str, float]]]:
    """Return for each variant and round the seconds of a step, and its idle shares by kind (not for the peer)."""
    import deepspeed
    import deepspeed.comm as dist

    torch.manual_seed(0)
    build = partial(Waiting, args.waits / 1e3) if args.waits else partial(Block, args.width)
    spec = (Waiting, args.waits / 1e3) if args.waits else (Block, args.width)
    shape = (args.rows, args.width)
    batch = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_micros)]
    steps: dict[str, Callable[[], Any]] = {}
    clocks: dict[str, PassClock] = {}
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
        clocks[name] = PassClock(engine, num_micros)
        steps[name] = lambda engine=engine: engine.train_batch(iter(batch))
    if PEER in args.peers:
        steps[PEER] = _peer(args, num_micros, build, batch)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    orders = random.Random(0)  # the same on all ranks
    for round_number in range(1 + args.rounds):
        for name in orders.sample(list(steps), len(steps)):
            if name in clocks:
                clocks[name].start()
            dist.barrier()
            start_s = time.perf_counter()
            steps[name]()
            dist.barrier()
            step_s = time.perf_counter() - start_s
            idle = clocks[name].idle() if name in clocks else {}
            if round_number:
                figures[name].append({"step_s": step_s, **idle})
    return figures


def _peer(
    args: argparse.Namespace, num_micros: int, build: Callable[[], nn.Module], batch: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """Return a function that runs a step of torch's 1F1B over the same layers."""
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


def rows(args: argparse.Namespace) -> Iterator[tuple[int, str, float, dict[str, float]]]:
    """Yield (micro-batches, variant, ms of a step, idle shares by kind with their sum)."""
    for num_micros in args.micro_batches:
        figures = rank_processes.run(args.stages, measure, args, num_micros)[0]
        for name, each in figures.items():
            idle = [{kind: share for kind, share in row.items() if kind != "step_s"} for row in each]
            sums = [{**row, "sum": sum(row.values())} for row in idle if row]
            medians = {kind: statistics.median(row[kind] for row in sums) for kind in (sums[0] if sums else ())}
            yield num_micros, name, 1e3 * statistics.median(row["step_s"] for row in each), medians


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
    from pipeline_idle import KINDS

    beyond = KINDS[1:]
    print(f"{args.stages} stages, {args.layers} layers; share of the time in which stages are idle, and why")
    print(f"{'m':>4}  {'variant':<12}{'ms':>8}{'idle':>8}{'ideal':>8}{'ratio':>8}", *(f"{kind:>9}" for kind in beyond))
    for num_micros, name, step_ms, idle in rows(args):
        print(f"{num_micros:>4}  {name:<12}{step_ms:>8.1f}", end="")
        if idle:
            print(f"{idle['sum']:>8.4f}{idle['schedule']:>8.4f}{idle['sum'] / idle['schedule']:>8.3f}", end=" ")
            print(*(f"{100 * idle[kind]:>8.2f}%" for kind in beyond), end="")
        print()


if __name__ == "__main__":
    main()
