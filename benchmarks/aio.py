"""`deepspeed.ops.aio` against fio: reads and writes of a file with the same engine, block size and depth, in turns.

    python benchmarks/aio.py --gib 1 --rounds 9 --folder /local_nvme

fio runs `--ioengine=io_uring --direct=1` (or `psync` with one job per thread of ours) on the file that ours wrote. Ours
transfers a page-locked tensor and a pageable tensor; fio reuses a few blocks of memory. Prints GB/s (10**9 bytes):
medians over the rounds with minimum and maximum, and the ratio of the medians. Target: 0.95 or more.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.aio import aio_handle
from disk import fio

TARGET = 0.95


def ours(call: Callable[..., int], tensor: torch.Tensor, path: Path) -> float:
    start = time.perf_counter()
    call(tensor, str(path))
    return tensor.numel() / (time.perf_counter() - start)


def measure(handle: Any, folder: Path, args: argparse.Namespace) -> None:
    num_bytes, path = args.gib << 30, folder / "file"
    same = {"block_kib": args.block_kib, "depth": args.depth, "engine": args.engine, "jobs_per_file": args.workers}
    empty = torch.empty(0, dtype=torch.uint8)
    tensors = {"locked tensor": handle.new_cpu_locked_tensor(num_bytes, empty).fill_(1)}
    tensors["plain tensor"] = torch.ones(num_bytes, dtype=torch.uint8)
    handle.sync_pwrite(tensors["plain tensor"], str(path))
    for kind, call in (("write", handle.sync_pwrite), ("read", handle.sync_pread)):
        runs: dict[str, list[float]] = {name: [] for name in (*tensors, "fio")}
        for _ in range(args.rounds):
            for name, tensor in tensors.items():
                runs[name].append(ours(call, tensor, path))
            runs["fio"].append(fio([path], kind, num_bytes, **same).total)
        report(kind, runs)


def report(kind: str, runs: dict[str, list[float]]) -> None:
    peer = statistics.median(runs["fio"])
    for name, rates in runs.items():
        median = statistics.median(rates)
        spread = f"{min(rates) / 1e9:.2f}-{max(rates) / 1e9:.2f}"
        verdict = (
            "" if name == "fio" else f"{median / peer:.2f}x fio ({'met' if median >= TARGET * peer else 'MISSED'})"
        )
        print(f"{kind:5} {name:13} {median / 1e9:6.2f} GB/s ({spread})  {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", choices=("io_uring", "threads"), default="io_uring")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    os.environ["DS_AIO_ENGINE"] = args.engine
    handle = aio_handle(args.block_kib << 10, args.depth, False, True, args.workers)
    print(f"{args.engine}, {args.block_kib} KiB x {args.depth} x {args.workers}, {args.gib} GiB, {args.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(handle, Path(folder), args)


if __name__ == "__main__":
    main()
