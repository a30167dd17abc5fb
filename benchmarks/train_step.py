"""A training step against its peers: ms, bytes per rank, ratios to DDP, FSDP2 and a floor without communication.

    python benchmarks/train_step.py --models 3m 25m --dtypes fp32 bf16 --json out.json --plot step.png
    python benchmarks/train_step.py --offload
    python benchmarks/train_step.py --offload nvme --nvme-path /local_nvme
    python benchmarks/train_step.py --deterministic --accumulation 4

`fsdp2-z3` shards per block and reshards after forward, as stage 3 does; in bf16 it reduces in bf16, as ours do. Stage 3
has default keys. `--offload` compares variants with `offload_optimizer` and FSDP2's `CPUOffloadPolicy`. If the ranks'
accelerator is the host, neither copies anything; `-apart` uses a separate host memory and makes every copy.
`--offload nvme` compares swap files with offload to host memory, which moves nothing here: its time is the
*computation*. fio takes turns with the variants, with one job per rank and the same engine, block size, depth and mix
of reads and writes. The *disk time* is the bytes that a step reads and writes, divided by fio's rate. The target is
1.15 times the larger of the two. A step cannot reach the target if both are similar and most states go through the
disk, because no update starts before the norm of all gradients is known. `--sub-group-numel` reduces the part that
stays in memory; `--batch` and `--sequence` change the computation. An update's results stay in memory until their space
is needed: if all states fit (12.6 million elements per rank by default), nothing is written to the disk.

Method: each variant has its own ranks, because a variant may change its process permanently (stage 3 of ds-ext-cpu sets
thresholds of the allocator). The variants take turns of `--steps-per-round` steps, so that noise affects all alike, and
use no CPU while they wait. Each round has another order. Prints the median of the rounds with minimum and maximum; a
ratio is a ratio of printed medians. Each rank has one core and one thread. No variant clips gradients. Memory is
measured separately, in fresh ranks for each variant. *state* counts tensors after backward and before the optimizer's
step, when parameters, gradients and optimizer states all exist. *peak* is the highest resident set during steps, minus
the resident set before the model. With `--device`, these are figures of the device's allocator.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import disk
import rank_processes
import resident_memory
import torch
import torch.distributed as dist
from rank_processes import Ranks
from rich.console import Console
from rich.table import Table
from variants import (
    CASES,
    DETERMINISTIC_VARIANTS,
    NVME,
    OFFLOAD_VARIANTS,
    REHEARSAL,
    VARIANTS,
    Case,
    Variant,
    build,
    formula_bytes,
)

MEBIBYTE = 2**20
PEER_NAMES = {
    "ddp": "DDP",
    "fsdp2-z3": "FSDP2",
    "fsdp2-z2-offload": "FSDP2 z2",
    "fsdp2-z3-offload": "FSDP2 z3",
}
#: maximum ratio of a step with swap files to the larger of computation and disk time
NVME_TARGET = 1.15
FIO = "fio"
Row = dict[str, Any]


def time_variants(case: Case, arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the milliseconds per step of each variant on its slowest rank, one figure per round without the warm-up.
    Variants with swap files add an entry "bytes of <variant>", the bytes per step of each rank, and "fio", fio's bytes
    per second."""
    names = arguments.variants
    on_nvme = [name for name in names if name.endswith(NVME)]
    figures: dict[str, list[Any]] = {name: [] for name in [*names, *map("bytes of {}".format, on_nvme)]}
    turns = [*names, FIO] if on_nvme else names
    orders = random.Random(0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=case.nvme_path or None))
        ranks = {name: stack.enter_context(Ranks(arguments.ranks, device=case.device)) for name in names}
        with ThreadPoolExecutor(1 if case.device == "cpu" else len(names)) as builders:  # the host has few cores
            list(builders.map(lambda name: ranks[name].keep(build, name, case), names))
        for _ in range(1 + arguments.rounds):
            for name in orders.sample(turns, len(turns)):
                if name == FIO:
                    last = [figures[f"bytes of {each}"][-1] for each in on_nvme if figures[f"bytes of {each}"]]
                    moved = [of_rank for by_rank in last for of_rank in by_rank]
                    figures.setdefault(FIO, []).append(_fio(Path(folder), moved, arguments.ranks))
                    continue
                by_rank = ranks[name].call(measure_round, case, arguments.steps_per_round)
                figures[name].append(max(ms for ms, _ in by_rank))
                if name in on_nvme:
                    figures[f"bytes of {name}"].append([passed for _, passed in by_rank])
    return {name: values[1:] for name, values in figures.items()}


