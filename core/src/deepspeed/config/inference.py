"""Inference and generation: the keys of `deepspeed.init_inference`, and the section `hybrid_engine`.

A key that is not implemented yet is refused if ignoring it would change results or memory.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from deepspeed._absent import absent_members
from deepspeed.config.base import Flag, Free, Int, LaxSection, Says, Section, key, number, quiet, refused, warned
from deepspeed.config.precision import canonical_dtype

_INJECTED = quiet("of injected layers only")
_BY_WEIGHT_QUANTIZATION = (
    "init_inference quantizes all linear layers, once they are loaded; use weight_quantization, the section of these "
    "keys, with deepspeed.inference.quantization before it"
)
_CAUSAL = refused("fused blocks attend as the model's own layers do, causal or not")
_OWN_GROUPS = refused("groups of your own are not in this version; give tensor_parallel.tp_size")
_NO_EXPERTS = refused("experts are not divided for inference")
_BESIDE = refused("give its keys beside it, or init_inference(config=...)", ({},))


# spelling -> dtype of the packed weights of linear layers
_PACKED = {"int8": "int8", "fp8": "fp8", "float8_e4m3fn": "fp8", "fp6": "fp6"}


def _dtype(value: Any) -> str:
    return _PACKED.get(str(value).removeprefix("torch.").lower()) or canonical_dtype(value)


InferenceDType = Annotated[
    str, BeforeValidator(_dtype), Says('a torch dtype or its name: "fp32", "fp16", "bf16", "int8", "fp8" or "fp6"')
]


class DeepSpeedTPConfig(LaxSection):
    """`tensor_parallel`: the ranks over which the model's layers are divided."""

    enabled: Flag = key(True, "Divide the layers, where tp_size is above 1.")
    tp_size: Int = key(1, "Ranks that hold the parts of one model.", unit="ranks", ge=1)
    tp_grain_size: Int = key(1, "Features are divided in multiples of this.", unit="elements", ge=1)
    mpu: Any = key(None, "Groups of the caller's own.", support=refused("groups of your own are not in this version"))
    tp_group: Any = key(
        None, "A group of the caller's own.", support=refused("it is not in this version; give tp_size")
    )


class WeightQuantConfig(LaxSection):
    """`quant.weight`."""

    enabled: Flag = key(True, "Quantize weights.", support=refused("dtype int8 is that; give another dtype", (True,)))
    num_bits: Literal[4, 8] = key(8, "Of a weight; with dtype fp8 and fp6 those count.", unit="bits")
    output_num_bits: Literal[4, 6, 8] | None = key(
        None,
        "Of the output layer's weight: 8 or 4, or with dtype fp8 and fp6 8 or 6; null: it keeps its type. Not a key of "
        "DeepSpeed's.",
        unit="bits",
    )
    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Whether 0 is exact, or a group has a minimum.")
    q_groups: Int = key(
        1, "Groups of a weight that have a scale each, at least; a group is never more than a row.", ge=1
    )
    quantized_initialization: Free = key(
        dict, "Quantize while a checkpoint loads.", support=refused(_BY_WEIGHT_QUANTIZATION)
    )
    post_init_quant: Free = key(dict, "By name of a layer.", support=refused(_BY_WEIGHT_QUANTIZATION))


class GroupWiseQuantConfig(Section):
    """Storage of one weight in few bits: the section `weight_quantization.quantized_initialization`, and the value of
    each pattern in `post_init_quant`."""

    num_bits: Literal[4, 6, 8] = key(8, "Of a weight: 8 or 4, or 8 or 6 where floating.", unit="bits")
    group_size: Int = key(64, "Elements that share a scale; must divide the dimension.", unit="elements", ge=1)
    group_dim: Annotated[Literal[0, 1], BeforeValidator(number)] = key(
        1, "Dimension of the weight along which a group lies."
    )
    symmetric: Flag = key(False, "Zero is exact; false: a group has a minimum too, which costs 4 bytes more.")
    floating: Flag = key(
        False, "Numbers with an exponent, e4m3 or e3m2, and no minimum, instead of integers. Not a key of DeepSpeed's."
    )

    closed: ClassVar[bool] = True


class WeightQuantizationConfig(Section):
    """`weight_quantization`: quantized weights of linear layers, embeddings and experts, for inference."""

    quantized_initialization: GroupWiseQuantConfig | None = key(
        None, "Every layer, as a checkpoint loads into a model built inside zero.Init or QuantizationContext."
    )
    post_init_quant: Free = key(
        dict, "Part of a layer's name -> the same keys; acted on by _init_group_wise_weight_quantization."
    )


class ActivationQuantConfig(LaxSection):
    """`quant.activation`: kernels may round the inputs that they multiply with packed int8 weights. The section takes
    effect if it is given."""

    enabled: Flag = key(True, "Kernels may round.")
    num_bits: Literal[8, 16] = key(8, "To which inputs of a layer are rounded, for each token by itself.", unit="bits")
    q_type: Literal["symmetric"] = key("symmetric", "0 is exact.")
    q_groups: Int = key(1, "Groups with a scale each.", support=quiet("they are those of the weight"), ge=1)


