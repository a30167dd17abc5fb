"""Start the ranks of a benchmark: spawned processes with gloo and one core each, or with a device each."""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run(world_size: int, work: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """Call `work(*args)` on `world_size` fresh ranks and return their results by rank.

    `device`: a device type of torch. Each rank gets one device, and torch's default backend for it.
    The first rank that fails ends all ranks; its traceback is raised here as a RuntimeError.
    """
    with Ranks(world_size, device=device) as ranks:
        return ranks.call(work, *args)


class Ranks:
    """Fresh ranks that wait for calls. The object that a rank creates in `keep` is the first argument of later calls.

    Compared variants use separate ranks: a variant may change its process permanently (allocator settings, threads),
    which would slow a peer in the same process. Waiting ranks block on a pipe and use no CPU.

    Args:
        world_size: number of ranks.
        device: see `run`.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._cleanup = contextlib.ExitStack()
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory())
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, f"{folder}/store", device)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def keep(self, make: Callable[..., Any], *args: Any) -> None:
        """Create `make(*args)` on each rank, and keep it there."""
        self._ask((True, make, args))

    def call(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `work(*args)`, or `work(kept, *args)` after `keep`, on each rank. Return the results by rank."""
        return self._ask((False, work, args))

    def _ask(self, request: tuple[bool, Callable[..., Any], tuple[Any, ...]]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(request)
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            for pipe in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results]):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = self._pipes[rank].recv()
                except EOFError:
                    failed, value = True, "it died without a word (killed?)"
                if failed:
                    raise RuntimeError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank may have died
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
                process.join()  # so that its CPU time is counted
        self._cleanup.close()


def _rank_main(pipe: Connection, rank: int, world_size: int, store: str, device: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    threads = 1
    if device == "cpu":
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    else:
        threads = max(1, len(cores) // world_size)  # for host work beside the device
    os.environ.update(OMP_NUM_THREADS=str(threads), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        library, bound = "gloo", None
        if device != "cpu":
            torch.accelerator.set_device_index(rank)
            library, bound = dist.get_default_backend_for_device(device), torch.device(device, rank)
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
        dist.init_process_group(library, device_id=bound, **where)  # type: ignore[arg-type]
        kept: tuple[Any, ...] = ()
        while (request := pipe.recv()) is not None:
            keeps, work, args = request
            if keeps:
                kept = (work(*args),)
            pipe.send((False, None if keeps else work(*kept, *args)))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - raised again in the parent
        pipe.send((True, traceback.format_exc()))
