"""`trace(folder)`: records host and device activity of each rank in files for Perfetto, with named phases of each step.

    with deepspeed.profiling.trace("traces", skip_steps=3, num_steps=2):
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()

`mark_phases()` names the phases for a vendor's own profiler (Nsight Systems, VTune, msprof) through the ranges of the
accelerator. Before one of the two is called, this module is not imported and a step has no overhead.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.log import own_rank, warn_once
from deepspeed.profiling.breakdown import name_phases

_PREFIX = "deepspeed."


@contextmanager
def trace(
    folder: str | os.PathLike[str],
    *,
    ranks: Sequence[int] | None = None,
    skip_steps: int = 0,
    num_steps: int | None = None,
    memory: bool = False,
    shapes: bool = False,
    stacks: bool = False,
) -> Iterator[torch.profiler.profile | None]:
    """Record a trace with `torch.profiler` while the context is open. A step is an `engine.step()` that updates.

    Each rank writes `rank<r>.pt.trace.json.gz` after its last step or at the end of the context, even after an
    exception. The file is for https://ui.perfetto.dev and TensorBoard's profiler. The phases of every engine of this
    process (`forward`, `backward`, `backward_inner`, `backward_allreduce`, `step`) are ranges `deepspeed.<phase>`.

    Args:
        folder: created if necessary; this rank's file of an earlier trace is removed first.
        ranks: global ranks that record; None: all. On other ranks the context does nothing and yields None.
        skip_steps: number of steps before the recording begins.
        num_steps: number of steps to record; None: until the context ends.
        memory: record each allocation and release, which Perfetto shows as counters. If torch has an allocator history
            for the device, also write the snapshot `rank<r>.memory.pickle` for https://pytorch.org/memory_viz.
        shapes: record the shapes of operators' inputs.
        stacks: record the Python stack of each operator; slow, with a large file.

    Raises:
        ConfigError: `skip_steps` is negative, or `num_steps` is below 1.
        OSError: the folder cannot be written; raised before the recording.
        StateError: a trace of this process is open.
    """
    if skip_steps < 0 or (num_steps is not None and num_steps < 1):
        raise ConfigError(
            f"trace: found skip_steps={skip_steps} and num_steps={num_steps}; "
            "give skip_steps of 0 or more, and num_steps of 1 or more, or None"
        )
    rank = own_rank()
    if ranks is not None and rank not in ranks:
        yield None
        return
    path = Path(folder) / f"rank{rank}.pt.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):  # fail now, not after the steps, if the folder cannot be written
        path.unlink(missing_ok=True)
    written: list[Path] = []

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(path))
        written.append(path)

    last = None if num_steps is None else skip_steps + num_steps - 1

    def action(step: int) -> ProfilerAction:
        if step < skip_steps:
            return ProfilerAction.WARMUP if step == skip_steps - 1 else ProfilerAction.NONE
        if last is None or step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.NONE

    profile = torch.profiler.profile(
        schedule=action,
        on_trace_ready=write,
        profile_memory=memory,
        record_shapes=shapes,
        with_stack=stacks,
    )
    with name_phases(_profiler_range, profile.step), _allocator_history(path, is_wanted=memory), profile:
        yield profile
    if not written:
        warn_once(
            f"trace: no step was recorded, for skip_steps is {skip_steps} and the context ended before; give less",
            (-1,),
        )


@contextmanager
def mark_phases() -> Iterator[None]:
    """Open the accelerator's range `deepspeed.<phase>` around each phase of every engine of this process.

    Raises:
        StateError: a trace of this process is open.
    """
    with name_phases(_accelerator_range, None):
        yield


def _profiler_range(phase: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(_PREFIX + phase)


@contextmanager
def _accelerator_range(phase: str) -> Iterator[None]:
    accelerator = get_accelerator()
    accelerator.range_push(_PREFIX + phase)
    try:
        yield
    finally:
        accelerator.range_pop()


@contextmanager
def _allocator_history(path: Path, *, is_wanted: bool) -> Iterator[None]:
    """Record the history of the device's allocator, if torch supports it, and write it next to `path` at the end."""
    module: Any = getattr(get_accelerator()._module(), "memory", None) if is_wanted else None
    if not hasattr(module, "_record_memory_history") or not get_accelerator().is_available():
        yield
        return
    module._record_memory_history()
    try:
        yield
    finally:  # even after an exception, because a failed allocation is what users look for
        module._dump_snapshot(str(path.with_name(f"{path.name.partition('.')[0]}.memory.pickle")))
        module._record_memory_history(enabled=None)