def measure_round(variant: Variant, case: Case, num_steps: int) -> tuple[float, disk.Bytes]:
    """Measure on each rank. Return ms per step, and the disk bytes per step."""
    _wait_for_all(case)
    before, start_s = disk.passed(), time.perf_counter()
    for _ in range(num_steps):
        variant.forward_backward()
        variant.update()
    variant.finish()  # count the work that the last step left in flight
    _wait_for_all(case)
    ms = (time.perf_counter() - start_s) / num_steps * 1e3
    passed = zip(disk.passed(), before, strict=True)
    return ms, disk.Bytes(*((after - each) / num_steps for after, each in passed))


def _fio(folder: Path, moved: list[disk.Bytes], num_ranks: int) -> float:
    """Return fio's bytes per second with the steps' mix of reads and writes, and one job per rank."""
    read, total = sum(each.read for each in moved), sum(each.total for each in moved)
    files = [folder / f"rank{rank}" for rank in range(num_ranks)]
    percent = round(100 * read / total) if total else 50
    return disk.fio(files, "readwrite", 2**28, read_percent=percent).total


def _wait_for_all(case: Case) -> None:
    if case.device != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()


def measure_device_memory(case: Case, name: str) -> Row:
    """Measure on each rank, in a fresh process. Return the bytes of states and the peaks of device memory."""
    variant = VARIANTS[name](case)
    build_peak = torch.accelerator.max_memory_allocated()
    for _ in range(2):
        variant.forward_backward()
        variant.update()
    torch.accelerator.reset_peak_memory_stats()
    variant.forward_backward()
    variant.settle()
    state = torch.accelerator.memory_allocated() + min(variant.hidden_bytes(), 0)
    variant.update()
    return {
        "state_bytes": state,
        "resident_bytes": torch.accelerator.memory_allocated(),
        "build_peak_bytes": build_peak,
        "peak_bytes": torch.accelerator.max_memory_allocated(),
    }


def measure_memory(case: Case, name: str) -> Row:
    """Measure on each rank, in a fresh process. Return the bytes of states, the resident set and the peaks."""
    rehearsal = VARIANTS[name](dataclasses.replace(REHEARSAL, dtype=case.dtype))
    rehearsal.forward_backward()
    rehearsal.update()
    del rehearsal
    tensors_before = resident_memory.tensor_bytes()
    resident_before = resident_memory.resident_bytes()

    resident_memory.reset_peak()
    variant = VARIANTS[name](case)
    build_peak = resident_memory.peak_bytes()
    variant.forward_backward()
    variant.update()  # creates the optimizer states

    resident_memory.resident_bytes()  # trims the heap before the peak is reset
    resident_memory.reset_peak()
    variant.forward_backward()
    variant.settle()
    state = resident_memory.tensor_bytes() - tensors_before + variant.hidden_bytes()
    variant.update()
    variant.forward_backward()
    variant.update()
    steps_peak = resident_memory.peak_bytes()
    return {
        "state_bytes": state,
        "resident_bytes": resident_memory.resident_bytes() - resident_before,
        "build_peak_bytes": build_peak - resident_before,
        "peak_bytes": steps_peak - resident_before,
    }


