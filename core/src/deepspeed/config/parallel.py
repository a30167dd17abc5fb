"""Sections for tensor, expert and pipeline parallelism, the mesh, and `compile`.

Keys of unimplemented features are declared too, so that a mistake is named, and a request is refused, not ignored.
"""

from typing import Any, ClassVar, Literal

from deepspeed.config.base import AUTO, Flag, Float, Free, Int, LaxSection, Section, key, quiet, refused, warned
from deepspeed.errors import ConfigError

_OFF = quiet("see enabled")
_TP = quiet("the model is divided where it is, in its own type")
_PIPE = quiet("read by pipeline models only")


class MeshConfig(Section):
    """`mesh`: the layout of the ranks. The product of all sizes is the world size; an absent dp gets the remainder."""

    pp: Int | None = key(None, "Pipeline stages.", unit="ranks", ge=1)
    dp: Int | None = key(None, "Ranks that see different samples.", unit="ranks", ge=1)
    sp: Int | None = key(None, "Ranks that share a sequence.", unit="ranks", ge=1)
    tp: Int | None = key(None, "Ranks that share a layer.", unit="ranks", ge=1)


class TensorParallelConfig(LaxSection):
    """`tensor_parallel`: AutoTP, which divides linear layers over ranks."""

    autotp_size: Int = key(0, "Ranks that hold the parts of one model; 0 or 1: off.", unit="ranks", ge=0)
    preset_model: str | None = key(None, "Plan of a model family, by transformers' model type.")
    tp_overlap_comm: Flag = key(False, "Overlap its reductions with computation.", support=_TP)
    vocab_parallel_lm_head: Flag = key(False, "Keep logits divided by vocabulary; the loss is taken from the parts.")
    sequence_parallel: Flag = key(False, "Divide the sequence between the blocks of a layer.")
    partition_config: Free | None = key(None, "A plan of your own: `layer_specs` with patterns.")
    tensor_parallel: Free | None = key(None, "The older form of the degree: `tp_size` and `tp_grain_size`.")
    tp_grain_size: Int = key(1, "Features are divided in multiples of this.", unit="elements", ge=1)
    dtype: Any = key(None, "Type of the partitioned weights.", support=_TP)
    injection_policy_tuple: Any = key(
        None,
        "Partition rules in the form of init_inference.",
        support=refused("they are not in this version; use partition_config"),
    )
    keep_module_on_host: Flag = key(False, "Partition in host memory.", support=_TP)
    replace_with_kernel_inject: Flag = key(
        False,
        "Replace layers by fused ones.",
        json_key="kernel_inject",
        support=refused("layers are replaced for inference only; call deepspeed.init_inference"),
    )
    vocab_parallel_ce_backend: str = key(
        "torch", "Library of the loss over a divided vocabulary.", support=warned("torch computes it")
    )

    moved: ClassVar[dict[str, tuple[str, str]]] = {"tp": ("tensor_parallel", "same")}

    @property
    def size(self) -> int:
        """The number of ranks over which the engine divides the model; 1: no division.

        Raises:
            ConfigError: the older form has unknown keys, or another size.
        """
        older = self.tensor_parallel or {}
        if unknown := set(older) - {"tp_size", "tp_grain_size"}:
            raise ConfigError(
                f"tensor_parallel.tp: found the keys {', '.join(sorted(unknown))}; it has tp_size and tp_grain_size. "
                "Pass groups of your own as initialize(mpu=...)"
            )
        sizes = {max(1, int(size)) for size in (self.autotp_size, older.get("tp_size", 1))} - {1}
        if len(sizes) > 1:
            raise ConfigError(
                f"tensor_parallel: found autotp_size {self.autotp_size} and tp.tp_size {older['tp_size']}; give one"
            )
        return max(sizes, default=1)

    @property
    def grain(self) -> int:
        """The granularity of the division, in features."""
        return int((self.tensor_parallel or {}).get("tp_grain_size", self.tp_grain_size))


