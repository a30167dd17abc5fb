"""Memory of training per rank: peaks against the formula and FSDP2, a run under a limit, and growth over many steps.

    python benchmarks/memory.py                     # peaks of stages 0 to 3, stage 3 with and without zero.Init
    python benchmarks/memory.py --limit             # trains under a limit with zero.Init, and fails without
    python benchmarks/memory.py --limit --nvme DIR  # limit: a quarter of a rank's states; with and without NVMe
    python benchmarks/memory.py --growth            # 200 steps with changing control flow

*peak* is the highest resident set while the model is built and while it trains, minus the resident set of the same
process after training a tiny model. *formula* is the sum of a rank's states (ZeRO, arXiv 1910.02054, section 5; reduced
gradients included) and of the largest working set: activations, two blocks of gathered weights (current and next) and
two gradient buckets (one being filled, one being reduced), each as large as a block. `stage_config` sets these sizes.
The formula is a sum of maxima. Stages 2 and 3 and FSDP2 allocate reduced gradients during the backward, while
activations are freed, so they can stay below it.

Peaks above the formula mostly come from glibc's heap: freed blocks leave gaps, and longer-lived blocks fill them. The
CPU extension sets a threshold while zero.Init and stage 3 shard a model. `MALLOC_MMAP_THRESHOLD_=131072` in the
environment applies to all variants and to training. It shows the peaks nearly without gaps, but costs page faults.

The limit is RLIMIT_DATA of each rank's process: the bytes allocated by the rehearsal plus 1.15 times the formula (or
`--budget-mib`). It counts the heap with its gaps and private anonymous mappings, touched or not, so it is stricter than
the resident set. So all variants run with that threshold, unless the environment sets another one. The output also
shows the peak resident set of the run. With Adam in fp32, one of eight ranks holds 16 / 8 bytes per parameter, half the
size of the whole parameters, so a variant that first builds all parameters exceeds the limit. Many blocks and few
tokens keep the working set small compared with the states.

With `--nvme`, the limit is a quarter of the states of one of two ranks, and `stage3-nvme` keeps weights, gradients and
optimizer states in files (`offload_param`, `offload_optimizer`). Its formula contains no states, only the buffers that
docs/howto/offload-parameters.md lists. Target: a peak of at most 1.15 times the formula.
"""

import argparse
import dataclasses
import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_processes
import resident_memory
import torch
import torch.distributed as dist
from deepspeed.testing.models import GPT, GPTConfig
from torch import Tensor, nn
from variants import ADAMW, PERSISTENCE_NUMEL, REHEARSAL, Case, formula_bytes

MEBIBYTE = 2**20
# many blocks, so that a block is small compared with the model
DEEP = Case("deep GPT", width=384, num_layers=24, num_heads=6, batch=1)
# sharded states and working set of one of 8 ranks are smaller than the whole parameters
LIMITED = Case("limited GPT", width=384, num_layers=48, num_heads=6, batch=1, sequence_length=16)
SMALL = Case("small GPT", width=128, num_layers=6, num_heads=4, batch=1)
VARIANTS = [*(f"stage{stage}" for stage in range(4)), "stage3-init", "fsdp2-z3", "fsdp2-z3-meta"]
#: weights, gradients and optimizer states in files in the folder that the variable `NVME_PATH` names
ON_NVME = "stage3-nvme"
NVME_PATH = "NVME_PATH"
NVME_SUB_GROUP_NUMEL = 2**18
NVME_BUFFERS = 3
NVME_STATES_TO_LIMIT = 4
NVME_PEAK_TO_FORMULA = 1.15
#: per parameter of any size: modules, views, hooks, autograd nodes, and empty tensors of the optimizer
OBJECT_BYTES = 20 * 2**10
#: without zero.Init, a rank builds the whole model before it is sharded
LIMITED_VARIANTS = ["stage3-init", "stage3", "fsdp2-z3", "fsdp2-z3-meta"]
LIMIT_TO_FORMULA = 1.15
#: bytes; without this threshold, gaps in glibc's heap would count too
LIMITED_MMAP_THRESHOLD = 131072
NUM_LIMITED_STEPS = 3
#: messages of torch and Python when the system refuses memory
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")
Row = dict[str, Any]


