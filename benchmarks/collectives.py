"""Compare the `GroupBackend`s of ZeRO's collectives with torch.distributed, for ranks in host memory.

    python benchmarks/collectives.py --ranks 2            # one core per rank, median of interleaved rounds

Prints milliseconds per full tensor. "direct" is ds-ext-cpu with ranks that may read each other's memory, "messages" is
ds-ext-cpu without that permission, "core" is the core's backend over gloo, and "gloo" is gloo's own collective. "ccl
read" and "ccl shm" are ds-ext-cpu's process group over its two transports.
The choices in `ds_ext_cpu/comm/` and `deepspeed/comm/transports.py` follow from this table. `collectives.md` keeps a
copy; run the benchmark again when torch changes.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import rank_processes

Call = Callable[[], object]


def measure(kibibytes: list[int], dtype_names: list[str], num_rounds: int) -> list[tuple[str, str, str, float]]:
    """Measure on every rank. Return rows of (collective, backend, size and dtype, median ms of the slowest rank)."""
    import torch
    import torch.distributed as torch_dist

    ways, groups = backends(), groups_of_ccl()
    rows = []
    for dtype_name in dtype_names:
        dtype = getattr(torch, dtype_name)
        for size in kibibytes:
            full_N = torch.ones((size << 10) // dtype.itemsize, dtype=dtype)
            num_calls = max(1, 1024 // size)  # ranks start a small call at different times
            full_N = full_N[: full_N.numel() // torch_dist.get_world_size() * torch_dist.get_world_size()]
            candidates = calls(full_N, ways, groups)
            times: dict[tuple[str, str], list[float]] = {key: [] for key in candidates}
            for number in range(num_rounds + 1):
                for key, call in candidates.items():  # A B A B: other load affects all alike
                    full_N.fill_(1)
                    torch_dist.barrier()
                    start = time.perf_counter()
                    for _ in range(num_calls):
                        call()
                    slowest = torch.tensor((time.perf_counter() - start) / num_calls)
                    torch_dist.all_reduce(slowest, op=torch_dist.ReduceOp.MAX)
                    if number:  # the first round warms up
                        times[key].append(slowest.item() * 1e3)
            rows += [(*key, f"{size:>6} KiB {dtype_name}", statistics.median(ms)) for key, ms in times.items()]
    return rows


def backends():  # type: ignore[no-untyped-def]
    """Return name -> connected backend of all ranks."""
    import torch.distributed as torch_dist
    from deepspeed.comm.torch_group import TorchGroup
    from ds_ext_cpu.comm import ReadingGroup

    world = torch_dist.group.WORLD
    assert world is not None
    made = {"core": TorchGroup(world)}
    for name, is_direct in (("direct", "1"), ("messages", "0")):
        os.environ["DS_COMM_DIRECT"] = is_direct
        made[name] = ReadingGroup(world)
        made[name].connect()
    return {name: backend for name, backend in made.items() if name != "direct" or backend.is_direct}


def groups_of_ccl():  # type: ignore[no-untyped-def]
    """Return name -> process group of all ranks; "ccl read" only if the kernel allows it."""
    import torch.distributed as torch_dist
    from ds_ext_cpu.comm import ccl

    ccl.register()
    groups = {}
    for name, wish in (("ccl read", ""), ("ccl shm", "shm")):
        os.environ["DS_CCL_TRANSPORT"] = wish
        groups[name] = torch_dist.new_group(backend="ccl")
    del os.environ["DS_CCL_TRANSPORT"]
    return {name: group for name, group in groups.items() if name == f"ccl {ccl.transport(group)}"}


def calls(full_N, ways, groups) -> dict[tuple[str, str], Call]:  # type: ignore[no-untyped-def]
    """Return (collective, backend) -> call to time, on this tensor."""
    import torch
    import torch.distributed as torch_dist
    from deepspeed.comm.transports import all_gather_into_tensor, reduce_scatter_tensor

    shard_S = torch.empty(full_N.numel() // torch_dist.get_world_size(), dtype=full_N.dtype)
    other_N = torch.empty_like(full_N)
    timed: dict[tuple[str, str], Call] = {}
    for name, group in {"gloo": None, **groups}.items():
        timed |= {
            ("all-reduce", name): lambda group=group: torch_dist.all_reduce(full_N, group=group),
            ("reduce-scatter", name): lambda group=group: reduce_scatter_tensor(shard_S, full_N, group=group),
            ("all-gather", name): lambda group=group: all_gather_into_tensor(full_N, shard_S, group=group),
            ("broadcast", name): lambda group=group: torch_dist.broadcast(full_N, 0, group=group),
            ("all-to-all", name): lambda group=group: torch_dist.all_to_all_single(other_N, full_N, group=group),
        }
    for name, way in ways.items():
        timed |= {
            ("all-reduce", name): lambda way=way: way.all_reduce(full_N).wait(),
            ("reduce-scatter", name): lambda way=way: way.reduce_scatter(shard_S, full_N).wait(),
            ("all-gather", name): lambda way=way: way.all_gather(full_N, shard_S).wait(),
            ("broadcast", name): lambda way=way: way.broadcast(full_N, 0).wait(),
            ("all-to-all", name): lambda way=way: way.all_to_all(other_N, full_N).wait(),
        }
    return timed


def main() -> None:
    """Print one table per collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--kib", type=int, nargs="+", default=[1, 64, 1024, 4096, 16384, 65536], help="sizes of the full tensor"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = rank_processes.run(args.ranks, measure, args.kib, args.dtypes, args.rounds)[0]
    columns = list(dict.fromkeys(row[2] for row in rows))
    for collective in dict.fromkeys(row[0] for row in rows):
        print(f"\n{collective}, {args.ranks} ranks, ms".ljust(44) + "".join(f"{column:>20}" for column in columns))
        for name in dict.fromkeys(row[1] for row in rows if row[0] == collective):
            cells = {row[2]: row[3] for row in rows if row[:2] == (collective, name)}
            print(f"  {name:<41}" + "".join(f"{cells[column]:>20.3f}" for column in columns))


if __name__ == "__main__":
    main()