class QuantizationConfig(LaxSection):
    """`quant`: takes effect with dtype int8, fp8 and fp6."""

    enabled: Flag = key(True, "Quantize, with dtype int8, fp8 and fp6; with these dtypes false is an error.")
    weight: WeightQuantConfig = key(WeightQuantConfig, "Of weights.")
    activation: ActivationQuantConfig | None = key(
        None, "Of activations, with dtype int8; null: kernels round them to 16 bits at most."
    )
    qkv: Free = key(dict, "Of attention's layers.", support=quiet("they are quantized like the others"))


class InferenceCheckpointConfig(Section):
    """`checkpoint_config`."""

    checkpoint_dir: str | None = key(None, "As `checkpoint`.")
    save_mp_checkpoint_path: str | None = key(None, "As the key of this name beside the section.")
    base_dir: str | None = key(None, "As the key of this name beside the section.")


#: the key that requests graphs on any device
GRAPHS = "enable_cuda_graph"


@absent_members("inference.config:DeepSpeedInferenceConfig")
class DeepSpeedInferenceConfig(LaxSection):
    """Keys of `init_inference`, as arguments or in its `config`."""

    dtype: InferenceDType = key(
        "fp16",
        "Type of the weights; int8, fp8 (e4m3) and fp6 (e3m2): linear layers and experts as `quant` says, all else "
        "as the model has it. DeepSpeed has no fp8 and fp6 here.",
    )
    tensor_parallel: DeepSpeedTPConfig = key(
        DeepSpeedTPConfig, "Layers divided over ranks.", json_key="tensor_parallel"
    )
    injection_policy: Any = key(
        None, "By class of a model's layers the names of those linear layers in it whose outputs are summed over ranks."
    )
    injection_policy_tuple: Any = key(None, "The same names for every layer.", support=refused("give injection_policy"))
    replace_with_kernel_inject: Flag = key(False, "Compute the layers of known families by fused blocks.")
    replace_method: str | None = key("auto", "DeepSpeed ignores it, too.", support=quiet("it has no meaning any more"))
    keep_module_on_host: Flag = key(False, "Leave the weights where they are, instead of on the device.")
    enable_cuda_graph: Flag = key(False, "Replay the engine's forwards from graphs, where the device records them.")
    use_triton: Flag = key(
        False, "Kernels in Triton.", support=warned("the model keeps its own layers; the results are the same")
    )
    triton_autotune: Flag = key(False, "Tune them.", support=_INJECTED)
    checkpoint: Any = key(
        None,
        "The files of the weights: path of a JSON file, of a folder or of a file of weights, or the JSON as a dict.",
    )
    base_dir: str = key("", "Where names in `checkpoint` begin; the JSON's folder where it is empty.")
    set_empty_params: Flag = key(
        False,
        "The model has no values yet: those of `checkpoint` are read into it.",
        support=quiet("checkpoint decides"),
    )
    save_mp_checkpoint_path: str | None = key(
        None, "Write the part of each rank into this folder, and the JSON that `checkpoint` takes."
    )
    checkpoint_config: InferenceCheckpointConfig = key(InferenceCheckpointConfig, "The same in a section.")
    zero: Free = key(
        dict,
        "ZeRO-Inference.",
        support=refused(
            'it is not part of init_inference in this version; use deepspeed.initialize with {"stage": 3} and no '
            "optimizer",
            off=({"stage": 0},),
        ),
    )
    quant: QuantizationConfig = key(QuantizationConfig, "Weights in few bits, with dtype int8, fp8 and fp6.")
    quantization_setting: Any = key(
        None, "The older form of quant.weight.q_groups: groups, or (twice as many for feed-forward layers, groups)."
    )
    moe: Any = key(False, "Divide experts over ranks.", support=refused("experts are not divided for inference"))
    ep_size: Int = key(
        1, "Ranks that share the experts.", ge=1, support=refused("experts are not divided for inference")
    )
    moe_experts: Any = key(None, "Experts per layer.", support=quiet("of moe only"))
    moe_type: str = key("standard", "standard or residual.", support=quiet("of moe only"))
    max_out_tokens: Int = key(
        1024, "Longest sequence that injected layers generate, prompt included.", unit="tokens", ge=1
    )
    min_out_tokens: Int = key(1, "Tokens that it must hold.", ge=1, support=_INJECTED)
    max_batch_size: Int | None = key(None, "Sequences that it holds.", ge=1, support=_INJECTED)
    transposed_mode: Flag = key(False, "Weights of injected layers are transposed.", support=_INJECTED)
    return_tuple: Flag = key(True, "Injected layers return a tuple.", support=_INJECTED)
    triangular_masking: Flag = key(True, "Injected layers of decoders are causal.", support=_CAUSAL)
    tm: Flag = key(True, "As `triangular_masking`.", support=_CAUSAL)
    mpu: Any = key(None, "Groups of the caller's own.", support=_OWN_GROUPS)
    ep_group: Any = key(None, "Ranks that share the experts.", support=_NO_EXPERTS)
    expert_group: Any = key(None, "As `ep_group`.", support=_NO_EXPERTS)
    ep_mp_group: Any = key(None, "Ranks that share one expert.", support=_NO_EXPERTS)
    expert_mp_group: Any = key(None, "As `ep_mp_group`.", support=_NO_EXPERTS)
    config: Any = key(None, "Keys in another object.", support=_BESIDE)
    args: Any = key(None, "As `config`.", support=_BESIDE)
    training_mp_size: Int = key(
        1, "Ranks over which the checkpoint was divided.", ge=1, support=quiet("the checkpoint's files tell")
    )

    closed: ClassVar[bool] = True
    moved: ClassVar[dict[str, tuple[str, str]]] = {
        "mp_size": ("tensor_parallel.tp_size", "same"),
        "tp": ("tensor_parallel", "same"),
        "kernel_inject": ("replace_with_kernel_inject", "same"),
        "ckpt_config": ("checkpoint_config", "same"),
        "injection_dict": ("injection_policy", "same"),
        "max_tokens": ("max_out_tokens", "same"),
        "min_tokens": ("min_out_tokens", "same"),
    }

    @property
    def packs(self) -> bool:
        """Whether weights of linear layers are stored in few bits."""
        return self.dtype in _PACKED.values()

    @property
    def wants_graphs(self) -> bool:
        """Whether the engine replays its forwards from graphs."""
        return self.enable_cuda_graph

    @property
    def tp_size(self) -> int:
        """The number of ranks that share the model; 1: no division."""
        return self.tensor_parallel.tp_size if self.tensor_parallel.enabled else 1