class Run:
    """A variant on this rank. `step()` trains on a batch."""

    def __init__(self, case: Case, variant: str, build: Callable[[Case], nn.Module] = Case.build_model) -> None:
        self.batch = case.build_batch()
        if variant.startswith("fsdp2"):
            self._train = _fsdp2_step(case, build, on_meta=variant.endswith("-meta"))
        else:
            config = stage_config(case, int(variant[5]), on_nvme=variant == ON_NVME)
            self._train = _engine_step(case, build, config, in_init=variant in ("stage3-init", ON_NVME))

    def step(self) -> None:
        self._train(*self.batch)


def stage_config(case: Case, stage: int, *, on_nvme: bool) -> dict[str, Any]:
    """Return the default configuration, with at most two blocks of weights and of gradients at once."""
    numel = block_numel(case)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": numel}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENCE_NUMEL
        zero["stage3_prefetch_bucket_size"] = numel
        zero["stage3_max_live_parameters"] = 2 * numel
        zero["stage3_max_reuse_distance"] = 0
    if on_nvme:
        place = {"device": "nvme", "nvme_path": os.environ[NVME_PATH]}
        zero["offload_param"] = {**place, "buffer_count": NVME_BUFFERS, "max_in_cpu": 0}
        zero["offload_optimizer"] = {**place, "pipeline_read": True, "pipeline_write": True}
        zero["sub_group_size"] = NVME_SUB_GROUP_NUMEL
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[arg-type]
        "zero_optimization": zero,
        "bf16": {"enabled": case.dtype == "bf16"},
        "steps_per_print": 10**9,
    }


def _engine_step(
    case: Case, build: Callable[[Case], nn.Module], config: dict[str, Any], *, in_init: bool
) -> Callable[..., None]:
    import deepspeed

    if in_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build(case)
    else:
        model = build(case)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(*batch: Tensor) -> None:
        engine.backward(engine(*batch))
        engine.step()

    return step


