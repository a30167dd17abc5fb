"""What should carry ZeRO's collectives between ranks on host memory? Both ways of ds-ext-cpu beside gloo's.

    python benchmarks/collectives.py --ranks 2            # one core per rank, median of interleaved rounds

Reads as: milliseconds for one full tensor. "direct" is what `ds_ext_cpu.comm` does where ranks may read each other's
memory; elsewhere it takes messages or a collective of gloo, whichever is the quicker here. "pieces" are even and in
rank order; "one owner" is a bucket that belongs to the last rank altogether.
The choices in `ds_ext_cpu/comm/` and `deepspeed/comm/transports.py` follow from this table, of which `collectives.md`
keeps a copy; run it again when torch changes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import rank_processes

Exchange = Callable[[], None]


def measure(mebibytes: list[int], dtype_names: list[str], num_rounds: int) -> list[tuple[str, str, int, float]]:
    """On every rank: rows of (group, primitive, MiB and dtype, median ms of the slowest rank)."""
    import torch
    import torch.distributed as torch_dist

    rows = []
    for dtype_name in dtype_names:
        dtype = getattr(torch, dtype_name)
        for size in mebibytes:
            flat = torch.ones((size << 20) // dtype.itemsize, dtype=dtype)
            candidates = exchanges(flat)
            times: dict[tuple[str, str], list[float]] = {key: [] for key in candidates}
            for number in range(num_rounds + 1):
                for key, exchange in candidates.items():  # A B A B: what else runs here hits all alike
                    flat.fill_(1)
                    torch_dist.barrier()
                    start = time.perf_counter()
                    exchange()
                    slowest = torch.tensor(time.perf_counter() - start)
                    torch_dist.all_reduce(slowest, op=torch_dist.ReduceOp.MAX)
                    if number:  # the first round warms up
                        times[key].append(slowest.item() * 1e3)
            rows += [(*key, f"{size:>3} MiB {dtype_name}", statistics.median(ms)) for key, ms in times.items()]
    return rows


def exchanges(flat) -> dict[tuple[str, str], Exchange]:  # type: ignore[no-untyped-def]
    """(group, primitive) -> what to time, over this buffer."""
    import torch
    import torch.distributed as torch_dist
    from deepspeed.comm.backend import Piece
    from deepspeed.comm.pieces import even_pieces
    from deepspeed.comm.staging import StagingPool
    from deepspeed.comm.transports import all_gather_into_tensor, reduce_scatter_tensor
    from ds_ext_cpu.comm.direct import connect
    from ds_ext_cpu.comm.messages import MessageQueue

    group, staging = torch_dist.group.WORLD, StagingPool(16 << 20)
    assert group is not None
    direct, messages = connect(group, staging), MessageQueue(group, staging)
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    cut = even_pieces(flat.numel(), world_size)
    one = [Piece(0, flat.numel(), world_size - 1)]
    own = flat[cut[rank].start : cut[rank].stop]
    other = torch.empty_like(flat)

    def wait_each(start: Callable[[Piece], object], pieces: list[Piece]) -> None:
        for work in [start(piece) for piece in pieces]:
            work.wait()  # type: ignore[attr-defined]

    def all_to_all_and_sum() -> None:
        torch_dist.all_to_all_single(other, flat)
        torch.sum(other.view(world_size, -1), 0, out=own)

    def reduce_each(pieces: list[Piece]) -> None:
        wait_each(lambda p: torch_dist.reduce(flat[p.start : p.stop], p.owner, async_op=True), pieces)

    def broadcast_each(pieces: list[Piece]) -> None:
        wait_each(lambda p: torch_dist.broadcast(flat[p.start : p.stop], p.owner, async_op=True), pieces)

    ways = {"messages": messages} | ({"direct": direct} if direct else {})
    ours: dict[tuple[str, str], Exchange] = {}
    for name, way in ways.items():
        ours |= {
            ("reduce", name): lambda way=way: way.reduce(flat).wait(),
            ("to owners, pieces", name): lambda way=way: way.reduce_to_owners(flat, cut).wait(),
            ("to owners, one owner", name): lambda way=way: way.reduce_to_owners(flat, one).wait(),
            ("from owners, pieces", name): lambda way=way: way.gather_from_owners(flat, cut).wait(),
            ("from owners, one owner", name): lambda way=way: way.gather_from_owners(flat, one).wait(),
        }
    return ours | {
        ("reduce", "all_reduce"): lambda: torch_dist.all_reduce(flat),
        ("to owners, pieces", "reduce each"): lambda: reduce_each(cut),
        ("to owners, pieces", "all_to_all + sum"): all_to_all_and_sum,
        ("to owners, pieces", "reduce_scatter"): lambda: reduce_scatter_tensor(other[: own.numel()], flat) and None,
        ("to owners, one owner", "reduce each"): lambda: reduce_each(one),
        ("from owners, pieces", "broadcast each"): lambda: broadcast_each(cut),
        ("from owners, pieces", "all_gather"): lambda: all_gather_into_tensor(other, own) and None,
        ("from owners, one owner", "broadcast each"): lambda: broadcast_each(one),
    }


def main() -> None:
    """Print one table per exchange."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64], help="sizes of the full tensor")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = rank_processes.run(args.ranks, measure, args.mib, args.dtypes, args.rounds)[0]
    columns = list(dict.fromkeys(row[2] for row in rows))
    for group in dict.fromkeys(row[0] for row in rows):
        print(f"\n{group}, {args.ranks} ranks, ms".ljust(44) + "".join(f"{column:>17}" for column in columns))
        for primitive in dict.fromkeys(row[1] for row in rows if row[0] == group):
            cells = {row[2]: row[3] for row in rows if row[:2] == (group, primitive)}
            print(f"  {primitive:<41}" + "".join(f"{cells[column]:>17.2f}" for column in columns))


if __name__ == "__main__":
    main()