class HybridEngineConfig(LaxSection):
    """`hybrid_engine`: training and generation in one loop."""

    enabled: Flag = key(False, "Use the hybrid engine.")
    max_out_tokens: Int = key(
        512, "Longest sequence, prompt included.", unit="tokens", ge=1, support=quiet("of injected blocks only")
    )
    inference_tp_size: Int = key(1, "Tensor-parallel ranks of generation: those of training.", unit="ranks", ge=1)
    release_inference_cache: Flag = key(
        False, "Free the cache after a generation.", support=quiet("it is freed after each generation")
    )
    pin_parameters: Flag = key(True, "At stage 3 gather all weights for a generation, not each layer for each token.")
    tp_gather_partition_size: Int = key(
        8, "Layers gathered at a time.", ge=1, support=quiet("units of stage 3 are gathered in turn")
    )
    enable_cuda_graph: Flag = key(
        False, "Replay token generation from a graph.", support=refused("generation is not captured in this version")
    )


class RaggedQuantizationConfig(Section):
    """`quantization` of `InferenceEngineV2`, the engine with continuous batching."""

    quantization_mode: Literal["int8", "int4", "fp8", "fp6", "wf6af16"] | None = key(
        None,
        "Weights of linear layers but the output layer, and of experts; wf6af16 is DeepSpeed's name of fp6, here with "
        "the model's own type for all else; null: as the model has them.",
    )


class MemoryConfig(Section):
    """`state_manager.memory_config`: the memory of the key-value cache."""

    mode: Literal["reserve", "allocate"] = key(
        "reserve",
        "reserve: all of the device's memory that is free, but for `size`; allocate: as many blocks as `size`.",
    )
    size: Int = key(1_000_000_000, "Bytes (reserve) or blocks of tokens (allocate).", ge=1)


@absent_members("inference.v2.ragged.manager_configs:DSStateManagerConfig")
class DSStateManagerConfig(Section):
    """`state_manager`: limits for sequences, and for one forward."""

    max_tracked_sequences: Int = key(2048, "Sequences that have tokens in the cache at once.", unit="sequences", ge=1)
    max_ragged_batch_size: Int = key(768, "Tokens of one forward, of all sequences together.", unit="tokens", ge=1)
    max_ragged_sequence_count: Int = key(512, "Sequences of one forward.", unit="sequences", ge=1)
    max_context: Int = key(
        8192, "Longest sequence, prompt included; never more than the model has positions.", unit="tokens", ge=1
    )
    kv_block_size: Int = key(64, "Tokens of a block of the cache; not a key of DeepSpeed's.", unit="tokens", ge=1)
    memory_config: MemoryConfig = key(MemoryConfig, "Memory of the cache.")
    offload: Flag = key(False, "Keep the cache in host memory.", support=refused("the cache stays on the device"))


class RaggedInferenceEngineConfig(Section):
    """Keys of `InferenceEngineV2`; see docs/howto/serve-many-requests.md."""

    tensor_parallel: DeepSpeedTPConfig = key(DeepSpeedTPConfig, "Layers divided over ranks.")
    state_manager: DSStateManagerConfig = key(DSStateManagerConfig, "Limits, and memory of the cache.")
    quantization: RaggedQuantizationConfig = key(RaggedQuantizationConfig, "Weights in few bits.")
