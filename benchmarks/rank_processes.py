"""Start the ranks of a benchmark: spawned processes over gloo, one core and one thread each, or one device each."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run(world_size: int, work: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """Call `work(*args)` on `world_size` fresh ranks and return their results by rank.

    `device`: a device type of torch; ranks get one device each, and the library that torch has for it.
    The first rank that fails ends all of them; its traceback is raised here as a RuntimeError.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, world_size, f"{folder}/store", device, (work, *args)),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.terminate()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, value = pipes[rank].recv()
            except EOFError:
                failed, value = True, "it died without a word (killed?)"
            if failed:
                raise RuntimeError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(pipe: Connection, rank: int, world_size: int, store: str, device: str, call: tuple[Any, ...]) -> None:
    work, *args = call
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        library = "gloo"
        if device != "cpu":
            torch.accelerator.set_device_index(rank)
            library = dist.get_default_backend_for_device(device)
        dist.init_process_group(library, init_method=f"file://{store}", rank=rank, world_size=world_size)
        pipe.send((False, work(*args)))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, it is raised again in the parent
        pipe.send((True, traceback.format_exc()))
