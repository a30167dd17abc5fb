"""Python time of `engine(x)`, `engine.backward` and `engine.step` against bare torch: one rank, 200 tiny layers.

    python benchmarks/python_time.py                    # stages 0 to 3
    python benchmarks/python_time.py --stages 2 --dtype bf16 --profile 25

The layers are so small that Python and dispatch take nearly all of a step. Each stage runs in a fresh process, and
takes turns with bare torch (the module, `loss.backward()`, torch's fused AdamW, `zero_grad`). A pair is a few steps of
each, in alternating order. Prints medians over the pairs, with the minimum and maximum ratio, of the process's user CPU
time, which does not count other processes. With `--optimizer torch`, the engine uses the same fused AdamW instead of
its own kernel. `--profile N` prints the N functions with the most own time, by cProfile.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_processes
import torch
from torch import Tensor, nn

WIDTH = 4
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PARTS = ("forward", "backward", "step")
Step = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object], Callable[[], object]]


def build_model(num_layers: int, dtype: torch.dtype) -> nn.Module:
    """Build `num_layers` linear layers with biases, (4, 4) each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))).to(dtype)


def bare_step(module: nn.Module) -> Step:
    """Return the three parts of a step in plain torch."""
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda x: module(x).sum(), lambda loss: loss.backward(), step


def engine_step(module: nn.Module, stage: int, is_bf16: bool, own_optimizer: bool) -> Step:
    """Return the three parts of a step of an engine."""
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": is_bf16},
        "steps_per_print": 10**9,
    }
    optimizer = None
    if own_optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    else:
        optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return lambda x: engine(x).sum(), engine.backward, engine.step


def user_s() -> float:
    """Return the user CPU seconds of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def time_steps(parts: Step, x: Tensor, num_steps: int) -> list[float]:
    """Return the user CPU ms of forward, backward and step, averaged over `num_steps`."""
    forward, backward, step = parts
    spent = [0.0, 0.0, 0.0]
    for _ in range(num_steps):
        start = user_s()
        loss = forward(x)
        after_forward = user_s()
        backward(loss)
        after_backward = user_s()
        step()
        end = user_s()
        spent[0] += after_forward - start
        spent[1] += after_backward - after_forward
        spent[2] += end - after_backward
    return [seconds / num_steps * 1e3 for seconds in spent]


def measure(stage: int, arguments: argparse.Namespace) -> tuple[list[list[list[float]]], str]:
    """Measure on the rank. Return the times of torch and the engine per pair, and a profile of the engine's steps."""
    is_bf16 = arguments.dtype == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    x = torch.ones(2, WIDTH, dtype=dtype)
    bare = bare_step(build_model(arguments.layers, dtype))
    ours = engine_step(build_model(arguments.layers, torch.float32), stage, is_bf16, arguments.optimizer == "engine")
    for parts in (bare, ours):
        time_steps(parts, x, 5)  # lazy initialization
    gc.collect()
    gc.freeze()  # the collector skips long-lived objects during the measurement
    pairs = []
    for number in range(arguments.rounds):
        order = (bare, ours) if number % 2 else (ours, bare)
        times = {id(parts): time_steps(parts, x, arguments.steps_per_round) for parts in order}
        pairs.append([times[id(bare)], times[id(ours)]])
    return pairs, _profile(ours, x, arguments.profile) if arguments.profile else ""


def _profile(parts: Step, x: Tensor, num_functions: int) -> str:
    profile = cProfile.Profile()
    profile.enable()
    time_steps(parts, x, 20)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(num_functions)
    return text.getvalue()


def summarize(stage: int, pairs: list[list[list[float]]]) -> dict[str, Any]:
    """Return medians over the pairs: ms of both by part, and the ratio of whole steps."""
    row: dict[str, Any] = {"stage": stage}
    for index, part in enumerate(PARTS):
        row[f"torch_{part}_ms"] = statistics.median(bare[index] for bare, _ in pairs)
        row[f"{part}_ms"] = statistics.median(ours[index] for _, ours in pairs)
    ratios = [sum(ours) / sum(bare) for bare, ours in pairs]
    row |= {"ratio": statistics.median(ratios), "min_ratio": min(ratios), "max_ratio": max(ratios)}
    return row


def format_row(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    parts = "  ".join(f"{part} {row[f'torch_{part}_ms']:6.2f} -> {row[f'{part}_ms']:6.2f}" for part in PARTS)
    return f"stage {row['stage']}  {parts}  ratio {row['ratio']:.2f} ({row['min_ratio']:.2f} {row['max_ratio']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--optimizer", choices=["engine", "torch"], default="engine")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=21, help="pairs")
    parser.add_argument("--steps-per-round", type=int, default=10)
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    print(f"user CPU ms per step, bare torch -> engine; {arguments.layers} layers, {arguments.dtype}")
    for stage in arguments.stages:
        pairs, profile = rank_processes.run(1, measure, stage, arguments)[0]
        rows.append(summarize(stage, pairs))
        print(format_row(rows[-1]), profile, sep="\n" if profile else "", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
