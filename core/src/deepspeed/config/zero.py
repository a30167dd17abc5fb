"""`zero_optimization`: the ZeRO stage (0 to 3), the sizes of buckets, and where shards live.

`engine/sharding.py` reads the section, and passes its values to the sharding of the stage.
"""

import sys
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from deepspeed._absent import absent_members
from deepspeed.config.base import Flag, Float, Free, Int, LaxSection, Section, Text, Texts, key, number, quiet, refused
from deepspeed.config.constants import OffloadDeviceEnum
from deepspeed.log import warn_once


def _whole(value: Any) -> Any:
    """Convert 2.0 and ZeroStageEnum.gradients to stage 2; raise ValueError for `true` and "2"."""
    value = number(value)
    return int(value) if isinstance(value, IntEnum) or (isinstance(value, float) and value.is_integer()) else value


def _device(value: Any) -> Any:
    return value.value if isinstance(value, OffloadDeviceEnum) else value


Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_device)]


class OffloadParamConfig(LaxSection):
    """`offload_param`: where stage 3 keeps the parameter shards it is not using. Below stage 3 it has no effect."""

    device: Device = key(
        "none",
        "Where stage 3 keeps the shards of parameters between uses. cpu moves nothing where the accelerator's memory "
        "is the host's; nvme keeps them in files on any accelerator.",
    )
    nvme_path: Text | None = key(None, "Folder on a local disk, needed for nvme; made if it is missing.")
    buffer_count: Int = key(5, "nvme: shards that are in memory at a time, read ahead or being written.", ge=1)
    buffer_size: Int = key(100_000_000, "nvme: elements of the largest shard, at most.", unit="elements", ge=0)
    max_in_cpu: Int = key(1_000_000_000, "nvme: elements of shards that stay in host memory.", unit="elements", ge=0)
    pin_memory: Flag = key(True, "Use page-locked host memory, which the device copies from beside its computation.")
    ratio: Float = key(
        1.0,
        "Part of the parameters that is offloaded.",
        ge=0,
        le=1,
        support=refused("DeepSpeed documents it for offload_optimizer; set it there, and max_in_cpu here"),
    )


class LocoConfig(LaxSection):
    """`zeropp_loco_param`: adds the quantization error of gradients to the next gradients (LoCo, arXiv 2407.04480)."""

    err_beta: Float = key(
        0.8,
        "Weight of former errors in their moving average; the newest has the rest. 0: the last error alone.",
        ge=0,
        lt=1,
    )
    reset_steps: Int = key(
        1024, "Errors begin at zero again after so many steps.", unit="steps", ge=1, json_key="reset_T"
    )


