"""`deepspeed.checkpointing`: `configure()` once, then `checkpoint(block, *inputs)` in the model's forward.

    import deepspeed
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config)
    hidden = deepspeed.checkpointing.checkpoint(block, hidden, mask)

`torch.utils.checkpoint` does the work: the block's inputs are kept, and the backward computes the block again under
the random state that its forward had. Options that change where inputs are kept (partitioned over model-parallel
ranks, in host memory, in one buffer) are refused: they are not in this version.
"""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once

_is_configured = False

# argument of configure() -> key of the section `activation_checkpointing`
_REFUSED = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
}
_WITHOUT_EFFECT = {"synchronize": "synchronize_checkpoint_boundary", "profile": "profile"}


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
        mpu_: Megatron's model parallel unit; only `partition_activations` would use it.
        deepspeed_config: the engine's configuration: path, dict, JSON, or a `DeepSpeedConfig`.
        num_checkpoints: checkpoints in the contiguous buffer; without that buffer it says nothing.
        synchronize: accepted with a warning; nothing waits at the boundaries.
        profile: accepted with a warning; nothing is logged.

    Raises:
        ConfigError: for `partition_activations`, `contiguous_checkpointing` and `checkpoint_in_cpu`.
    """
    global _is_configured
    section = _section(deepspeed_config)
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    for argument, key in {**_REFUSED, **_WITHOUT_EFFECT}.items():
        value = asked[argument]
        if value is None:
            value = section is not None and getattr(section, key)
        if not value:
            continue
        where = f"deepspeed.checkpointing.configure: {argument} (activation_checkpointing.{key}): found {value!r}"
        if argument in _REFUSED:
            raise ConfigError(f"{where}, which is not in this version; leave it out, and inputs stay where they are")
        warn_once(f"{where}, ignored: it has no effect in this version")
    _is_configured = True


def is_configured() -> bool:
    """Whether `configure` was called since the start or since `reset`."""
    return _is_configured


def reset() -> None:
    """Forget `configure`; tests and programs that build several models call it."""
    global _is_configured
    _is_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, computed again in the backward instead of keeping what it computed.

    Works without `configure` too. Gradients also reach parameters when no input requires a gradient, which is why the
    non-reentrant form is used.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint` under the name by which the form without re-entry is asked for."""
    return checkpoint(function, *args)


def _section(config: Any) -> Any:
    if config is None:
        return None
    if not isinstance(config, DeepSpeedConfig):
        config = DeepSpeedConfig(read_config(config), batch_required=False)
    return config.activation_checkpointing
