"""`TrialProfile` is what a trial has in its ranks: it measures some steps, writes a file, and ends the process.

`engine/observers.py` tells it of each phase. Built, and imported, only where `autotuning` says where to write.
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
    """Write a file so that a reader finds its former content or the new one, whenever this process is killed."""
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
    """Refuse steps that end before they begin.

    Raises:
        ConfigError: names the key.
    """
    if config.end_profile_step < config.start_profile_step:
        raise ConfigError(
            f"autotuning.end_profile_step: found {config.end_profile_step}, which is before start_profile_step "
            f"({config.start_profile_step}); make it as large or larger"
        )


class TrialProfile:
    """Measures steps `start_profile_step` to `end_profile_step`, or the first one for what it says about the model.

    Steps count from 1 in this process, so that a job that goes on from a checkpoint is measured too. Times are of
    whole steps, from one end to the next: loading of data counts. On a device the figure is their mean, on a host their
    median.

    Args:
        config: which steps, and where to write.
        model: what is trained.
        facts: what the file is to say besides; name -> value.
        is_whole: whether `model` has all parameters, not those of a stage or of a tensor-parallel rank.
    """

    #: there is none; `engine.flops_profiler` and the throughput timer ask
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
        """Watch a phase of a step: the first one of all starts the clock where step 1 is measured already."""
        if self._began_s is None and self._steps == self._first - 1:
            self._begin()
        if self._saved is not None and name == "forward":
            with self._saved.watched():
                yield
        elif self._counts_flops and name in ("forward", "backward_inner") and self._steps == max(self._first - 2, 0):
            from deepspeed.profiling.flops import create_counter  # late: few trials are compared by operations

            with create_counter() as counter:
                yield
            self._flops += counter.get_total_flops()
        else:
            yield

    def step_ended(self, batch_size: int) -> None:
        """A step is over; the last one ends the process.

        Args:
            batch_size: samples of the step, over all ranks.

        Raises:
            SystemExit: code 0, on every rank.
        """
        if self._is_done:  # the script has caught the end; what is written stays
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
        """Start the clock of the steps to measure."""
        get_accelerator().synchronize()
        get_accelerator().reset_peak_memory_stats()
        self._began_s = time.perf_counter()

    def _leave(self, path: str, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the file on rank 0 and end every rank. None goes before its peers have what they wait for from it."""
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
        if get_accelerator().is_synchronized_device():  # whose cores do other things now and then
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
        if is_host:  # each rank's part of what is left, and what it has itself by now
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
        if self._is_whole:  # what the planner divides by itself
            info["parameters"] = params
        return info


class _SavedTensors:
    """`_SavedTensors` counts the bytes that forwards keep for their backwards, parameters aside."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_forwards = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what is saved inside; memory that several operations save counts once."""
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
