"""`TrialProfile` runs in the ranks of a trial: it measures some steps, writes a file, and ends the process.

`engine/observers.py` calls it for each phase. It is imported and created only if `autotuning` names an output file.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.config.training import AutotuningConfig
from deepspeed.errors import ConfigError

MODEL_INFO_PATH = "autotuning_model_info.json"


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically: a reader finds the old or the new content, even if this process is killed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def check_steps(config: AutotuningConfig) -> None:
    """Check the range of profiled steps.

    Raises:
        ConfigError: end_profile_step is before start_profile_step.
    """
    if config.end_profile_step < config.start_profile_step:
        raise ConfigError(
            f"autotuning.end_profile_step: found {config.end_profile_step}, which is before start_profile_step "
            f"({config.start_profile_step}); make it as large or larger"
        )


class TrialProfile:
    """Measures steps `start_profile_step` to `end_profile_step`, or collects model information in the first step.

    Steps count from 1 in this process, so that a job that resumes from a checkpoint is measured too. A time covers a
    whole step, from the end of the previous one, including data loading. The result is the mean on a device, and the
    median on a host.

    Args:
        config: the steps, and the output file.
        model: the trained model.
        facts: further values for the file; name -> value.
        is_whole: whether `model` has all parameters, not only those of a stage or tensor-parallel rank.
    """

    #: always None; `engine.flops_profiler` and the throughput timer read these
    profiler = None
    ideal_step_s: float | None = None

    def __init__(
        self,
        config: AutotuningConfig,
        model: torch.nn.Module,
        facts: Mapping[str, Any],
        *,
        is_whole: bool,
    ) -> None:
        check_steps(config)
        self._config = config
        self._model = model
        self._facts = facts
        self._is_whole = is_whole
        self._first, self._last = max(config.start_profile_step, 1), config.end_profile_step
        self._for_model = config.profiles_model_info
        self._counts_flops = config.metric.lower() == "flops" and not self._for_model
        self._steps = 0
        self._is_done = False
        self._began_s: float | None = None
        self._ends_s: list[float] = []
        self._flops = 0
        self._saved = _SavedTensors() if self._for_model else None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch a phase of a step. If step 1 is measured, the first phase starts the clock."""
        if self._began_s is None and self._steps == self._first - 1:
            self._begin()
        if self._saved is not None and name == "forward":
            with self._saved.watched():
                yield
        elif self._counts_flops and name in ("forward", "backward_inner") and self._steps == max(self._first - 2, 0):
            from deepspeed.profiling.flops import create_counter  # late: few trials use this metric

            with create_counter() as counter:
                yield
            self._flops += counter.get_total_flops()
        else:
            yield

    def step_ended(self, batch_size: int) -> None:
        """Note the end of a step. The last step ends the process.

        Args:
            batch_size: number of samples in the step, over all ranks.

        Raises:
            SystemExit: code 0, on every rank.
        """
        if self._is_done:  # the script has caught the exit; the file is already written
            sys.exit(0)
        self._steps += 1
        self._ends_s.append(time.perf_counter())
        if self._saved is not None:
            self._leave(self._config.model_info_path or MODEL_INFO_PATH, self._model_info)
        elif self._steps >= self._last:
            assert self._config.metric_path is not None
            self._leave(self._config.metric_path, lambda: self._metrics(batch_size))
        elif self._steps == self._first - 1:
            self._begin()

    def _begin(self) -> None:
        """Start the clock for the measured steps."""
        get_accelerator().synchronize()
        get_accelerator().reset_peak_memory_stats()
        self._began_s = time.perf_counter()

    def _leave(self, path: str, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the file on rank 0, and end every rank, after a barrier so that no rank loses a peer too early."""
        get_accelerator().synchronize()
        found = content()
        comm.barrier()
        if comm.get_rank() == 0:
            write_json(path, found)
        self._is_done = True
        sys.exit(0)

    def _metrics(self, batch_size: int) -> dict[str, Any]:
        assert self._began_s is not None
        ends = [self._began_s, *self._ends_s[self._first - 1 :]]
        if get_accelerator().is_synchronized_device():  # host cores are sometimes busy with other work
            seconds = statistics.median(end - start for start, end in itertools.pairwise(ends))
        else:
            seconds = (time.perf_counter() - self._began_s) / (self._last - self._first + 1)
        metrics = {
            "latency": seconds * 1e3,
            "throughput": batch_size / seconds,
            "steps": self._last - self._first + 1,
            "peak_memory": int(get_accelerator().max_memory_allocated()),
            "train_batch_size": batch_size,
            **self._facts,
        }
        if self._counts_flops:
            metrics["FLOPS_per_gpu"] = self._flops / seconds
        return metrics

    def _model_info(self) -> dict[str, Any]:
        assert self._saved is not None
        params = [(name, _numel(param), param.requires_grad) for name, param in self._model.named_parameters()]
        accelerator = get_accelerator()
        is_host = bool(accelerator.is_synchronized_device())
        if is_host:  # this rank's share of the free memory, plus its own allocated memory
            left = accelerator.available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            memory = left + accelerator.memory_allocated()
        else:
            memory = accelerator.total_memory()
        num_forwards = max(self._saved.num_forwards, 1)
        info = {
            "num_params": sum(numel for _, numel, _ in params),
            "trainable_num_params": sum(numel for _, numel, trains in params if trains),
            "activation_mem_per_gpu": self._saved.num_bytes // num_forwards,
            "world_size": comm.get_world_size(),
            "memory_per_gpu": int(memory),
            "is_host": is_host,
            **self._facts,
        }
        if self._is_whole:  # the planner divides the parameters itself
            info["parameters"] = params
        return info


class _SavedTensors:
    """`_SavedTensors` counts the bytes that forwards save for their backwards, without parameters."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_forwards = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count the tensors saved inside the block; memory that several operations save counts once."""
        seen: set[int] = set()

        def keep(tensor: Tensor) -> Tensor:
            if not (isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    self.num_bytes += storage.nbytes()
            return tensor

        self.num_forwards += 1
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield


def _numel(param: Tensor) -> int:
    return int(getattr(param, "ds_numel", param.numel()))
