"""`InferenceEngine`: a model in evaluation mode, on this rank's device, called as the model itself."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.engine.wrapper import ModuleWrapper
from deepspeed.errors import ConfigError, StateError
from deepspeed.inference.export import export
from deepspeed.inference.generate import StaticGeneration
from deepspeed.inference.graphs import graphed
from deepspeed.tensor_parallel.layers import widened
from deepspeed.tensor_parallel.ranks import same_random_numbers
from deepspeed.zero.optimizer import not_copied


@absent_members("inference.engine:InferenceEngine")
class InferenceEngine(ModuleWrapper):
    """The engine that `deepspeed.init_inference` returns calls the model. Attributes that it lacks are looked up in the
    module, so that pipelines of transformers take the engine for the model.

    Args:
        module: in evaluation mode, on its device.
        config: what `init_inference` was given.
        group: of the ranks over which the module is divided; None: it is whole.
        dtype: of its weights.
    """

    def __init__(
        self, module: nn.Module, config: DeepSpeedInferenceConfig, *, group: ProcessGroup | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module = module
        self._graphs = graphed(module) if config.wants_graphs else None
        self.mp_world_size = 1 if group is None else torch.distributed.get_world_size(group)
        self.mp_group = group
        self._config = config
        self._dtype = dtype
        self._times: _ForwardTimes | None = None
        self.eval()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.mp_group is not None:
            raise not_copied(self, "call engine.export(folder), which writes the whole weights")
        return super().__reduce_ex__(protocol)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weights have, or had before they were packed."""
        return self._dtype

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module without gradients. Ranks that share a model give the same inputs, and get the same
        outputs. Where graphs are asked for it is replayed; see `graphs.GraphedForward`, also
        for what that raises."""
        if self._graphs is None:
            return self.module(*inputs, **kwargs)
        with nullcontext() if self._times is None else self._times.measured():
            return self._graphs(*inputs, **kwargs)

    @torch.no_grad()
    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` without gradients. Ranks that share a model give the same inputs, and sample the
        same tokens.

        Raises:
            ConfigError: the module does not generate.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise ConfigError(
                f"generate: {type(self.module).__name__} has none; give init_inference a model of transformers that "
                "generates, or call the engine itself"
            )
        with same_random_numbers(self.mp_group):
            return generate(*inputs, **kwargs)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model as plain transformers into a folder: whole weights in this engine's type, and its
        configuration. `from_pretrained(path)` reads it, as do libraries made for serving. A collective of all ranks.

        Weights in few bits are written as the numbers that they stand for, in the type that the model has; every rank
        holds those of its part meanwhile.

        Raises:
            ConfigError: see `export.export`; also where the output layer is in few bits, and the model's configuration
                ties its weight to the embedding, which is not.
            CheckpointError: another rank failed; names it and its reason.
        """
        get_head: Any = getattr(self.module, "get_output_embeddings", None)
        config: Any = getattr(self.module, "config", None)
        head = None if get_head is None else get_head()
        if getattr(head, "packed", None) is not None and getattr(config, "tie_word_embeddings", False):
            raise ConfigError(
                "export: found an output layer in few bits, whose weight the model shares with its embedding; a file "
                "has one of them: leave quant.weight.output_num_bits out"
            )
        with widened(self.module, self._dtype):
            export(self.module, self.mp_group, Path(path))

    def profile_model_time(self, *_: Any, **__: Any) -> None:
        """Measure each forward from now on, also those of `generate`; see `model_times`. The choice of a clock that
        DeepSpeed documents is accepted: here the host's is read when the device has finished, on every device. With
        graphs the engine's own forwards are measured, not those inside of `generate`."""
        if self._times is not None:
            return
        self._times = _ForwardTimes()
        if self._graphs is not None:  # a hook would wait for the device while a graph is captured
            return
        self.module.register_forward_pre_hook(self._times.begin)
        self.module.register_forward_hook(self._times.end)
        if isinstance(own := vars(self.module).get("generate"), StaticGeneration):
            own.around_token = self._times.measured

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward since the last `model_times`, or since `profile_model_time`.

        Raises:
            StateError: `profile_model_time` was not called.
        """
        if self._times is None:
            raise StateError("model_times: nothing is measured; call profile_model_time() first")
        return self._times.take()


class _ForwardTimes:
    """Milliseconds from begin to end of each forward. As hooks its methods change nothing (see `block.num_hooks`)."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []
        self._start_s = 0.0

    def begin(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._start_s = time.perf_counter()

    def end(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._times_ms.append(1e3 * (time.perf_counter() - self._start_s))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what runs inside, which stands in the place of a forward."""
        self.begin()
        yield
        self.end()

    def take(self) -> list[float]:
        """Return the milliseconds of each forward since the last call."""
        times, self._times_ms = self._times_ms, []
        return times


complete(__name__)
