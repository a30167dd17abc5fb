"""`DeepSpeedConfig` holds the whole checked JSON. Each part of the engine gets only its own section (`__init__.py`).

DeepSpeedConfig(source, world_size=2)       read -> intake -> pydantic -> batch sizes -> exclusions
config.check_supported()                    refuse unsupported keys, or warn about them
config.unresolved_auto()                    list the keys that are still "auto"
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PrivateAttr, WithJsonSchema

from deepspeed._absent import absent_members
from deepspeed.config.base import Finite, Flag, Float, Free, Int, Says, Section, key, one_of, quiet, refused, warned
from deepspeed.config.checkpoint import CheckpointConfig, NebulaConfig
from deepspeed.config.compression import CompressionConfig, EigenvalueConfig, QuantizeTrainingConfig
from deepspeed.config.constants import DEEPSPEED_OPTIMIZERS
from deepspeed.config.inference import HybridEngineConfig, WeightQuantizationConfig
from deepspeed.config.intake import naming_old_keys, take_in, validated
from deepspeed.config.monitor import (
    CometConfig,
    CommsLoggerConfig,
    CSVConfig,
    FlopsProfilerConfig,
    MonitorConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
    WatchConfig,
)
from deepspeed.config.parallel import (
    CompileConfig,
    ExpertParallelConfig,
    MeshConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from deepspeed.config.precision import AmpConfig, BF16Config, DataTypesConfig, DType, FP16Config, TorchAutocastConfig
from deepspeed.config.read import ConfigSource, brief, file_of, naming_file, read_config, redacted
from deepspeed.config.supported import check_supported, shown
from deepspeed.config.training import (
    MICRO,
    STEPS,
    TRAIN,
    ActivationCheckpointingConfig,
    AioConfig,
    AutotuningConfig,
    BatchTriple,
    CurriculumConfig,
    DataEfficiencyConfig,
    DeterministicConfig,
    ElasticityConfig,
    LocalSGDConfig,
    OptimizerConfig,
    ProgressiveLayerDropConfig,
    SchedulerConfig,
    resolve_batch,
)
from deepspeed.config.zero import ZeroConfig
from deepspeed.elasticity.config import ElasticityConfig as ElasticConfig
from deepspeed.elasticity.config import ElasticityConfigError
from deepspeed.elasticity.elasticity import choose_batch, ensure_immutable_elastic_config
from deepspeed.errors import ConfigError
from deepspeed.log import LEVELS, log_dist, warn_once


def _steps(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:  # NaN is not >= 1 either
        raise ValueError("not a number of steps")
    return value if math.isinf(value) else int(value)


def _level(value: Any) -> Any:
    if not isinstance(value, str) or value.upper() not in LEVELS:
        raise ValueError("not a level")
    return value.upper()


LogLevel = Annotated[str, BeforeValidator(_level), Says(" or ".join(f'"{level}"' for level in LEVELS)), one_of(*LEVELS)]
Steps = Annotated[
    int | float,
    BeforeValidator(_steps),
    Says("an integer >= 1 or infinity"),
    WithJsonSchema({"type": "number", "minimum": 1}),
]
#: TRL writes all three together (`trl.models.utils.prepare_deepspeed`). A dot does not nest, so DeepSpeed ignores them.
_WRITTEN_BY_TRL = {
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
}


@absent_members("runtime.config:DeepSpeedConfig")
class DeepSpeedConfig(Section):
    """The config of one engine, with every key resolved. Attributes are the documented keys.

    Args:
        config: see `read_config`.
        mpu: older source of the number of data-parallel ranks: `mpu.get_data_parallel_world_size()`.
        mesh_device: another source of that number: the size of the mesh's "data_parallel" axis.
        world_size: number of data-parallel ranks; overrides `mpu` and `mesh_device`.
        batch_required: False leaves the batch sizes unresolved: zero.Init may run before they are known, and does not
            know the number of data-parallel ranks.

    Raises:
        ConfigError: the message begins with the dotted key.
    """

    # None until `resolve_batch` has run; with batch_required=False they may stay None.
    train_batch_size: Int = key(None, "Samples per update, over all ranks.", unit="samples", ge=1)
    train_micro_batch_size_per_gpu: Int = key(None, "Samples per rank and forward pass.", unit="samples", ge=1)
    gradient_accumulation_steps: Int = key(
        None, "Forward passes per update; 1 if it does not follow from the two others.", unit="passes", ge=1
    )
    managed_gradient_accumulation: Flag = key(
        True,
        "The engine counts forward passes; false: every step() updates.",
        support=refused("the engine always counts; call set_gradient_accumulation_boundary()"),
    )

    optimizer: OptimizerConfig | None = key(None, "The optimizer, by name; null: the one given to initialize().")
    scheduler: SchedulerConfig | None = key(None, "The learning rate schedule, by name.")
    gradient_clipping: Float = key(
        1.0,
        "Largest global gradient norm; 0 or less: no clipping, as without the key where initialize() was given an "
        "optimizer. A norm of nan or inf clips as in torch.",
    )
    zero_optimization: ZeroConfig = key(ZeroConfig, "ZeRO.")
    zero_allow_untested_optimizer: Flag = key(False, "Let ZeRO shard an optimizer it does not know.")
    zero_force_ds_cpu_optimizer: Flag = key(
        True, "An optimizer given to initialize() must be DeepSpeed's own for the host if it is offloaded."
    )

    fp16: FP16Config = key(FP16Config, "Half precision.")
    bf16: BF16Config = key(BF16Config, "bfloat16.")
    torch_autocast: TorchAutocastConfig = key(TorchAutocastConfig, "torch.autocast.")
    amp: AmpConfig = key(AmpConfig, "apex.")
    data_types: DataTypesConfig = key(DataTypesConfig, "Types of buffers.")

    communication_data_type: DType | None = key(None, "Type in which gradients are reduced; null: their own.")
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean",
        "Average or add gradients over ranks.",
        support=refused("gradients are averaged; scale the loss instead"),
    )
    prescale_gradients: Flag = key(
        False, "Divide gradients by the number of ranks before the reduction, whatever gradient_predivide_factor says."
    )
    gradient_predivide_factor: Finite = key(
        1.0, "Divide by this before the reduction and by the rest after it; 1: all of it before.", gt=0
    )
    sparse_gradients: Flag = key(
        False,
        "Reduce the gradients of sparse embeddings as indices and values.",
        support=warned("gradients of sparse embeddings are right, with SparseAdam too, but reduced as dense tensors"),
    )
    seq_parallel_communication_data_type: DType = key(
        "fp32", "Type of sequence-parallel reductions.", support=quiet("sequence parallelism only")
    )
    disable_allgather: Flag = key(False, "Deprecated.", support=quiet("the backend chooses"))

    deterministic: DeterministicConfig = key(DeterministicConfig, "Bitwise the same losses on any number of ranks.")

    local_sgd: LocalSGDConfig = key(LocalSGDConfig, "Averages of weights every few steps, in place of gradients.")

    steps_per_print: Steps | None = key(
        None,
        "Print progress every so many updates; null or infinity: never. The tables of wall_clock_breakdown and "
        "memory_breakdown come then too, and every 10 updates where it is null.",
        unit="steps",
    )
    wall_clock_breakdown: Flag = key(False, "Time forward, backward and step; a table every steps_per_print.")
    memory_breakdown: Flag = key(False, "Memory after each phase, in the same table.")
    log_level: LogLevel | None = key(None, "Level of DeepSpeed's logger; null: as DS_LOG_LEVEL says.")
    dump_state: Flag = key(False, "Print the resolved config after initialization.")
    dataloader_drop_last: Flag = key(False, "Drop the last, smaller batch of the engine's data loader.")
    disable_python_gc: Flag = key(False, "Switch Python's cyclic collector off.", support=warned("it stays on"))
    graph_harvesting: Flag = key(False, "Record the model's graph once.", support=warned("graphs are not harvested"))

    checkpoint: CheckpointConfig = key(CheckpointConfig, "Checkpoints.")
    nebula: NebulaConfig = key(NebulaConfig, "Checkpoints through a service.")
    activation_checkpointing: ActivationCheckpointingConfig = key(ActivationCheckpointingConfig, "Recomputation.")

    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "TensorBoard.")
    wandb: WandbConfig = key(WandbConfig, "Weights & Biases.")
    comet: CometConfig = key(CometConfig, "Comet.")
    csv_monitor: CSVConfig = key(CSVConfig, "CSV files.")
    monitor_plugins: dict[str, Free] = key(
        dict, 'Monitors of plugins: name -> its arguments, for the hook ds_monitor; {"enabled": false} is left out.'
    )
    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "Record of collectives.")
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig, "Operations of a step.")
    timers: TimersConfig = key(TimersConfig, "Timers.")
    watch: WatchConfig = key(WatchConfig, "What ranks find out about one another.")

    mesh: MeshConfig = key(MeshConfig, "Layout of the ranks; initialize(mesh_param=...) says the same.")
    tensor_parallel: TensorParallelConfig = key(TensorParallelConfig, "Tensor parallelism.")
    expert_parallel: ExpertParallelConfig = key(ExpertParallelConfig, "Expert parallelism.")
    pipeline: PipelineConfig = key(PipelineConfig, "Pipeline parallelism.")
    sequence_parallel_size: Int | None = key(
        None, "Sequence-parallel degree, as mesh.sp. The model communicates, or is made to.", unit="ranks", ge=1
    )
    data_parallel_size: Int | None = key(None, "Data-parallel degree, as mesh.dp.", unit="ranks", ge=1)
    use_data_before_expert_parallelism: Flag = key(
        False, "Lay ranks with the same experts next to each other, in place of those that divide them."
    )
    hybrid_engine: HybridEngineConfig = key(HybridEngineConfig, "Training and generation in one loop.")
    vocabulary_size: Int | None = key(None, "Rows of the embedding.", support=quiet("nothing pads it"))
    inference: Free = key(dict, "Read by init_inference and by Accelerate.", support=quiet("inference only"))
    compile: CompileConfig = key(CompileConfig, "DeepCompile.")
    aio: AioConfig = key(AioConfig, "Asynchronous input and output.")

    data_efficiency: DataEfficiencyConfig = key(DataEfficiencyConfig, "Data efficiency.")
    curriculum_learning: CurriculumConfig = key(CurriculumConfig, "Curriculum, the older form.")
    compression_training: CompressionConfig = key(CompressionConfig, "Compression.")
    quantize_training: QuantizeTrainingConfig = key(QuantizeTrainingConfig, "Mixture of Quantization, the older form.")
    weight_quantization: WeightQuantizationConfig = key(WeightQuantizationConfig, "Weights in few bits, for inference.")
    sparse_attention: Free = key(
        dict,
        "Sparse attention, for the layers that a script makes of it.",
        support=warned("a model keeps its own attention; the layers of deepspeed.ops.sparse_attention are not here"),
    )
    progressive_layer_drop: ProgressiveLayerDropConfig = key(ProgressiveLayerDropConfig, "Layer drop.")
    eigenvalue: EigenvalueConfig = key(EigenvalueConfig, "Eigenvalues.")
    elasticity: ElasticityConfig = key(ElasticityConfig, "Elastic batch sizes.")
    autotuning: AutotuningConfig = key(AutotuningConfig, "Autotuning.")

    tolerates_unknown: ClassVar[bool] = True
    moved: ClassVar[dict[str, tuple[str, str]]] = {
        "bfloat16": ("bf16", "same"),
        "pld": ("progressive_layer_drop", "same"),
        "fp32_allreduce": ("communication_data_type", "true means fp32"),
        "use_data_before_expert_parallel_": ("use_data_before_expert_parallelism", "same"),
    }

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _auto: list[str] = PrivateAttr(default_factory=list)
    _file: str = PrivateAttr(default="")
    _world_size: int = PrivateAttr(default=1)

    def __init__(
        self,
        config: ConfigSource,
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        world_size: int | None = None,
        batch_required: bool = True,
    ) -> None:
        raw = read_config(config)
        fill = super().__init__
        path = file_of(config)
        with naming_file(path):
            intake = take_in(DeepSpeedConfig, raw)
            with naming_old_keys(intake.old):
                validated("", DeepSpeedConfig, lambda: fill(**intake.values))
        self._file = path
        self._raw = raw
        self._auto = intake.auto
        self._world_size = _data_parallel_size(mpu, mesh_device) if world_size is None else world_size
        if batch_required:
            self.resolve_batch(self._world_size)
        self._check_exclusions()

    @classmethod
    def normalize(cls, value: Any) -> Any:
        """Move `aio` from `zero_optimization`, where Hugging Face documents it, to the top level.

        Drop the keys that TRL writes for a frozen model at stage 3, because a user cannot change them.
        """
        if isinstance(value, Mapping) and value.keys() >= _WRITTEN_BY_TRL:
            value = {written: section for written, section in value.items() if written not in _WRITTEN_BY_TRL}
        zero = value.get("zero_optimization") if isinstance(value, Mapping) else None
        if not isinstance(zero, Mapping) or "aio" not in zero:
            return value
        inner, outer = zero["aio"], value.get("aio")
        if outer not in (None, inner):
            raise ConfigError(
                f"zero_optimization.aio: found {brief(inner)}, but aio at the top level says {brief(outer)}; keep the "
                "latter"
            )
        warn_once("zero_optimization.aio belongs to the top level: write it as aio; it is used as if it were there")
        rest = {name: section for name, section in zero.items() if name != "aio"}
        return {**value, "zero_optimization": rest, "aio": inner}

    def resolve_batch(self, world_size: int) -> None:
        """Fill in the batch sizes for `world_size` data-parallel ranks.

        Raises:
            ConfigError: the batch sizes contradict each other, or are not known.
        """
        self._world_size = world_size
        sizes = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        if sizes[:2] == (None, None) and not self.elasticity.enabled:
            waiting = [name for name in (TRAIN, MICRO) if name in self._auto]
            if waiting:
                raise ConfigError(f"{waiting[0]}: found 'auto', which only Hugging Face's Trainer or Accelerate fills; "
                                  "write a number")  # fmt: skip
        with naming_file(self._file):
            triple = self._elastic_batch(world_size) if self.elasticity.enabled else resolve_batch(*sizes, world_size)
        # through __dict__ instead of setattr, so that model_fields_set keeps only the user's keys
        self.__dict__.update({TRAIN: triple.train, MICRO: triple.micro, STEPS: triple.steps})
        self._auto = [name for name in self._auto if name not in (TRAIN, MICRO, STEPS)]

    def _elastic_batch(self, world_size: int) -> BatchTriple:
        """Return the batch sizes that `elasticity` chooses.

        Raises:
            ElasticityError: the section is invalid, batch sizes are given too, or it does not allow this many ranks.
        """
        section = self.elasticity.model_dump(include=self.elasticity.model_fields_set)
        ensure_immutable_elastic_config(section)
        elastic = ElasticConfig(section)
        given = [name for name in (TRAIN, MICRO, STEPS) if name in self.model_fields_set and name not in self._auto]
        if given and not elastic.ignore_non_elastic_batch_info:
            raise ElasticityConfigError(
                f"{given[0]}: found {self._raw[given[0]]} beside elasticity, which chooses the batch sizes; leave it "
                "out, or set elasticity.ignore_non_elastic_batch_info to true"
            )
        chosen = choose_batch(elastic, world_size * elastic.model_parallel_size)
        assert chosen.micro is not None
        return BatchTriple(chosen.train, chosen.micro, chosen.train // (chosen.micro * world_size))

    def _check_exclusions(self) -> None:
        native = [name for name in ("fp16", "bf16") if getattr(self, name).enabled]
        if len(native) == 2:
            raise ConfigError("bf16.enabled: found true together with fp16.enabled; keep one of them")
        if native and self.amp.enabled:
            raise ConfigError(f"amp.enabled: found true together with {native[0]}.enabled; keep one of them")
        if self.torch_autocast.enabled and (self.fp16.enabled or self.amp.enabled):
            other = "fp16" if self.fp16.enabled else "amp"
            raise ConfigError(f"torch_autocast.enabled: found true together with {other}.enabled; "
                              "keep one of them")  # fmt: skip
        self._check_param_dtype()
        if self.bf16.bf16_optimizer_states and not self.bf16.bf16_master_weights_and_grads:
            raise ConfigError("bf16.bf16_optimizer_states: found true without bf16_master_weights_and_grads; "
                              "set both or neither")  # fmt: skip

    def _check_param_dtype(self) -> None:
        asked, enabled = self.data_types.param_dtype, "fp16" if self.fp16.enabled else "bf16"
        found = f"data_types.param_dtype: found {asked!r}"
        if asked is None:
            return
        if (self.fp16.enabled or self.bf16.enabled) and asked != enabled:
            raise ConfigError(f"{found} together with {enabled}.enabled, whose weights are {enabled}; "
                              "keep one of them")  # fmt: skip
        if asked == "fp16" and not self.fp16.enabled:
            raise ConfigError(f"{found} without fp16.enabled; fp16 needs its loss scale, so enable fp16")
        if asked == "bf16" and self.torch_autocast.enabled and not self.bf16.enabled:
            raise ConfigError(f"{found} together with torch_autocast.enabled, whose weights stay fp32; "
                              "keep one of them")  # fmt: skip

    @property
    def raw(self) -> dict[str, Any]:
        """The user's dict, unchanged; the same object if a dict was given. `engine.config` returns it."""
        return self._raw

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks for which the batch sizes were resolved."""
        return self._world_size

    def unresolved_auto(self) -> list[str]:
        """Return the dotted keys that are still "auto", such as "optimizer.params.lr"; attributes hold the default."""
        return list(self._auto)

    def check_supported(self) -> None:
        """Raise ConfigError for unsupported keys that must not be ignored; warn once about others. For the engine."""
        with naming_file(self._file):
            check_supported(self)

    def describe(self) -> str:
        """Return all resolved values, one "dotted.key  value" per line, for `dump_state`. `*` marks the user's keys.

        Secrets are replaced, see `redacted`.
        """
        lines = list(_lines(self, ""))
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(f"{'*' if mine else ' '} {name:<{width}}  {value}" for name, value, mine in lines)

    def print_user_config(self) -> None:
        """Log the user's own JSON on rank 0 (level INFO), secrets replaced."""
        log_dist(f"  json = {json.dumps(redacted(self.raw), sort_keys=True, indent=4, default=str)}")

    def print(self, name: str) -> None:
        """Log all values under the title `name` on rank 0 (level INFO)."""
        log_dist(f"{name}:\n{self.describe()}")
        self.print_user_config()

    # DeepSpeed's names of the same values.

    @property
    def zero_config(self) -> ZeroConfig:
        """The section `zero_optimization`."""
        return self.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        """Whether ZeRO is on: stage 1 to 3."""
        return self.zero_optimization.stage > 0

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's name: in lower case if it is one of `DEEPSPEED_OPTIMIZERS`, else as the user wrote it."""
        if self.optimizer is None:
            return None
        name = self.optimizer.type
        return name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments."""
        return self.optimizer.params if self.optimizer else None

    @property
    def scheduler_name(self) -> str | None:
        """The schedule's name as the user wrote it."""
        return self.scheduler.type if self.scheduler else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """The schedule's arguments."""
        return self.scheduler.params if self.scheduler else None

    @property
    def float16_config(self) -> FP16Config:
        """The section `fp16`."""
        return self.fp16

    @property
    def bfloat16_config(self) -> BF16Config:
        """The section `bf16`."""
        return self.bf16

    @property
    def monitor_config(self) -> MonitorConfig:
        """The sections of the monitors, for `MonitorMaster`."""
        return MonitorConfig(self.tensorboard, self.wandb, self.comet, self.csv_monitor, self.monitor_plugins)

    @property
    def fp16_enabled(self) -> bool:
        """Whether fp16 is on."""
        return self.fp16.enabled

    @property
    def bfloat16_enabled(self) -> bool:
        """Whether bf16 is on."""
        return self.bf16.enabled

    @property
    def weights_dtype(self) -> str | None:
        """The dtype of the weights; None: their own."""
        named = self.data_types.param_dtype
        return named or ("bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else None)

    @property
    def loss_scale(self) -> float:
        """The fixed fp16 loss scale; 0: dynamic."""
        return self.fp16.loss_scale

    @property
    def grad_accum_dtype(self) -> str | None:
        """The dtype of the gradient accumulation buffer."""
        return self.data_types.grad_accum_dtype


def _data_parallel_size(mpu: Any, mesh_device: Any) -> int:
    if mesh_device is not None:
        return int(mesh_device.size(mesh_device.mesh_dim_names.index("data_parallel")))
    return int(mpu.get_data_parallel_world_size()) if mpu is not None else 1


def _lines(section: Section, path: str) -> list[tuple[str, str, bool]]:
    lines = []
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        where = ".".join(filter(None, (path, info.alias or name)))
        if isinstance(value, Section):
            lines += _lines(value, where)
        else:
            lines.append((where, shown(redacted(value, where)), name in section.model_fields_set))
    return lines
