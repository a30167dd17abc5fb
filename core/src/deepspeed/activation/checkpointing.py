"""`deepspeed.checkpointing`: `configure()` once, then `checkpoint(block, *inputs)` in the model's forward.

    import deepspeed
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config)
    hidden = deepspeed.checkpointing.checkpoint(block, hidden, mask)

`torch.utils.checkpoint` does the work: the block's inputs are kept, and the backward computes the block again under
the random states that its forward had, named ones included (`rng.py`). Options say where inputs are kept
(`keeping.py`).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

import deepspeed.comm as dist
from deepspeed._absent_members import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.activation.keeping import Keeping
from deepspeed.activation.rng import (
    RandomStates,
    RNGStatesTracker,
    get_rng_tracker,
    model_parallel_manual_seed,
    model_parallel_reconfigure_tp_seed,  # noqa: F401 - documented here
    restored,
    use_rank,
)
from deepspeed.comm.backend import GroupBackend
from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError, whole_number
from deepspeed.log import report
from deepspeed.parallel.running import RunningModel, running, running_model

# the documented names, whatever the device
CudaRNGStatesTracker = RNGStatesTracker
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed

# argument of configure() -> key of the section `activation_checkpointing`
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
_AXES_OF_MPU = ("tensor_model_parallel", "model_parallel", "slice_parallel")
_GROUPS_OF_MPU = tuple(f"get_{axis}_group" for axis in _AXES_OF_MPU)


@dataclass(frozen=True)
class _Settings:
    keeping: Keeping = field(default_factory=Keeping)
    synchronize: bool = False
    profile: bool = False


_settings: _Settings | None = None
_unconfigured = _Settings()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how inputs are kept. Arguments beat the config's section `activation_checkpointing`.

    Args:
        mpu_: Megatron's model parallel unit, whose tensor-parallel ranks `partition_activations` and the seeds of
            `model_parallel_cuda_manual_seed` use; None: those of the engine whose forward runs.
        deepspeed_config: the engine's configuration: path, dict, JSON, or a `DeepSpeedConfig`.
        partition_activations: keep a part of each input on each tensor-parallel rank, and gather it in the backward;
            where the ranks have different inputs, as between blocks with `tensor_parallel.sequence_parallel`, each
            keeps its own.
        contiguous_checkpointing: keep inputs in one buffer per size, made at the first use.
        num_checkpoints: inputs of a size that a buffer holds: checkpoints between a forward and its backward.
        checkpoint_in_cpu: keep inputs in host memory.
        synchronize: wait for the device before and after each block.
        profile: log the time of each block's forward and of its recomputation.

    Raises:
        ConfigError: for `contiguous_checkpointing` without `num_checkpoints`, and one that is no such number.
    """
    global _settings
    section = _section(deepspeed_config)
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    found = {
        argument: getattr(section, key, None) if asked[argument] is None else asked[argument]
        for argument, key in _KEYS.items()
    }
    if found["num_checkpoints"] is not None:
        whole_number("deepspeed.checkpointing.configure: num_checkpoints", found["num_checkpoints"], least=0)
    if found["contiguous_checkpointing"] and not found["num_checkpoints"]:
        raise ConfigError(
            "deepspeed.checkpointing.configure: contiguous_checkpointing (activation_checkpointing."
            "contiguous_memory_optimization) is true without num_checkpoints (number_checkpoints); give the number of "
            "checkpoints between a forward and its backward"
        )
    keeping = Keeping(
        partition=bool(found["partition_activations"]),
        on_host=bool(found["checkpoint_in_cpu"]),
        num_slots=found["num_checkpoints"] if found["contiguous_checkpointing"] else None,
        ranks=lambda: _tensor_parallel(mpu_),
    )
    use_rank(next((each for axis in _AXES_OF_MPU if (each := getattr(mpu_, f"get_{axis}_rank", None))), None))
    _settings = _Settings(keeping, synchronize=bool(found["synchronize"]), profile=bool(found["profile"]))


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _settings is not None


