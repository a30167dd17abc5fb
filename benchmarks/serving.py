"""Tokens per second of many requests: continuous batching against static batches, in turn, in one run.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/serving.py
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/serving.py --static 8 32 --eager

All requests arrive at the beginning. The lengths of prompts (`--prompt`) and answers (`--tokens`) are log-uniform
between minimum and maximum: most are short, and a few are long. A static batch is padded on the left, and generates
until its longest answer is complete; only requested tokens count. Static batches use the same fused blocks; `--eager`
adds transformers' layers. Their requests get the first token when the batch is complete. Ratios are of medians. The
variants swap places from round to round, and the first round is dropped.
"""

import argparse
import copy
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.inference.v2 import InferenceEngineV2, Scheduler
from inference import MODELS, create

VOCABULARY = 8192


@dataclass(frozen=True)
class Wanted:
    """The prompt of a request and the number of tokens to generate."""

    prompt: list[int]
    num_new: int


@dataclass
class Outcome:
    """The seconds of all requests together, and per request the wait for the first token and the tokens."""

    seconds: float
    waits_s: list[float]
    tokens: list[list[int]]


Serve = Callable[[list[Wanted]], Outcome]


def requests(count: int, prompt: tuple[int, int], tokens: tuple[int, int], seed: int) -> list[Wanted]:
    """Return random requests; the same seed gives the same requests."""
    draw = random.Random(seed)

    def length(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    return [
        Wanted([draw.randrange(1, VOCABULARY) for _ in range(length(*prompt))], length(*tokens)) for _ in range(count)
    ]


def static(model: Any, batch: int) -> Serve:
    """Return a function that serves requests in static batches, in their order."""

    def serve(wanted: list[Wanted]) -> Outcome:
        start_s, waits_s, found = time.perf_counter(), [], []
        for first in range(0, len(wanted), batch):
            part = wanted[first : first + batch]
            width, num_new = max(len(each.prompt) for each in part), max(each.num_new for each in part)
            tokens = torch.tensor([[0] * (width - len(each.prompt)) + each.prompt for each in part])
            mask = torch.tensor([[0] * (width - len(each.prompt)) + [1] * len(each.prompt) for each in part])
            made = model.generate(
                tokens, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
            )
            waits_s += [time.perf_counter() - start_s] * len(part)
            found += [row[width : width + each.num_new].tolist() for row, each in zip(made, part, strict=True)]
        return Outcome(time.perf_counter() - start_s, waits_s, found)

    return serve


def continuous(engine: InferenceEngineV2, budget: int, max_sequences: int) -> Serve:
    """Return a function that serves all requests with one engine."""

    def serve(wanted: list[Wanted]) -> Outcome:
        start_s, scheduler = time.perf_counter(), Scheduler(engine, budget, max_sequences)
        uids = [scheduler.submit(each.prompt, each.num_new) for each in wanted]
        first_s: dict[int, float] = {}
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        for new in scheduler.stream():
            first_s.setdefault(new.uid, time.perf_counter() - start_s)
            found[new.uid].append(new.token)
        return Outcome(time.perf_counter() - start_s, list(first_s.values()), [found[uid] for uid in uids])

    return serve


def measure(name: str, args: argparse.Namespace) -> None:
    """Print the rows of one model."""
    plain = create(name)
    wanted = requests(args.requests, tuple(args.prompt), tuple(args.tokens), seed=1)
    longest = args.prompt[1] + args.tokens[1]
    keys = {"dtype": torch.float, "replace_with_kernel_inject": True, "max_out_tokens": longest}
    ours = deepspeed.init_inference(copy.deepcopy(plain), **keys)
    blocks = {"mode": "allocate", "size": args.sequences * -(-longest // 64)}
    limits = {"max_context": longest, "max_ragged_batch_size": args.budget, "memory_config": blocks}
    engine = InferenceEngineV2(deepspeed.init_inference(copy.deepcopy(plain), **keys), {"state_manager": limits})
    cases: dict[str, Serve] = {f"static, {batch} at once": static(ours, batch) for batch in args.static}
    if args.eager:
        cases |= {f"transformers, {batch} at once": static(plain, batch) for batch in args.static}
    cases[f"continuous, {args.sequences} at once"] = continuous(engine, args.budget, args.sequences)
    seconds: dict[str, list[float]] = {each: [] for each in cases}
    waits_s: dict[str, list[float]] = {each: [] for each in cases}
    tokens: dict[str, list[list[int]]] = {}
    orders = random.Random(0)
    for _ in range(1 + args.rounds):
        for each in orders.sample(list(cases), len(cases)):
            outcome = cases[each](wanted)
            seconds[each].append(outcome.seconds)
            waits_s[each].append(statistics.median(outcome.waits_s))
            tokens[each] = outcome.tokens
    total, num_prompt = sum(each.num_new for each in wanted), sum(len(each.prompt) for each in wanted)
    medians = {each: statistics.median(values[1:]) for each, values in seconds.items()}
    best = min(value for each, value in medians.items() if not each.startswith("continuous"))
    print(
        f"{name}, {len(wanted)} requests, {num_prompt} tokens of prompts, {total} new ones, "
        f"{torch.get_num_threads()} threads, steps of {args.budget} tokens"
    )
    for each, median in medians.items():
        same = sum(mine == theirs for mine, theirs in zip(tokens[each], next(iter(tokens.values())), strict=True))
        print(
            f"  {each:<28}{median:7.2f} s ({min(seconds[each][1:]):.2f} {max(seconds[each][1:]):.2f})   "
            f"{total / median:7.1f} new tokens/s   {best / median:5.2f} of the best static   first token after "
            f"{statistics.median(waits_s[each][1:]):6.2f} s   {same} of {len(wanted)} with the same tokens"
        )


def main() -> None:
    """Print rows for every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["Llama 25 M"], choices=MODELS)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, nargs=2, default=(8, 128), help="tokens, least and most")
    parser.add_argument("--tokens", type=int, nargs=2, default=(8, 256), help="new ones, least and most")
    parser.add_argument("--static", type=int, nargs="+", default=(8, 16, 32), help="sizes of static batches")
    parser.add_argument("--sequences", type=int, default=32, help="in the cache at once")
    parser.add_argument("--budget", type=int, default=128, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="static batches by transformers' layers, too")
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()