class ExpertParallelConfig(Section):
    """`expert_parallel` (AutoEP): divides experts of transformers' models over ranks; finds them by their parameters.

    Without `enabled`, the keys that name modules are ignored. With it, keys that would change the search are refused.
    """

    enabled: Flag = key(False, "Divide the experts of mixture-of-experts layers over ranks.")
    autoep_size: Int = key(1, "Ranks over which they are divided.", unit="ranks", ge=1)
    expert_tensor_parallel_size: Int = key(1, "Only 1 is allowed.", unit="ranks", ge=1, le=1, support=_OFF)
    preset_model: str | None = key(
        None, "Names of routers and experts, by model family.", support=quiet("experts are found by their parameters")
    )
    async_split_plan: Flag = key(False, "Send split sizes while tokens are packed.", support=_OFF)
    use_grouped_mm: Flag = key(True, "Use grouped matrix products.", support=_OFF)
    disable_triton_grouped_mm: Flag = key(False, "Never use Triton for them.", support=_OFF)
    moe_layer_pattern: str | None = key(None, "Regular expression, found in the names of layers to divide.")
    router_pattern: str | None = key(None, "Attribute that holds the router.", support=_OFF)
    expert_pattern: str | None = key(None, "Attribute that holds the experts.", support=_OFF)
    score_func: str = key(AUTO, "softmax, sigmoid or auto.", support=_OFF)
    score_apply: str = key(AUTO, "pre, post or auto.", support=_OFF)
    combine_impl: str = key(AUTO, "How outputs are combined.", support=_OFF)
    comm_backend: str | None = key(None, "Library of the all-to-all.", support=_OFF)
    route_norm: Flag | None = key(None, "Normalize the top scores.", support=_OFF)
    route_scale: Float = key(1.0, "Factor on the scores.", support=_OFF)
    top_k: Any = key(AUTO, "Experts per token.", support=_OFF)
    top_k_attr: str | None = key(None, "Attribute of model.config that says so.", support=_OFF)
    routed_scaling_factor: Any = key(AUTO, "Factor on routed outputs.", support=_OFF)
    num_expert_groups: Int | None = key(None, "Groups of experts.", ge=1, support=_OFF)
    num_limited_groups: Int | None = key(None, "Groups that a token may choose.", ge=1, support=_OFF)
    num_experts_attr: str | None = key(None, "Attribute of model.config with the number of experts.", support=_OFF)
    load_balance_coeff: None = key(None, "Reserved.", support=_OFF)
    expert_w1: str | None = key(None, "Name of the gate weight.", support=_OFF)
    expert_w2: str | None = key(None, "Name of the down weight.", support=_OFF)
    expert_w3: str | None = key(None, "Name of the up weight.", support=_OFF)
    has_shared_experts: Flag | None = key(None, "Whether experts are shared.", support=_OFF)
    shared_experts_pattern: str | None = key(None, "Attribute that holds them.", support=_OFF)
    shared_experts_gate_pattern: str | None = key(None, "Attribute that holds their gate.", support=_OFF)
    validate_folding_routing: Flag = key(False, "Compare the routing of ranks that share tokens.", support=_OFF)
    row_weighting_impl: str = key(AUTO, "How rows are weighted.", support=_OFF)
    gate_up_impl: str = key("separate", "How gate and up are multiplied.", support=_OFF)
    expert_activation: Any = key(None, "Activation of the experts.", support=_OFF)
    comm_num_sm: Int = key(12, "Multiprocessors that communicate.", ge=1, support=_OFF)
    comm_qp_margin: Int = key(4, "Queue pairs in reserve.", ge=0, support=_OFF)
    comm_max_tokens_per_rank: Int = key(0, "Tokens that buffers hold; 0: as they come.", ge=0, support=_OFF)


class PipelineConfig(Section):
    """`pipeline`: how a PipelineModule runs. Arguments of PipelineModule say how its layers are partitioned."""

    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = key("1f1b", "In which order stages run micro-batches.")

    stages: Int | str = key(AUTO, "Number of stages.", support=_PIPE)
    partition: str = key("best", "How layers are spread over stages.", support=_PIPE)
    seed_layers: Flag = key(False, "Seed each layer by its index.", support=_PIPE)
    activation_checkpoint_interval: Int = key(0, "Layers between checkpoints; 0: that of PipelineModule.", ge=0)
    pipe_partitioned: Flag = key(True, "Send activations partitioned.", support=_PIPE)
    grad_partitioned: Flag = key(True, "Send gradients partitioned.", support=_PIPE)
    use_reentrant: Flag = key(True, "Checkpoint activations in the reentrant way.", support=_PIPE)


class CompileConfig(LaxSection):
    """`compile`."""

    deepcompile: Flag = key(
        False, "Compiler passes for ZeRO.", support=refused("DeepCompile is not in this version; call engine.compile()")
    )
    passes: list[str] = key(list, "Passes of DeepCompile.", support=_OFF)
    autoep_non_moe: Flag = key(False, "DeepCompile: beside divided experts.", support=_OFF)
    free_activation: Flag = key(False, "DeepCompile.", support=_OFF)
    free_activation_threshold: Int = key(
        10_485_760, "DeepCompile: size from which they are freed.", unit="bytes", ge=0, support=_OFF
    )
    offload_activation: Flag = key(False, "DeepCompile: offload activations.", support=_OFF)
    offload_activation_pin_memory: Flag = key(True, "DeepCompile: into page-locked memory.", support=_OFF)
    offload_opt_states: Flag = key(False, "DeepCompile: offload optimizer states.", support=_OFF)
    double_buffer: Flag = key(True, "DeepCompile: use two buffers.", support=_OFF)
    symmetric_memory: Flag = key(False, "DeepCompile: use symmetric memory.", support=_OFF)
    debug_log: Flag = key(False, "DeepCompile: log.", support=_OFF)
    offload_parameters: Flag = key(False, "DeepCompile: offload parameters.", support=_OFF)
    sync_before_reduce: Flag = key(False, "DeepCompile.", support=_OFF)
    sync_after_reduce: Flag = key(False, "DeepCompile.", support=_OFF)
    sync_before_allgather: Flag = key(False, "DeepCompile.", support=_OFF)
    sync_after_allgather: Flag = key(False, "DeepCompile.", support=_OFF)
    keep_int_input_tensors: Flag = key(True, "DeepCompile.", support=_OFF)
    keep_all_input_tensors: Flag = key(False, "DeepCompile.", support=_OFF)
    enabled: Flag = key(False, "Deprecated.", support=warned("call engine.compile()"))
    backend: str = key("inductor", "Deprecated.", support=warned("call engine.compile(backend=...)"))
    kwargs: Free = key(dict, "Deprecated.", support=warned("call engine.compile(compile_kwargs=...)"))