def reset() -> None:
    """Drop the buffers of `contiguous_checkpointing`. Call it after forwards without a backward, which fill them."""
    if _settings is not None:
        _settings.keeping.reset()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, computed again in the backward instead of keeping what it computed.

    Works without `configure` too. Gradients also reach parameters when no input requires a gradient, which is why the
    non-reentrant form is used. Tensors among `args` are kept as `configure` says; those in `kwargs` stay as they are.
    """
    return _checkpoint(function, args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint` under the name by which the form without re-entry is asked for."""
    return checkpoint(function, *args)


@absent_members("runtime.activation_checkpointing.checkpointing:CheckpointFunction")
class CheckpointFunction:
    """The re-entrant form, as autograd functions are called: its backward runs a backward of its own.

    It needs an input that requires a gradient, and `torch.autograd.grad` does not go through it; `checkpoint` has
    neither limit.
    """

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """`run_function(*args)`, computed again in the backward; its outputs are also added to `all_outputs`."""
        outputs = _checkpoint(run_function, args, use_reentrant=True)
        all_outputs += outputs if isinstance(outputs, tuple | list) else [outputs]
        return outputs


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    settings = _unconfigured if _settings is None else _settings
    keeping = settings.keeping
    hooks: AbstractContextManager[Any] = nullcontext()
    if not keeping.is_plain:
        hooks = torch.autograd.graph.saved_tensors_hooks(keeping.pack, keeping.unpack)
    states = RandomStates.now()
    if states or settings.synchronize or settings.profile or keeping.partition:
        function = _Block(function, settings, states, running_model().in_backward())
    with hooks:  # autograd asks them about the inputs; of what the block computes torch keeps nothing
        return torch.utils.checkpoint.checkpoint(function, *args, **options)


class _Block:
    """A function that is called once in the forward and then in the backward: there with the random states of the
    forward, and as a part of the same model. Waits for the device and logs times as the settings say."""

    def __init__(
        self, function: Callable[..., Any], settings: _Settings, states: RandomStates, model: RunningModel
    ) -> None:
        self._function, self._settings, self._states, self._model = function, settings, states, model
        self._is_forward = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        what = "forward" if self._is_forward else "recomputation"
        with ExitStack() as scope:
            if not self._is_forward:
                scope.enter_context(restored(self._states))
                scope.enter_context(running(self._model))
            self._is_forward = False
            return self._run(what, *args, **kwargs)

    def _run(self, what: str, *args: Any, **kwargs: Any) -> Any:
        if self._settings.synchronize:
            get_accelerator().synchronize()
        start_s = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:  # a recomputation is stopped by an exception when it has all that the backward needs
            if self._settings.synchronize:
                get_accelerator().synchronize()
            if self._settings.profile:
                name = getattr(self._function, "__qualname__", type(self._function).__name__)
                milliseconds = (time.perf_counter() - start_s) * 1e3
                report(f"activation checkpointing: {what} of {name} in {milliseconds:.3f} ms")


def _tensor_parallel(mpu: Any) -> GroupBackend | None:
    """The collectives of the tensor-parallel ranks; None where they have different activations."""
    model = running_model()
    if model.activations_differ():
        return None
    if mpu is None:
        return dist.group_backend(model.tensor_group())
    for name in _GROUPS_OF_MPU:
        if hasattr(mpu, name):
            return dist.group_backend(getattr(mpu, name)())
    raise ConfigError(
        f"deepspeed.checkpointing.configure: mpu_ is {type(mpu).__name__}, which has none of "
        f"{', '.join(_GROUPS_OF_MPU)}; partition_activations needs one"
    )


def _section(config: Any) -> Any:
    if config is None:
        return None
    if not isinstance(config, DeepSpeedConfig):
        config = DeepSpeedConfig(read_config(config), batch_required=False)
    return config.activation_checkpointing