def _fsdp2_step(case: Case, build: Callable[[Case], nn.Module], *, on_meta: bool) -> Callable[..., None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta" if on_meta else "cpu"):
        model = build(case)
    is_bf16 = case.dtype == "bf16"
    policy = MixedPrecisionPolicy(*[torch.bfloat16] * 2) if is_bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if on_meta:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_(std=0.02)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(*batch: Tensor) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ----- the formula ---------------------------------------------------------------------------------------------------


def block_numel(case: Case) -> int:
    """Return the number of elements of a block's parameters."""
    with torch.device("meta"):
        model = dataclasses.replace(case, num_layers=1).build_model()
    return sum(parameter.numel() for parameter in model.blocks.parameters())  # type: ignore[union-attr]


def activation_bytes(case: Case) -> int:
    """Return the bytes that autograd saves for the backward in plain torch, without parameters."""
    model = case.build_model().to(torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(case.batch, case.sequence_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(tokens, tokens)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return total


def expected_bytes(case: Case, variant: str, world_size: int) -> float:
    """Return the bytes of a rank's states and of the largest working set."""
    if variant == ON_NVME:
        return _bytes_beside_nvme(case, world_size)
    kind = variant.removesuffix("-init").removesuffix("-meta")
    itemsize = 2 if case.dtype == "bf16" else 4
    on_the_way = {"stage2": 2, "stage3": 4, "fsdp2-z3": 4}.get(kind, 0) * block_numel(case) * itemsize
    return formula_bytes(kind, case, world_size) + activation_bytes(case) + on_the_way


def _bytes_beside_nvme(case: Case, world_size: int) -> float:
    """Return the bytes of a rank with states in files: docs/howto/offload-parameters.md."""
    itemsize = 2 if case.dtype == "bf16" else 4
    with torch.device("meta"):
        numels = [parameter.numel() for parameter in case.build_model().parameters()]
    return activation_bytes(case) + bytes_beside_nvme(
        unit=block_numel(case),
        sub_group=NVME_SUB_GROUP_NUMEL,
        small=sum(numel for numel in numels if numel < PERSISTENCE_NUMEL),
        tensors=len(numels),
        ranks=world_size,
        buffers=NVME_BUFFERS,
        weight=itemsize,
        gradient=itemsize,
    )


def bytes_beside_nvme(
    *, unit: int, sub_group: int, small: int, tensors: int, ranks: int, buffers: int, weight: int, gradient: int
) -> float:
    """Return the bytes by the formula of docs/howto/offload-parameters.md, without activations."""
    shard = unit / ranks
    slots = 3 * (12 + gradient) * sub_group
    sums = 2 * gradient * shard
    shards = weight * buffers * (shard + min(shard, sub_group))
    whole = weight * (2 * unit + small)
    buckets = 3 * gradient * unit
    return slots + sums + shards + whole + buckets + OBJECT_BYTES * tensors


# ----- on a rank -----------------------------------------------------------------------------------------------------


def rehearse(case: Case, variant: str) -> None:
    """Train a tiny model, to run all imports and one-time initializations."""
    rehearsal = Run(dataclasses.replace(REHEARSAL, dtype=case.dtype), variant)
    for _ in range(2):
        rehearsal.step()


def measure_peak(case: Case, variant: str) -> Row:
    """Return the peaks while the model is built and while it trains."""
    rehearse(case, variant)
    before = resident_memory.resident_bytes()
    resident_memory.reset_peak()
    run = Run(case, variant)
    build_peak = resident_memory.peak_bytes() - before
    run.step()  # creates the optimizer states
    resident_memory.resident_bytes()
    resident_memory.reset_peak()
    for _ in range(3):
        run.step()
    return {
        "build_peak_bytes": build_peak,
        "peak_bytes": resident_memory.peak_bytes() - before,
        "resident_bytes": resident_memory.resident_bytes() - before,
    }


def train_under_limit(case: Case, variant: str, budget_bytes: int, num_steps: int) -> Row:
    """Build and train. Return the error that ended the run, or None, and the peak of the resident set."""
    rehearse(case, variant)
    before = resident_memory.resident_bytes()
    resident_memory.reset_peak()
    limit = resident_memory.data_bytes() + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    error = None
    try:
        run = Run(case, variant)
        for _ in range(num_steps):
            run.step()
    except (MemoryError, RuntimeError) as caught:
        error = (str(caught).strip() or type(caught).__name__).splitlines()[0]
    return {"error": error, "peak_bytes": resident_memory.peak_bytes() - before}


class ChangingGPT(GPT):
    """A GPT whose forward runs randomly chosen blocks in random order; the same blocks on all ranks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self._random = random.Random(0)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        assert targets_BT is not None
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for index in self._random.choices(range(len(self.blocks)), k=self._random.randint(2, len(self.blocks))):
            x_BTD = self.blocks[index](x_BTD)
        return nn.functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1).float(), targets_BT.flatten())


def build_changing(case: Case) -> nn.Module:
    """Build a `ChangingGPT` with the sizes of `case`."""
    torch.manual_seed(0)
    return ChangingGPT(case.gpt_config())


def measure_growth(case: Case, variant: str, num_steps: int) -> list[int]:
    """Train, and return the resident bytes after each tenth of the steps."""
    run = Run(case, variant, build_changing)
    sizes = []
    for number in range(1, num_steps + 1):
        run.step()
        if number % (num_steps // 10) == 0:
            sizes.append(resident_memory.resident_bytes())
    return sizes


# ----- the three reports ---------------------------------------------------------------------------------------------


def report_peaks(case: Case, arguments: argparse.Namespace) -> list[Row]:
    """Print a line per variant with the maximum over the ranks."""
    numel = sum(parameter.numel() for parameter in case.build_model().parameters())
    print(f"{case.model}, {numel / 1e6:.1f} M parameters, {case.dtype}, {arguments.ranks} ranks; MiB per rank")
    print(f"{'variant':16}{'building':>10}{'peak':>10}{'formula':>10}{'to formula':>12}")
    rows = []
    for variant in arguments.variants or VARIANTS:
        ranks = rank_processes.run(arguments.ranks, measure_peak, case, variant)
        row = {"variant": variant, **{key: max(rank[key] for rank in ranks) for key in ranks[0]}}
        row["expected_bytes"] = expected_bytes(case, variant, arguments.ranks)
        rows.append(row)
        sizes = [row[key] / MEBIBYTE for key in ("build_peak_bytes", "peak_bytes", "expected_bytes")]
        print(f"{variant:16}" + "".join(f"{size:10.0f}" for size in sizes) + f"{sizes[1] / sizes[2]:12.2f}", flush=True)
    return rows


def report_limit(case: Case, arguments: argparse.Namespace) -> list[Row]:
    """Print a line per variant: outcome, peak of the ranks' resident sets, and the cause of a failure."""
    states = formula_bytes("stage3", case, arguments.ranks)
    expected = expected_bytes(case, ON_NVME if arguments.nvme else "stage3", arguments.ranks)
    budget = int(states / NVME_STATES_TO_LIMIT if arguments.nvme else LIMIT_TO_FORMULA * expected)
    if arguments.budget_mib:
        budget = arguments.budget_mib * MEBIBYTE
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in case.build_model().parameters())
    print(
        f"{case.model}, {numel / 1e6:.1f} M parameters, {arguments.ranks} ranks; MiB. Parameters: "
        f"{4 * numel / MEBIBYTE:.0f}, with gradients and states {16 * numel / MEBIBYTE:.0f}, of a rank "
        f"{states / MEBIBYTE:.0f}; formula of a rank: "
        f"{expected / MEBIBYTE:.0f}; RLIMIT_DATA of a rank, beyond the rehearsal: {budget / MEBIBYTE:.0f}, "
        f"{budget / expected:.2f} of the formula"
    )
    print(f"{'variant':16}{'outcome':>10}{'peak':>8}{'to formula':>12}")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(LIMITED_MMAP_THRESHOLD))  # ranks inherit it
    rows = []
    for variant in arguments.variants or ([ON_NVME, "stage3-init"] if arguments.nvme else LIMITED_VARIANTS):
        ranks = rank_processes.run(arguments.ranks, train_under_limit, case, variant, budget, NUM_LIMITED_STEPS)
        row = {"variant": variant, "budget_bytes": budget, "expected_bytes": expected, "cause": _cause(ranks)}
        row["peak_bytes"] = max(rank["peak_bytes"] for rank in ranks)
        rows.append(row)
        outcome = "trained" if row["cause"] is None else "failed"
        sizes = f"{row['peak_bytes'] / MEBIBYTE:8.0f}{row['peak_bytes'] / expected:12.2f}"
        verdict = row["cause"] or ""
        if variant == ON_NVME and row["cause"] is None:
            verdict = "met" if row["peak_bytes"] <= NVME_PEAK_TO_FORMULA * expected else "MISSED"
        print(f"{variant:16}{outcome:>10}{sizes}  {verdict}", flush=True)
    return rows


def _cause(ranks: list[Row]) -> str | None:
    """Return the cause of a failure. Prefer refused memory: the other ranks only report a lost peer."""
    errors = [rank["error"] for rank in ranks if rank["error"] is not None]
    refused = [error for error in errors if any(text in error for text in NO_MEMORY)]
    return next(iter([*refused, *errors]), None)


def report_growth(arguments: argparse.Namespace) -> list[Row]:
    """Print the resident sets and their growth in percent, one line per variant."""
    rows = []
    for variant in arguments.variants or VARIANTS:
        if variant.startswith("fsdp2"):
            continue
        ranks = rank_processes.run(arguments.ranks, measure_growth, SMALL, variant, arguments.steps)
        growth = max(sizes[-1] / sizes[0] - 1 for sizes in ranks)
        rows.append({"variant": variant, "growth": growth, "resident_bytes": ranks})
        shown = " ".join(f"{size / MEBIBYTE:.1f}" for size in ranks[0])
        print(f"{variant:16}{growth:8.2%} after {arguments.steps} steps; rank 0, MiB: {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--limit", action="store_true", help="train under a memory limit")
    kind.add_argument("--growth", action="store_true", help="resident memory over many steps")
    parser.add_argument("--nvme", metavar="DIR", help="with --limit: a folder on a local disk for states")
    choices = [*VARIANTS, ON_NVME]
    parser.add_argument("--variants", nargs="+", choices=choices, help="default: all; with --limit four, or two")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ranks", type=int, help="default: 2, with --limit and no --nvme 8")
    parser.add_argument("--layers", type=int, help="blocks of the model")
    parser.add_argument("--budget-mib", type=int, help="of --limit: default 1.15 times the formula")
    parser.add_argument("--steps", type=int, default=200, help="of --growth")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    if arguments.nvme:
        os.environ[NVME_PATH] = arguments.nvme  # ranks inherit it
    arguments.ranks = arguments.ranks or (8 if arguments.limit and not arguments.nvme else 2)
    case = LIMITED if arguments.limit else DEEP
    case = dataclasses.replace(case, dtype=arguments.dtype, num_layers=arguments.layers or case.num_layers)
    if arguments.growth:
        rows = report_growth(arguments)
    else:
        rows = report_limit(case, arguments) if arguments.limit else report_peaks(case, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
