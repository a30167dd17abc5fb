"""Sections for single parts of training: optimizer, scheduler, activation checkpointing, elasticity, aio, and others.

`deepspeed.optim` checks whether the name of an optimizer or a scheduler exists.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks.

Data-parallel ranks see different samples (`Mesh.size("dp")`); ranks that share a sequence or a model count once. Two of
the three batch sizes give the third. The train size or the micro size alone gives all of them, with one gradient
accumulation step (`resolve_batch`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from deepspeed.config.base import Finite, Flag, Float, Free, Int, Section, Text, key, quiet, refused, warned
from deepspeed.errors import ConfigError

_NOT_HERE = ("muadam", "muadamw", "musgd")


class OptimizerConfig(Section):
    """`optimizer`."""

    type: Text = key(
        ...,
        "Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam, or any class of "
        "torch.optim. Not yet: mu-optimizers.",
    )
    params: Free = key(dict, "Arguments of the optimizer: lr, betas, eps, weight_decay, ...")
    legacy_fusion: Flag = key(False, "The first fused implementation.", support=quiet("there is one implementation"))

    closed: ClassVar[bool] = True

    def refusal(self) -> str | None:
        """Return why this version cannot train with the optimizer; None if there is no known reason."""
        known_elsewhere = self.type.lower().replace("_", "") in _NOT_HERE
        return "it is not in this version; use 'AdamW' or 'Lamb'" if known_elsewhere else None


class SchedulerConfig(Section):
    """`scheduler`."""

    type: Text = key(..., "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR.")
    params: Free = key(dict, "Arguments of the schedule: warmup_min_lr, warmup_max_lr, warmup_num_steps, ...")

    closed: ClassVar[bool] = True


class ProgressiveLayerDropConfig(Section):
    """`progressive_layer_drop`: the model's forward gets `progressive_layer_drop=True` and `pld_theta`, the fraction of
    layers that the step keeps."""

    enabled: Flag = key(False, "Drop layers while training.")
    theta: Float = key(1.0, "Share of layers that is kept in the limit.", ge=0, le=1)
    gamma: Float = key(0.001, "How fast the share falls.", unit="1/step", ge=0)


class LocalSGDConfig(Section):
    """`local_sgd`: each rank trains a copy of its own, and the copies are averaged every `sync_every` steps (DiLoCo,
    arXiv 2311.08105). DeepSpeed has no such section."""

    enabled: Flag = key(False, "Average weights every few steps, in place of gradients in each.")
    sync_every: Int = key(500, "Steps between two averages, skipped ones included.", unit="steps", ge=1)
    outer_lr: Finite = key(
        0.7,
        "Outer learning rate, by which the copies' mean change is multiplied; 1 with outer_momentum 0: plain averages.",
        gt=0,
    )
    outer_momentum: Float = key(0.9, "Outer momentum.", ge=0, lt=1)
    nesterov: Flag = key(True, "Nesterov's form of the outer momentum.")


class DeterministicConfig(Section):
    """`deterministic`: losses that are bitwise the same for every number of ranks, stage and number of accumulation
    steps with the same global batch. Keys that make this impossible are refused by name."""

    enabled: Flag = key(False, "Sum in one order, and draw from (seed, step, micro-batch).")
    seed: Int = key(0, "Seed of the random numbers of forwards.", ge=0)


class ActivationCheckpointingConfig(Section):
    """`activation_checkpointing`, which `deepspeed.checkpointing.configure(deepspeed_config=...)` reads."""

    partition_activations: Flag = key(False, "Partition saved inputs over tensor-parallel ranks.")
    cpu_checkpointing: Flag = key(False, "Keep saved inputs in host memory.")
    contiguous_memory_optimization: Flag = key(False, "Keep them in one buffer per size.")
    number_checkpoints: Int | None = key(None, "How many that buffer holds.", ge=1)
    synchronize_checkpoint_boundary: Flag = key(False, "Wait for the device at each boundary.")
    profile: Flag = key(False, "Log the time of each block.")
    use_reentrant: Flag = key(True, "Recompute in the reentrant way.", support=quiet("read by pipeline models only"))


_OFF = quiet("see enabled")


class AioConfig(Section):
    """`aio`: asynchronous reads and writes for offload to NVMe."""

    block_size: Int = key(1_048_576, "Size of one request.", unit="bytes", ge=1)
    queue_depth: Int = key(8, "Requests in flight.", ge=1)
    intra_op_parallelism: Int = key(1, "Workers per operation.", ge=1)
    thread_count: Int = key(1, "Workers per operation, in the older form; the larger of both counts.", ge=1)
    single_submit: Flag = key(False, "Submit requests one by one.")
    overlap_events: Flag = key(True, "Submit without waiting for the last.")
    use_gds: Flag = key(
        False, "Read straight into device memory.", support=warned("bytes go through host memory", off=(False,))
    )


class RandomLTDConfig(Section):
    """`data_efficiency.data_routing.random_ltd`: some layers compute a random subset of the tokens, which grows."""

    enabled: Flag = key(False, "Let the layers that `convert_to_random_ltd` wraps drop tokens.")
    total_layer_num: Int | None = key(None, "Layers of the model.", ge=1)
    random_ltd_layer_num: Int | None = key(None, "Layers that drop tokens.", ge=1)
    random_ltd_layer_id: list[int] | None = key(None, "Their numbers, from 0: random_ltd_layer_num of them.")
    model_mask_name: str | None = key(None, "The argument of a layer that is the attention mask; null: it has none.")
    model_type: Literal["decoder", "encoder"] = key("decoder", "Of a decoder a mask of all samples is causal.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = key(
        "batch_seq_dim", "The order of the dimensions of the states that a layer is given."
    )
    random_ltd_schedule: Free = key(
        dict, "min_value, max_value, schedule_type (fixed_linear), schedule_config: require_steps, seq_per_step."
    )
    layer_token_lr_schedule: Free = key(
        dict, "A learning rate by tokens.", support=refused("no schedule of learning rates follows the tokens")
    )


class DataRoutingConfig(Section):
    """`data_efficiency.data_routing`."""

    enabled: Flag = key(False, "Use the section.")
    random_ltd: RandomLTDConfig = key(RandomLTDConfig, "Random layer-wise token dropping.")


class CurriculumMetricsConfig(Section):
    """`data_efficiency.data_sampling.curriculum_learning`: easy samples first, by metrics from `DataAnalyzer`."""

    enabled: Flag = key(False, "Draw the samples of `initialize(training_data=...)` by the curriculum.")
    data_cluster_path: str | None = key(
        None, "A folder for lists of samples.", support=quiet("they are kept in memory, 1 to 8 bytes a sample")
    )
    curriculum_metrics: dict[str, Free] = key(
        dict,
        "By name: difficulty_type (value, percentile), clustering_type (schedule_based, single_cluster), "
        "index_to_sample_path, index_to_metric_path, and the keys of a schedule as in `curriculum_learning`.",
    )


class DynamicBatchingConfig(Section):
    """`data_efficiency.data_sampling.dynamic_batching`, which
    `get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed` reads."""

    enabled: Flag = key(False, "Make batches of a number of tokens.")
    lr_scaling_method: str | None = key("linear", "Of the learning rate by the size of a batch: linear, sqrt, null.")
    max_tokens: Int | None = key(None, "Tokens of a pack.", ge=1)
    metrics_path: str | None = key(None, "A folder for the lengths of the samples.")
    min_batch_size: Int = key(1, "Fewest samples of a pack.", ge=1)
    max_batch_size: Int | None = key(None, "Most samples of a pack.", ge=1)
    sequence_picking_order: str = key("dataloader", "dataloader: as they come; random; seqlen: short ones first.")
    verbose: Flag = key(False, "Print the packs.")


class DataSamplingConfig(Section):
    """`data_efficiency.data_sampling`."""

    enabled: Flag = key(False, "Use the section.")
    num_epochs: Int = key(1000, "How often as many samples are drawn as there are, at most.", ge=1)
    num_workers: Int = key(0, "Processes that load samples of a curriculum, for each rank.", ge=0)
    pin_memory: Flag = key(
        False, "Load samples of a curriculum into page-locked memory; where it is left out, `deepspeed_io` decides."
    )
    curriculum_learning: CurriculumMetricsConfig = key(CurriculumMetricsConfig, "Curriculum by metrics of the samples.")
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig, "Batches by tokens.")


class DataEfficiencyConfig(Section):
    """`data_efficiency`: which samples a run draws, how they are batched, and which tokens a layer computes."""

    enabled: Flag = key(False, "Use the section.")
    seed: Int = key(1234, "Seed of the draws.", ge=0)
    data_routing: DataRoutingConfig = key(DataRoutingConfig, "Token dropping.")
    data_sampling: DataSamplingConfig = key(DataSamplingConfig, "Curriculum, and batches by tokens.")

    def asks_for_curriculum(self) -> bool:
        """Return whether every switch down to `curriculum_learning` is on."""
        return self.enabled and self.data_sampling.enabled and self.data_sampling.curriculum_learning.enabled

    def asks_for_dynamic_batching(self) -> bool:
        """Return whether every switch down to `dynamic_batching` is on."""
        return self.enabled and self.data_sampling.enabled and self.data_sampling.dynamic_batching.enabled

    def asks_for_random_ltd(self) -> bool:
        """Return whether every switch down to `random_ltd` is on."""
        return self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled


class CurriculumConfig(Section):
    """`curriculum_learning`, the older form of the curriculum in `data_efficiency`. The model's forward gets
    `curriculum_seqlen`."""

    enabled: Flag = key(False, "Use a curriculum.")
    curriculum_type: str = key("seqlen", "What grows; another word than seqlen: nothing is given to the forward.")
    min_difficulty: Int = key(1, "Where it begins; has to be given.", ge=1)
    max_difficulty: Int = key(1, "Where it ends; has to be given.", ge=1)
    schedule_type: str = key(
        "fixed_linear", "How it grows: fixed_linear, fixed_root, fixed_discrete, custom; has to be given."
    )
    schedule_config: Free = key(
        dict, "total_curriculum_step, difficulty_step, root_degree; or difficulty and max_step, two lists."
    )


class ElasticityConfig(Section):
    """`elasticity`: batch sizes that fit many world sizes; `deepspeed.elasticity` chooses them."""

    enabled: Flag = key(False, "Choose the batch sizes for the ranks at hand.")
    max_train_batch_size: Int = key(2000, "Largest global batch; has to be given.", unit="samples", ge=1)
    micro_batch_sizes: list[int] = key([2, 4, 6], "Micro-batches to choose from; has to be given.", unit="samples")
    min_gpus: Int = key(1, "Fewest ranks that the batch has to allow.", unit="ranks", ge=1)
    max_gpus: Int = key(10000, "Most ranks that the batch has to allow.", unit="ranks", ge=1)
    min_time: Int = key(
        0, "Least time between changes.", unit="min", ge=0, support=quiet("for a scheduler; nothing waits here")
    )
    version: Float = key(
        0.2, "0.1: data parallelism only; 0.2: whole nodes, and a batch of its own for ranks that do not fit."
    )
    ignore_non_elastic_batch_info: Flag = key(
        False, "Replace batch sizes that are given beside it; else they are an error."
    )
    prefer_larger_batch: Flag = key(True, "Of batches that allow as many numbers of ranks take the largest.")
    num_gpus_per_node: Int = key(1, "Ranks per node; version 0.2.", unit="ranks", ge=1)
    model_parallel_size: Int = key(
        1, "Ranks that get the same samples (tensor, pipeline); version 0.2.", unit="ranks", ge=1
    )


class AutotuningConfig(Section):
    """`autotuning`: `deepspeed --autotuning tune` searches for settings with short jobs. An engine acts on the section
    only if `metric_path` or `model_info.profile` is set: it writes the measurement to a file, and the job ends."""

    enabled: Flag = key(False, "Let the search, and the engines of its trials, act on the section.")
    results_dir: Text = key("autotuning_results", "Folder of results.")
    exps_dir: Text = key("autotuning_exps", "Folder with a description of each trial.")
    overwrite: Flag = key(
        True, "Repeat trials that have results; where it is not written, a search that was cut short goes on."
    )
    metric: Literal["throughput", "latency", "flops", "FLOPS"] = key("throughput", "What the best is best in.")
    metric_path: Text | None = key(None, "File to which the engine of a trial writes what it has measured.")
    start_profile_step: Int = key(3, "Measure from this step.", unit="step", ge=0)
    end_profile_step: Int = key(5, "Measure to this step.", unit="step", ge=1)
    fast: Flag = key(True, "Search for stage and micro-batch only, and for what is a list or auto.")
    max_train_batch_size: Int | None = key(None, "Largest global batch.", unit="samples", ge=1)
    min_train_batch_size: Int = key(1, "Smallest global batch.", unit="samples", ge=1)
    mp_size: Int = key(1, "Model-parallel degree, where mesh and tensor_parallel do not say it.", unit="ranks", ge=1)
    num_nodes: Int | None = key(None, "Nodes of a trial; null: as the command says.", ge=1)
    num_gpus: Int | None = key(None, "Devices per node of a trial; null: as the command says.", ge=1)
    num_tuning_micro_batch_sizes: Int = key(3, "With fast false: micro-batches to try other settings at.", ge=1)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro-batch.", unit="samples", ge=1)
    max_train_micro_batch_size_per_gpu: Int | None = key(1024, "Largest micro-batch.", unit="samples", ge=1)
    tuner_type: Literal["gridsearch", "random", "model_based"] = key("gridsearch", "How trials are chosen.")
    tuner_early_stopping: Int = key(5, "Trials in a row that are no better, before the search ends; 0: all run.", ge=0)
    tuner_num_trials: Int = key(50, "Trials, at most.", ge=1)
    trial_limit: Float = key(1800.0, "How long a trial may take before it is ended as one that hangs.", unit="s", gt=0)
    model_info: Free | None = key(
        None, 'num_params of the model, so that no job finds it out; {"profile": true} in a job that does.'
    )
    model_info_path: Text | None = key(None, "File to which that job writes it.")
    arg_mappings: Free | None = key(None, "Key of the configuration -> flag of the script that has to say the same.")

    @property
    def profiles_model_info(self) -> bool:
        """Whether the job only collects information about its model instead of measuring steps."""
        return bool(self.enabled and self.model_info and self.model_info.get("profile"))

    @property
    def measures(self) -> bool:
        """Whether the job is a trial of a search."""
        return self.enabled and (self.metric_path is not None or self.profiles_model_info)


def switched_on(value: Any) -> bool:
    """Return whether a free object is switched on: an `enabled` in it is true, or it has content and no `enabled`."""
    flags = list(_enabled_flags(value))
    return any(flags) if flags else bool(value)


def _enabled_flags(value: Any) -> list[bool]:
    if not isinstance(value, dict):
        return []
    here = [bool(value["enabled"])] if "enabled" in value else []
    return here + [flag for inner in value.values() for flag in _enabled_flags(inner)]


TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchTriple:
    """train: samples per update over all ranks.  micro: samples per rank and forward.  steps: forwards per update."""

    train: int
    micro: int
    steps: int


def resolve_batch(train: int | None, micro: int | None, steps: int | None, world_size: int) -> BatchTriple:
    """Compute the sizes that are None, and check the product. `world_size`: data-parallel ranks. Raises ConfigError."""
    for name, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: found {value}; allowed: an integer >= 1")
    if world_size < 1:
        raise ConfigError(
            f"world_size: found {world_size}; allowed: an integer >= 1, the number of data-parallel ranks"
        )

    if train is None and micro is None:
        found = f"only {STEPS} ({steps})" if steps is not None else f"neither it, nor {MICRO}, nor {STEPS}"
        raise ConfigError(f"{TRAIN}: found {found}; give {TRAIN} or {MICRO}")
    if train is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        return BatchTriple(micro * steps * world_size, micro, steps)
    if micro is None:
        steps = 1 if steps is None else steps
        micro = _quotient(train, STEPS, steps, world_size)
    elif steps is None:
        steps = _quotient(train, MICRO, micro, world_size)
    if micro * steps * world_size != train:
        raise ConfigError(_inconsistent(train, micro, steps, world_size))
    return BatchTriple(train, micro, steps)


def _quotient(train: int, name: str, size: int, world_size: int) -> int:
    """Return train / (size x world_size); `size` is the value of the key `name`. Raises ConfigError if not whole."""
    product = size * world_size
    if train % product:
        raise ConfigError(
            f"{TRAIN}: found {train}, which is not a multiple of {name} x data-parallel ranks = {size} x {world_size} "
            f"= {product}; change {TRAIN} or {name}"
        )
    return train // product


def _inconsistent(train: int, micro: int, steps: int, world_size: int) -> str:
    product = micro * steps * world_size
    return (
        f"{TRAIN}: found {train}, which is not {MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x "
        f"{world_size} = {product}; {_remedy(train, micro * steps, world_size)}"
    )


def _remedy(train: int, samples_of_rank: int, world_size: int) -> str:
    if world_size > 1 and train == samples_of_rank:
        return (
            f"it is right for 1 rank, so what wrote it saw one process where there are {world_size}. Leave {TRAIN} "
            "out; a library that wrote it is to be started for as many processes, and Accelerate without an "
            'accelerator device also takes kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]'
        )
    return "change one of them, or give two that divide evenly and leave the third out"
