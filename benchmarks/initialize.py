"""Startup cost: `deepspeed.initialize` against the construction of DDP, on the same model and ranks.

    python benchmarks/initialize.py --model 25m

Both start with a model in memory, and end with a module and an optimizer ready for the first step. The two take turns
(A B A B). The first turn includes imports and is printed separately.
"""

import argparse
import dataclasses
import gc
import statistics
import time

import rank_processes
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from variants import ADAMW, CASES, Case, Engine


def time_constructions(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Measure on each rank. Return the ms of each construction, one figure per round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(1 + rounds):
        for name in names:
            model = case.build_model()
            dist.barrier()
            start_s = time.perf_counter()
            built = _construct(name, model, case)
            dist.barrier()
            times[name].append((time.perf_counter() - start_s) * 1e3)
            del built, model
            gc.collect()
    return times


def _construct(name: str, model: nn.Module, case: Case) -> object:
    if name != "ddp":
        return Engine(model, case, stage=int(name.removeprefix("stage")))
    if case.dtype == "bf16":
        model = model.to(torch.bfloat16)
    module = nn.parallel.DistributedDataParallel(model)
    return module, torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(CASES), default="25m")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    case = dataclasses.replace(CASES[arguments.model], dtype=arguments.dtype)
    names = ["ddp", *(f"stage{stage}" for stage in arguments.stages)]
    by_rank = rank_processes.run(arguments.ranks, time_constructions, case, names, arguments.rounds)
    times = {name: [max(values) for values in zip(*(rank[name] for rank in by_rank), strict=True)] for name in names}
    print(f"construction, {case.model}, {case.dtype}, {arguments.ranks} ranks; median (least greatest)")
    table = Table()
    for heading in ("", "first, ms", "ms", "to DDP"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in names:
        values = times[name][1:]
        ratios = [a / b for a, b in zip(values, times["ddp"][1:], strict=True)]
        table.add_row(name, f"{times[name][0]:.0f}", _spread(values, 0), _spread(ratios, 2))
    Console(width=100).print(table)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
