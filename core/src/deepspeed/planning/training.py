"""`Training` holds the settings of a plan besides model and mesh; `Library` holds the properties of collectives."""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]

#: number of fp32 states that an optimizer keeps per element; Muon keeps 2, AdamW's, of what is no hidden matrix
OPTIMIZER_STATES = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "lamb", "fusedlamb", "onebitadam", "onebitlamb", "zerooneadam"), 2),
    **dict.fromkeys(("lion", "fusedlion", "adagrad", "momentum", "muon"), 1),
    "sgd": 0,
}


@dataclass(frozen=True, kw_only=True)
class Library:
    """`Library` describes the collectives of a process group, like `Capabilities` of a real group.

    bucket_bytes: bucket size of a reduce-scatter or an all-gather; all_reduce_bytes: bucket size of an all-reduce.
    stages: whether a reduce-scatter needs a second buffer of its size (gloo); up to `kept_bytes` of it are kept.
    waits_on_device: whether the device waits for the end of a bucket, so that the number in flight is bounded.
    """

    bucket_bytes: int = 64 << 20
    all_reduce_bytes: int = 64 << 20
    stages: bool = False
    kept_bytes: int = 16 << 20
    waits_on_device: bool = True


#: the library of a device; see `comm/torch_group.py`
DEVICE = Library()


def gloo(ranks: int) -> Library:
    """Return the properties of gloo in host memory for a number of ranks (`comm/torch_group.py`)."""
    size = (8 << 20) if ranks <= 8 else (32 << 20)
    return Library(
        bucket_bytes=size,
        all_reduce_bytes=(16 << 20) if ranks == 2 else size,
        stages=True,
        waits_on_device=False,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a step. `zero_*` are keys of `zero_optimization`, as numbers of elements.

    micro_batch: sequences per data-parallel rank and forward; accumulation: forwards per step.
    sequence: tokens per sequence.
    stage: ZeRO stage.
    optimizer: a name in `OPTIMIZER_STATES`.
    has_kernel: whether the optimizer reads low-precision gradients directly.
    checkpoints_activations: whether each layer keeps only its input, and is computed again in the backward.
    offloads_optimizer, offloads_parameters: offload to host memory at stages that shard them (`updates_on_host`).
    gradient_bytes: bytes per accumulated gradient element; 0: like the weights.
    schedule: schedule of the pipeline.
    """

    micro_batch: int = 1
    accumulation: int = 1
    sequence: int = 2048
    stage: int = 0
    precision: Precision = "bf16"
    optimizer: str = "adamw"
    has_kernel: bool = True
    checkpoints_activations: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    gradient_bytes: int = 0
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    zero_bucket: int = 500_000_000
    zero_prefetch: int = 50_000_000
    zero_max_live: int = 1_000_000_000
    zero_max_reuse: int = 1_000_000_000
    zero_persistence: int = 100_000
    zero_model_persistence: int = sys.maxsize

    def __post_init__(self) -> None:
        if self.optimizer.lower() not in OPTIMIZER_STATES:
            raise ConfigError(f"optimizer: found {self.optimizer!r}; planned are {', '.join(sorted(OPTIMIZER_STATES))}")
        for name in ("micro_batch", "accumulation", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}; give an integer >= 1")

    @property
    def updates_on_host(self) -> bool:
        """Whether optimizer states are in host memory, and are updated there."""
        return self.offloads_optimizer and self.stage > 0

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of weights and activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def accumulated_bytes(self) -> int:
        """Bytes per element of accumulated gradients."""
        return self.gradient_bytes or self.weight_bytes

    @property
    def is_muon(self) -> bool:
        """Whether the optimizer orthogonalizes hidden matrices."""
        return self.optimizer.lower() == "muon"

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer states per weight element."""
        return 4 * OPTIMIZER_STATES[self.optimizer.lower()]

    @property
    def master_bytes(self) -> int:
        """Bytes per element of fp32 master weights; 0 if the weights themselves are fp32."""
        return 0 if self.precision == "fp32" else 4


def read_training(config: Mapping[str, Any] | str, **given: Any) -> tuple[Training, dict[str, Any]]:
    """Return the training that a DeepSpeed configuration describes, and the choices that it fixes.

    Args:
        config: a configuration for `deepspeed.initialize`; batch sizes may be missing.
        given: fields of `Training` that add to the configuration or override it.

    Returns:
        The training, and the fixed axes of the mesh and other fixed choices: any of "pp", "dp", "sp", "tp", "ep",
        "stage", "global_batch".
    """
    parsed = DeepSpeedConfig(dict(config) if isinstance(config, Mapping) else config, batch_required=False)
    raw = parsed.model_fields_set
    zero = parsed.zero_optimization
    fields: dict[str, Any] = {
        "precision": "bf16" if parsed.bf16.enabled else "fp16" if parsed.fp16.enabled else "fp32",
        "stage": zero.stage,
        "zero_bucket": zero.reduce_bucket_size,
        "zero_prefetch": zero.prefetch_bucket_size,
        "zero_max_live": zero.max_live_parameters,
        "zero_max_reuse": zero.max_reuse_distance,
        "zero_persistence": zero.param_persistence_threshold,
        "zero_model_persistence": zero.model_persistence_threshold,
        "schedule": parsed.pipeline.schedule,
        "offloads_optimizer": zero.offload_optimizer is not None and zero.offload_optimizer.device != "none",
        "offloads_parameters": zero.offload_param is not None and zero.offload_param.device != "none",
    }
    accumulated = {None: 0, "fp32": 4, "bf16": 2, "fp16": 2}.get(parsed.data_types.grad_accum_dtype, 0)
    fields["gradient_bytes"] = accumulated
    if parsed.optimizer is not None and parsed.optimizer.type:
        fields["optimizer"] = str(parsed.optimizer.type).lower()
    if parsed.pipeline.activation_checkpoint_interval:
        fields["checkpoints_activations"] = True
    if "train_micro_batch_size_per_gpu" in raw and parsed.train_micro_batch_size_per_gpu is not None:
        fields["micro_batch"] = parsed.train_micro_batch_size_per_gpu
    if "gradient_accumulation_steps" in raw and parsed.gradient_accumulation_steps is not None:
        fields["accumulation"] = parsed.gradient_accumulation_steps
    fixed: dict[str, Any] = {name: size for name in ("pp", "dp", "sp", "tp") if (size := getattr(parsed.mesh, name))}
    if parsed.tensor_parallel.size > 1:
        fixed["tp"] = parsed.tensor_parallel.size
    if parsed.sequence_parallel_size:
        fixed["sp"] = parsed.sequence_parallel_size
    if parsed.data_parallel_size:
        fixed["dp"] = parsed.data_parallel_size
    if parsed.expert_parallel.enabled:
        fixed["ep"] = parsed.expert_parallel.autoep_size
    if "zero_optimization" in raw:
        fixed["stage"] = zero.stage
    if "train_batch_size" in raw and parsed.train_batch_size is not None:
        fixed["global_batch"] = parsed.train_batch_size
    known = {each.name for each in dataclasses.fields(Training)}
    assert set(given) <= known, set(given) - known
    return Training(**{**fields, **given}), fixed
