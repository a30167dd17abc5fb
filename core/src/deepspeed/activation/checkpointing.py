"""`deepspeed.checkpointing`: `configure()` once, then `checkpoint(block, *inputs)` in the model's forward.

    import deepspeed
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config)
    hidden = deepspeed.checkpointing.checkpoint(block, hidden, mask)

`torch.utils.checkpoint` does the work: it keeps the block's inputs, and the backward recomputes the block with the
random states of its forward, including named states (`rng.py`). Options determine where `Keeping` keeps the inputs of a
block until its backward: divided over tensor-parallel ranks, on the host, in a buffer.

`Keeping.pack` and `Keeping.unpack` are hooks for autograd's saved tensors. The options combine: a tensor is first
divided over the tensor-parallel ranks, then copied to the host, then copied into a slot.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.accelerator import get_accelerator
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
from deepspeed.errors import ConfigError, counted, whole_number
from deepspeed.log import report
from deepspeed.parallel.model_part import is_sharded
from deepspeed.parallel.running import RunningModel, running, running_model


@dataclass(frozen=True)
class Kept:
    """`Kept` holds a packed tensor.

    stored: the tensor, this rank's part of it as a flat tensor, or a slot.
    shape: the shape of the whole tensor; None: `stored` is the tensor itself.
    device: the device to unpack to.
    ranks: the ranks with the other parts; None: `stored` has all elements.
    version: the version of `stored` if it shares memory with the tensor; None: a copy, or changes are not counted.
    """

    stored: "torch.Tensor | Slot"
    shape: torch.Size | None
    device: torch.device
    ranks: GroupBackend | None = None
    version: int | None = None

    def check(self) -> None:
        """Raise `RuntimeError`, as autograd does, if the tensor was changed in place."""
        if self.version is not None and isinstance(self.stored, torch.Tensor) and self.stored._version != self.version:
            raise RuntimeError(
                f"activation checkpointing: an input of shape {tuple(self.shape or self.stored.shape)} of a block was "
                "changed in place between its forward and its backward, which computes the block again from it: it has "
                f"version {self.stored._version}, and had {self.version}; change a clone of it"
            )


class Slot:
    """A part of a buffer; free again when nothing refers to it."""

    def __init__(self, pool: "_Pool", number: int) -> None:
        self._pool, self._number = pool, number

    def __del__(self) -> None:
        self._pool.free.append(self._number)

    @property
    def tensor(self) -> torch.Tensor:
        """The slot's memory, flat."""
        return self._pool.buffer[self._number]


class _Pool:
    """One buffer of equal slots."""

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        self.buffer = torch.empty(num_slots, like.numel(), dtype=like.dtype, device=like.device)
        self.free = list(range(num_slots))[::-1]


@dataclass
class Keeping:
    """`Keeping` holds the options, and the buffers that they need.

    Args:
        partition: keep 1 / W of each tensor on each of the W tensor-parallel ranks, if their tensors are equal; the
            backward gathers the whole.
        on_host: keep tensors of a device in page-locked host memory.
        num_slots: number of inputs of each size that a buffer holds; None: no buffers, each tensor has its own memory.
        ranks: returns the tensor-parallel ranks of the running model; None if their activations differ now, so each
            rank keeps its own.
    """

    partition: bool = False
    on_host: bool = False
    num_slots: int | None = None
    ranks: Callable[[], GroupBackend | None] | None = None
    _pools: dict[tuple[int, torch.dtype, torch.device], _Pool] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether tensors are kept unchanged."""
        return not (self.partition or self.on_host or self.num_slots)

    def reset(self) -> None:
        """Drop the buffers. Slots that are in use keep their buffer alive until their backward."""
        self._pools = {}

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Pack a tensor. Parameters and tensors that are not floating-point are kept unchanged.

        Raises:
            ValueError: if all slots are in use.
        """
        if self.is_plain or isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return Kept(tensor, None, tensor.device, version=_version(tensor))
        flat = tensor.detach().reshape(-1)
        ranks = self.ranks() if self.partition and self.ranks is not None else None
        if ranks is not None:
            flat = _own_part(flat, ranks)
        if self.on_host and flat.device.type != "cpu":
            flat = get_accelerator().pin_memory(torch.empty(flat.shape, dtype=flat.dtype)).copy_(flat)
        stored: torch.Tensor | Slot = flat
        if self.num_slots is not None:
            stored = self._slot(flat)
        elif ranks is not None and _memory(flat) == _memory(tensor):
            stored = flat.clone()  # otherwise the part would keep the whole tensor in memory
        is_shared = isinstance(stored, torch.Tensor) and _memory(stored) == _memory(tensor)
        return Kept(stored, tensor.shape, tensor.device, ranks, _version(tensor) if is_shared else None)

    def unpack(self, kept: Kept) -> torch.Tensor:
        """Unpack a tensor. With `partition`, a collective: tensor-parallel ranks recompute the same blocks."""
        kept.check()
        stored = kept.stored
        if kept.shape is None:
            assert isinstance(stored, torch.Tensor)
            return stored
        flat = stored.tensor.clone() if isinstance(stored, Slot) else stored
        flat = flat.to(kept.device, non_blocking=True)
        if kept.ranks is not None:
            flat = _whole(flat, kept.ranks)[: kept.shape.numel()]
        return flat.view(kept.shape)

    def _slot(self, flat: torch.Tensor) -> Slot:
        assert self.num_slots is not None
        key = (flat.numel(), flat.dtype, flat.device)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self.num_slots, flat)
        if not pool.free:
            raise ValueError(
                f"activation checkpointing: number_checkpoints is {self.num_slots}, and one more input of "
                f"{counted(flat.numel(), 'element')} is to be kept; give the number of checkpoints between a forward "
                "and its backward, or call deepspeed.checkpointing.reset() after forwards without a backward"
            )
        slot = Slot(pool, pool.free.pop())
        slot.tensor.copy_(flat)
        return slot