@absent_members("runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig")
class OffloadOptimizerConfig(LaxSection):
    """`offload_optimizer`: where optimizer states live and are updated."""

    device: Device = key(
        "none",
        "Where master weights, optimizer states and reduced gradients rest; they are updated in host memory. No "
        "effect at stage 0. cpu moves nothing where the accelerator's memory is the host's.",
    )
    nvme_path: Text | None = key(
        None, "Folder on a local disk, for nvme; made if it is missing. Files in it go with the run."
    )
    buffer_count: Int = key(
        4,
        "nvme: tensors of sub-groups that stay in memory; at least what the pipelines need. A sub-group of Adam has 4: "
        "master weights, gradients and two states.",
        ge=0,
    )
    pin_memory: Flag = key(True, "Use page-locked host memory for what is copied to and from the device.")
    pipeline_read: Flag = key(False, "nvme: read the next sub-group while one is updated.")
    pipeline_write: Flag = key(False, "nvme: write a sub-group while the next one is updated.")
    fast_init: Flag = key(
        False,
        "Initialize the optimizer quickly when it lives on NVMe.",
        support=quiet("states are made by the first step, sub-group by sub-group"),
    )
    ratio: Float = key(
        1.0,
        "Part of the parameters whose optimizer states are offloaded, in whole buckets; the rest is updated beside the "
        "weights.",
        ge=0,
        le=1,
    )
    super_offload: Flag = key(False, "SuperOffload.", support=refused("SuperOffload is not in this version"))
    cpuadam_cores_perc: Float = key(
        0.8, "Part of the cores for the host optimizer.", ge=0, le=1, support=quiet("SuperOffload only")
    )

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap the update."""
        return self.pipeline_read or self.pipeline_write


#: mixture-of-experts blocks: each rank may use other experts
LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Section):
    """`leaf_module`: modules whose parameters stage 3 gathers together."""

    classes: Texts = key(list(LEAF_CLASSES), "Class names. Nothing is said of those of the default that a model lacks.")
    names: Texts = key(list, "Module names.")
    name_suffixes: Texts = key(list, "Ends of module names.")


@absent_members("runtime.zero.config:DeepSpeedZeroConfig")
class ZeroConfig(LaxSection):
    """`zero_optimization`. The value `true`, a form of the first DeepSpeed, means stage 1 and gives a warning."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)] = key(
        0,
        "0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are partitioned over the ranks.",
    )
    reduce_bucket_size: Int = key(500_000_000, "Gradients reduced in one collective, at most.", unit="elements", ge=1)
    overlap_comm: Flag = key(
        True, "Reduce gradients while backward runs. DeepSpeed's own default is false at stages 0 to 2."
    )
    contiguous_gradients: Flag = key(
        True, "Copy gradients into one buffer as they are produced.", support=quiet("they always are")
    )
    reduce_scatter: Flag = key(
        True, "Reduce to the owner of a shard, not to every rank.", support=quiet("the backend chooses the collective")
    )
    ignore_unused_parameters: Flag = key(
        True, "Accept parameters that got no gradient, which stay as they are; false: raise and name them."
    )
    offload_optimizer: OffloadOptimizerConfig | None = key(
        None, "Keep and update optimizer states elsewhere; no effect at stage 0."
    )
    offload_param: OffloadParamConfig | None = key(None, "Keep parameters elsewhere; no effect below stage 3.")

    allgather_partitions: Flag = key(
        True, "Collect updated parameters by all-gather; false: by broadcasts.", support=quiet("the backend chooses")
    )
    allgather_bucket_size: Int = key(
        500_000_000,
        "Elements gathered in one collective, at most.",
        unit="elements",
        ge=1,
        support=quiet("buckets have the size of reduce_bucket_size"),
    )
    use_multi_rank_bucket_allreduce: Flag = key(
        True, "Reduce a bucket for several owners in one collective.", support=quiet("the backend chooses")
    )
    round_robin_gradients: Flag = key(
        False,
        "Spread gradient copies to the host over the ranks.",
        support=quiet("each rank copies its own part while backward runs"),
    )
    compute_grad_norm: Flag = key(
        True, "Compute the global gradient norm in each step.", support=quiet("the norm is always computed")
    )
    parameter_alignment: Flag = key(
        False,
        "Start every parameter at a 16-byte boundary of the flat buffer.",
        support=refused("flat buffers are dense in this version"),
    )
    load_from_fp32_weights: Flag = key(
        True,
        "Take fp32 master weights from the checkpoint, not from its 16-bit weights.",
        support=refused("master weights are always read in fp32"),
    )
    elastic_checkpoint: Flag = key(
        False,
        "Deprecated: checkpoints that load at another world size.",
        support=quiet("every checkpoint does"),
    )
    legacy_stage1: Flag = key(False, "The first implementation of stage 1.", support=quiet("there is one stage 1"))
    grad_hooks: Flag = key(True, "Deprecated: reduce from gradient hooks.", support=quiet("hooks are always used"))
    zenflow: Free | None = key(None, "ZenFlow.", support=refused("ZenFlow is not in this version"))
    save_muon_momentum_buffer_in_memory: Flag = key(
        False, "Keep Muon's momentum out of NVMe.", support=quiet("it is swapped with the other states")
    )
    enable_sanity_checks: Flag = key(
        False,
        "Before each update, compare what several ranks hold whole: a parameter whose values differ between ranks "
        "raises on all of them. When a `GatheredParameters` without `modifier_rank` ends, compare its parameters with "
        "the shards: one that a rank changed, also through `param.data`, raises on all. Illegal moves of a sharded "
        "parameter raise in any case.",
    )

    sub_group_size: Int = key(
        1_000_000_000,
        "Parameters updated, and with offload to NVMe in memory, at a time, at most; 4,194,304 in any case. 0: those.",
        unit="elements",
        ge=0,
    )  # Hugging Face's examples write 0 or 1e9; both mean "do not tile"
    prefetch_bucket_size: Int = key(
        50_000_000,
        "Parameters fetched ahead.",
        unit="elements",
        ge=0,
        json_key="stage3_prefetch_bucket_size",
    )
    param_persistence_threshold: Int = key(
        100_000,
        "Smaller parameters are not partitioned.",
        unit="elements",
        ge=0,
        json_key="stage3_param_persistence_threshold",
    )
    model_persistence_threshold: Int = key(
        sys.maxsize,
        "Unpartitioned elements in the model, at most.",
        unit="elements",
        ge=0,
        json_key="stage3_model_persistence_threshold",
    )
    max_live_parameters: Int = key(
        1_000_000_000,
        "Gathered elements per rank before some are released.",
        unit="elements",
        ge=0,
        json_key="stage3_max_live_parameters",
    )
    max_reuse_distance: Int = key(
        1_000_000_000,
        "Keep a parameter that is used again within so many elements.",
        unit="elements",
        ge=0,
        json_key="stage3_max_reuse_distance",
    )
    gather_16bit_weights_on_model_save: Flag = key(
        False,
        "Gather the weights for save_16bit_model() in stage 3; below it they are whole.",
        json_key="stage3_gather_16bit_weights_on_model_save",
    )
    module_granularity_threshold: Int = key(
        0,
        "Modules with fewer elements per descendant are fetched as one.",
        unit="elements",
        ge=0,
        json_key="stage3_module_granularity_threshold",
    )
    use_all_reduce_for_fetch_params: Flag = key(
        False,
        "Fetch by all-reduce.",
        json_key="stage3_use_all_reduce_for_fetch_params",
        support=quiet("the backend chooses the collective"),
    )
    allgather_sequential: Flag = key(
        False,
        "Gather parameters one by one.",
        json_key="stage3_allgather_sequential",
        support=quiet("one all-gather serves all parameters of a module"),
    )
    leaf_module: LeafModuleConfig = key(LeafModuleConfig, "Modules gathered as one.")
    memory_efficient_linear: Flag = key(
        True, "Save memory in linear layers.", support=quiet("no linear layer keeps a gathered weight")
    )
    pipeline_loading_checkpoint: Flag = key(
        False, "Load while partitioning.", support=quiet("parts are loaded one after the other")
    )
    override_module_apply: Flag = key(
        True, "Let Module.apply see whole parameters.", support=quiet("it always does inside zero.Init")
    )
    log_trace_cache_warnings: Flag = key(
        False, "Log when the recorded order of modules changes.", support=quiet("a changed order costs one gather")
    )
    zero_hpz_partition_size: Int = key(
        1,
        "hpZ of ZeRO++: ranks that hold a second copy of the weights together, for the backward's all-gathers; a "
        "divisor of the ranks that average a gradient. 1: off.",
        unit="ranks",
        ge=1,
    )
    zero_quantized_weights: Flag = key(
        False, "Gather the weights of sharded parameters for modules in int8 (ZeRO++); stage 3 only."
    )
    zero_quantized_nontrainable_weights: Flag = key(
        False, "Keep the shards of frozen parameters in int8 (ZeRO++); stage 3 only."
    )
    zero_quantized_gradients: Flag = key(
        False, "Reduce gradients in int4 (ZeRO++); not at stage 0, and at stage 3 those of sharded parameters."
    )
    zeropp_loco_param: LocoConfig | None = key(None, "Error feedback of `zero_quantized_gradients` (LoCo); null: none.")
    mics_shard_size: Int = key(
        -1,
        "MiCS: ranks over which stage 3 shards a copy of the model; a divisor of the ranks that average a gradient. "
        "0 or less: all.",
        unit="ranks",
    )
    mics_hierarchical_params_gather: Flag = key(
        False, "Gather inside a node first.", support=quiet("one all-gather serves a shard group")
    )

    moved: ClassVar[dict[str, tuple[str, str]]] = {
        "cpu_offload": ("offload_optimizer.device", "true means cpu"),
        "cpu_offload_params": ("offload_param.device", "true means cpu"),
        "cpu_offload_param": ("offload_param.device", "true means cpu"),
        "cpu_offload_use_pin_memory": ("offload_optimizer.pin_memory", "same"),
        "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", "same"),
    }

    @classmethod
    def normalize(cls, value: Any) -> Any:
        """Convert `true` to stage 1 and `false` to stage 0, a form of the first DeepSpeed."""
        if not isinstance(value, bool):
            return value
        written = str(value).lower()
        warn_once(f'"zero_optimization": {written} is deprecated; write "zero_optimization": {{"stage": {value:d}}}')
        return {"stage": int(value)}

    @property
    def gather_fp16_weights_on_model_save(self) -> bool:
        """Old name of `gather_16bit_weights_on_model_save`."""
        return self.gather_16bit_weights_on_model_save