def measure_case(case: Case, arguments: argparse.Namespace) -> list[Row]:
    """Measure every variant of one model and dtype. Return rows for the table and the JSON file."""
    names = arguments.variants
    times = time_variants(case, arguments)
    numel = sum(parameter.numel() for parameter in case.build_model().parameters())
    rows = []
    for name in names:
        row: Row = {"model": case.model, "dtype": case.dtype, "variant": name, "ranks": arguments.ranks, "numel": numel}
        row["ms"] = _summary(times[name])
        for peer in arguments.peers:
            if peer in names:
                row[f"to_{peer}"] = row["ms"]["median"] / statistics.median(times[peer])
        if name.endswith(NVME):
            row |= _beside_the_disk(name, times, row["ms"]["median"])
        row["formula_bytes"] = formula_bytes(name, case, arguments.ranks)
        if not arguments.no_memory:
            measure = measure_memory if case.device == "cpu" else measure_device_memory
            ranks = rank_processes.run(arguments.ranks, measure, case, name, device=case.device)
            row |= {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        rows.append(row)
    return rows


def _computation(name: str) -> str:
    """Return the name of the same variant without swap files."""
    return name.replace(NVME, "-offload")


def _beside_the_disk(name: str, times: dict[str, list[Any]], ms: float) -> Row:
    """Return a step's disk bytes, disk time and computation time, and the ratio of the step to the larger time."""
    computation_ms = statistics.median(times[_computation(name)])
    moved = times[f"bytes of {name}"]
    read = statistics.median(sum(rank.read for rank in ranks) for ranks in moved)
    written = statistics.median(sum(rank.written for rank in ranks) for ranks in moved)
    rate = statistics.median(times[FIO])
    disk_ms = (read + written) / rate * 1e3
    return {
        "read_bytes": read,
        "written_bytes": written,
        "fio_bytes_per_s": rate,
        "disk_ms": disk_ms,
        "computation_ms": computation_ms,
        "to_target": ms / max(disk_ms, computation_ms),
    }


def print_beside_the_disk(row: Row) -> None:
    """Print computation, disk time, and whether the step meets the target."""
    verdict = "met" if row["to_target"] <= NVME_TARGET else "MISSED"
    print(
        f"{row['variant']}: {row['ms']['median']:.0f} ms; computation {row['computation_ms']:.0f} ms; disk "
        f"{row['disk_ms']:.0f} ms: {row['read_bytes'] / 1e6:.0f} MB read, {row['written_bytes'] / 1e6:.0f} MB written, "
        f"fio moves {row['fio_bytes_per_s'] / 1e9:.2f} GB/s of that mix; {row['to_target']:.2f}x the larger ({verdict})"
    )


def build_table(rows: list[Row], peers: list[str]) -> Table:
    """Return the rows as a rich table; bytes in MiB per rank."""
    table = Table()
    table.add_column("variant")
    ratios = [f"to {PEER_NAMES.get(peer, peer)}" for peer in peers]
    for heading in ("ms per step", *ratios, "state MiB", "to formula", "resident MiB", "peak MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row, peers))
    return table


def build_markdown(rows: list[Row], peers: list[str]) -> str:
    """Return the rows as a markdown table for the README."""
    ratios = [f"to {PEER_NAMES.get(peer, peer)}" for peer in peers]
    headings = ["model", "dtype", "variant", "ms per step", *ratios, "state MiB", "to formula", "peak MiB"]
    lines = [f"| {' | '.join(headings)} |", "|---|---|---" + "|--:" * (len(headings) - 3) + "|"]
    for row in rows:
        cells = _cells(row, peers)
        del cells[-2]  # the resident set
        lines.append(f"| {row['model']} | {row['dtype']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: Row, peers: list[str]) -> list[str]:
    cells = [row["variant"], _spread(row["ms"])]
    cells += [f"{row[f'to_{peer}']:.2f}" if f"to_{peer}" in row else "" for peer in peers]
    if "state_bytes" not in row:
        return [*cells, "", "", "", ""]
    cells += [f"{row['state_bytes'] / MEBIBYTE:.0f}", f"{row['state_bytes'] / row['formula_bytes']:.2f}"]
    return [*cells, f"{row['resident_bytes'] / MEBIBYTE:.0f}", f"{row['peak_bytes'] / MEBIBYTE:.0f}"]


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _spread(summary: dict[str, float]) -> str:
    return f"{summary['median']:.0f} ({summary['min']:.0f} {summary['max']:.0f})"


def plot(rows: list[Row], path: Path) -> None:
    """Plot ms per step as bars, one panel per model and dtype; whiskers are minimum and maximum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((row["model"], row["dtype"]) for row in rows))
    figure, panels = pyplot.subplots(1, len(cases), figsize=(4 * len(cases), 3.2), squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        its = [row for row in rows if (row["model"], row["dtype"]) == case]
        medians = [row["ms"]["median"] for row in its]
        spread = [
            [row["ms"]["median"] - row["ms"]["min"] for row in its],
            [row["ms"]["max"] - row["ms"]["median"] for row in its],
        ]
        colors = ["tab:blue" if row["variant"].startswith("stage") else "tab:gray" for row in its]
        panel.barh([row["variant"] for row in its], medians, xerr=spread, color=colors, ecolor="black", capsize=2)
        panel.invert_yaxis()
        panel.set_title(", ".join(case))
        panel.set_xlabel("ms per step, median")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--offload", nargs="?", choices=list(OFFLOAD_VARIANTS), const="cpu", help="variants with an offloaded optimizer"
    )
    parser.add_argument("--deterministic", action="store_true", help="the stages of ZeRO with and without it")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step, for ours")
    parser.add_argument("--nvme-path", default="", help="a folder on a local disk, for --offload nvme")
    parser.add_argument("--sub-group-numel", type=int, default=10**9, help="elements, for --offload nvme")
    parser.add_argument("--batch", type=int, help="of a rank and step; default: the model's")
    parser.add_argument("--sequence", type=int, help="tokens; default: the model's")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all of the kind")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, one warm-up not counted")
    parser.add_argument("--steps-per-round", type=int, help="default 3; for --offload nvme 8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="device type of torch; a rank has one of them")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the times into this PNG file")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table at the end")
    arguments = parser.parse_args()
    if arguments.offload == "nvme" and not arguments.nvme_path:
        parser.error("--offload nvme: give --nvme-path, a folder on a local disk")
    arguments.steps_per_round = arguments.steps_per_round or (8 if arguments.offload == "nvme" else 3)
    peers = {"cpu": ["fsdp2-z2-offload", "fsdp2-z3-offload"], "nvme": []}
    arguments.peers = peers.get(arguments.offload, ["ddp", "floor", "fsdp2-z3"])
    if arguments.deterministic:
        arguments.variants = arguments.variants or DETERMINISTIC_VARIANTS
        arguments.peers = ["stage0", "stage1", "stage2", "stage3"]
    if arguments.variants is None:
        others = {name for names in (*OFFLOAD_VARIANTS.values(), DETERMINISTIC_VARIANTS[1::2]) for name in names}
        plain = [name for name in VARIANTS if name not in others]
        arguments.variants = OFFLOAD_VARIANTS.get(arguments.offload, plain)
    lacking = [
        name for name in arguments.variants if name.endswith(NVME) and _computation(name) not in arguments.variants
    ]
    if lacking:
        parser.error(f"--variants {lacking[0]}: add {_computation(lacking[0])}, to which it is compared")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if Console().is_terminal else 140)
    rows: list[Row] = []
    for model in arguments.models:
        for dtype in arguments.dtypes:
            case = dataclasses.replace(
                CASES[model],
                dtype=dtype,
                device=arguments.device,
                nvme_path=arguments.nvme_path,
                sub_group_numel=arguments.sub_group_numel,
                accumulation=arguments.accumulation,
                batch=arguments.batch or CASES[model].batch,
                sequence_length=arguments.sequence or CASES[model].sequence_length,
            )
            case_rows = measure_case(case, arguments)
            rows += case_rows
            print(f"\n{case.model}, {dtype}, batch {case.batch}, {arguments.ranks} ranks; median (least greatest)")
            console.print(build_table(case_rows, arguments.peers))
            for row in case_rows:
                if "disk_ms" in row:
                    print_beside_the_disk(row)
            if arguments.json:  # after each case, so that an interrupted run keeps its results
                arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.markdown:
        print(build_markdown(rows, arguments.peers))


if __name__ == "__main__":
    main()