def _version(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor; None for an inference tensor, which has none, and for a sharded
    parameter, since gathering and releasing its values changes the counter."""
    return None if tensor.is_inference() or is_sharded(tensor) else tensor._version


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_part(flat: torch.Tensor, ranks: GroupBackend) -> torch.Tensor:
    size = math.ceil(flat.numel() / ranks.world_size)
    start = min(ranks.rank * size, flat.numel())
    own = flat[start : start + size]
    return torch.nn.functional.pad(own, (0, size - own.numel())) if own.numel() < size else own


def _whole(part: torch.Tensor, ranks: GroupBackend) -> torch.Tensor:
    whole = ranks.allocate(part.numel() * ranks.world_size, part.dtype, part.device)
    ranks.all_gather(whole, part, tag="activations").wait()
    return whole


# the documented names, for every device
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
    """Configure how inputs are kept. Arguments override the config's section `activation_checkpointing`.

    Args:
        mpu_: Megatron's model parallel unit; `partition_activations` and the seeds of `model_parallel_cuda_manual_seed`
            use its tensor-parallel ranks. None: use the ranks of the running model, or of `deepspeed.utils.groups`.
        deepspeed_config: the engine's configuration: path, dict, JSON, or a `DeepSpeedConfig`.
        partition_activations: keep a part of each input on each tensor-parallel rank, and gather it in the backward; if
            the ranks have different inputs, as between blocks with `tensor_parallel.sequence_parallel`, each rank keeps
            its own.
        contiguous_checkpointing: keep inputs in one buffer per size, allocated at the first use.
        num_checkpoints: inputs per buffer, the number of checkpoints between a forward and its backward.
        checkpoint_in_cpu: keep inputs in host memory.
        synchronize: wait for the device before and after each block.
        profile: log the time of each block's forward and of its recomputation.

    Raises:
        ConfigError: for `contiguous_checkpointing` without `num_checkpoints`, or an invalid `num_checkpoints`.
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
    """Drop the buffers of `contiguous_checkpointing`. Call it after forwards without a backward, which fill slots."""
    if _settings is not None:
        _settings.keeping.reset()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; the backward recomputes the function instead of keeping its activations.

    Works without `configure`, too. The non-reentrant form is used, so gradients reach parameters even if no input
    requires a gradient. `configure` applies to tensors in `args`; tensors in `kwargs` are kept unchanged.
    """
    return _checkpoint(function, args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint`; this name explicitly requests the non-reentrant form."""
    return checkpoint(function, *args)


@absent_members("runtime.activation_checkpointing.checkpointing:CheckpointFunction")
class CheckpointFunction:
    """The reentrant form, called like an autograd function; its backward runs a nested backward.

    It needs an input that requires a gradient, and does not support `torch.autograd.grad`; `checkpoint` has neither
    limit.
    """

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Return `run_function(*args)`, recomputed in the backward; its outputs are also appended to `all_outputs`."""
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
    with hooks:  # autograd calls the hooks for the inputs only; torch saves no activations of the block
        return torch.utils.checkpoint.checkpoint(function, *args, **options)


class _Block:
    """Wrap a function that is called in the forward, then again in the backward, with the random states of the forward
    and as a part of the same running model. Synchronizes the device and logs times according to the settings."""

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
        finally:  # torch stops a recomputation with an exception once it has everything that the backward needs
            if self._settings.synchronize:
                get_accelerator().synchronize()
            if self._settings.profile:
                name = getattr(self._function, "__qualname__", type(self._function).__name__)
                milliseconds = (time.perf_counter() - start_s) * 1e3
                report(f"activation checkpointing: {what} of {name} in {milliseconds:.3f} ms")


def _tensor_parallel(mpu: Any) -> GroupBackend | None:
    """Return the backend of the tensor-parallel ranks; None if their activations differ."""
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
