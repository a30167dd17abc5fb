"""`compression_training`: which layers are quantized or pruned, and from which step on.

Each technique has `shared_parameters`, with the switch `enabled`, and `different_groups`: name of a group -> its
`params`, its `modules` and, if rows, heads or channels are removed, its `related_modules`. `deepspeed.compression`
implements the section.

`quantize_training` and `eigenvalue` configure Mixture of Quantization, the older form of weight quantization.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from deepspeed.config.base import Flag, Float, Free, Int, Says, Section, Text, key, quiet
from deepspeed.config.intake import parse_section
from deepspeed.config.read import brief, shown_key
from deepspeed.errors import ConfigError

_BLOCK = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def _block(value: Any) -> Any:
    if not isinstance(value, str) or not _BLOCK.fullmatch(value):
        raise ValueError("not a block")
    return value


Block = Annotated[
    str,
    BeforeValidator(_block),
    Says('"NxM", N outputs by M inputs'),
    WithJsonSchema({"type": "string", "pattern": f"^{_BLOCK.pattern}$"}),
]


class LayerReductionConfig(Section):
    """`compression_training.layer_reduction`: the student has fewer layers, initialized from layers of the teacher."""

    enabled: Flag = key(False, "Copy weights of the teacher that init_compression is given.")
    keep_number_layer: Int | None = key(None, "How many layers the student has; teacher_layer lists as many.", ge=1)
    module_name_prefix: str = key("", "Name of the list of layers, in student and teacher alike.")
    teacher_layer: list[Int] = key(list, "The teacher's layer for each of the student's, from 0.")
    other_module_name: list[str] = key(list, "Modules that are copied to those of the same name.")


class MixedQuantizeConfig(Section):
    """`fp16_mixed_quantize`: weights change gradually, over many steps, from original to quantized values."""

    enabled: Flag = key(False, "Mix both values.")
    quantize_change_ratio: Float = key(0.001, "Share of the quantized value that each step adds.", gt=0, le=1)


class WeightQuantizationShared(Section):
    """`compression_training.weight_quantization.shared_parameters`."""

    enabled: Flag = key(False, "Round weights in each forward; the optimizer keeps them unrounded.")
    quantizer_kernel: Flag = key(False, "Use a kernel.", support=quiet("a kernel is used where there is one"))
    schedule_offset: Int = key(0, "First step.", unit="step", ge=0)
    quantize_groups: Int = key(1, "Scales per weight; has to divide its elements.", ge=1)
    quantize_verbose: Flag = key(False, "Log when the bits change.")
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Range of a group.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "How values become levels.")
    quantize_weight_in_forward: Flag = key(
        False,
        "Round in the forward. False rounds after the step where the optimizer has master weights, with fp16 and bf16: "
        "Mixture of Quantization; in fp32 rounding is in the forward either way.",
    )
    fp16_mixed_quantize: MixedQuantizeConfig = key(MixedQuantizeConfig, "A gradual start.")


class ActivationQuantizationShared(Section):
    """`compression_training.activation_quantization.shared_parameters`."""

    enabled: Flag = key(False, "Round the inputs of layers.")
    schedule_offset: Int = key(1000, "First step.", unit="step", ge=0)
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Range of the inputs.")
    range_calibration: Literal["static", "dynamic"] = key(
        "dynamic", "static: a range that training follows; dynamic: one of each token, or of each image."
    )


class SparsePruningShared(Section):
    """`compression_training.sparse_pruning.shared_parameters`."""

    enabled: Flag = key(False, "Put zeros into weights.")
    schedule_offset: Int = key(1000, "First step.", unit="step", ge=0)
    schedule_offset_end: Int = key(1000, "snip_momentum: the last step of a change.", unit="step", ge=0)
    schedule_offset_stride: Int = key(1, "snip_momentum: steps between changes.", unit="steps", ge=1)
    method: Literal["l1", "topk", "snip_momentum"] = key(
        "l1",
        "l1: the smallest go, by weights at init_compression; topk: scores are learned; snip_momentum: blocks that the "
        "loss depends on least go, of all layers together, more of them over time.",
    )
    block_pattern: Block = key("4x1", "snip_momentum: shape of a block.")
    dense_ratio: Float = key(0.1, "snip_momentum: share that stays, of all layers together.", gt=0, le=1)
    excluded_modules: list[str] = key(list, "Layers that keep all weights: parts of names, or patterns.")


class RowPruningShared(Section):
    """`shared_parameters` of `compression_training.row_pruning` and `compression_training.channel_pruning`."""

    enabled: Flag = key(False, "Take outputs away from layers.")
    schedule_offset: Int = key(1000, "First step.", unit="step", ge=0)
    method: Literal["l1", "topk"] = key(
        "l1", "l1: the smallest go, by the weights at init_compression; topk: scores are learned."
    )


class HeadPruningShared(Section):
    """`compression_training.head_pruning.shared_parameters`."""

    enabled: Flag = key(False, "Take heads away from attention, at its output projection.")
    schedule_offset: Int = key(1000, "First step.", unit="step", ge=0)
    method: Literal["topk"] = key("topk", "Scores are learned.")
    num_heads: Int | None = key(None, "Heads of each layer; has to be given.", ge=1)


class WeightQuantizationTechnique(Section):
    """`compression_training.weight_quantization`."""

    shared_parameters: WeightQuantizationShared = key(WeightQuantizationShared, "For all groups.")
    different_groups: Free = key(dict, "params: start_bits, target_bits, quantization_period.")


class ActivationQuantizationTechnique(Section):
    """`compression_training.activation_quantization`."""

    shared_parameters: ActivationQuantizationShared = key(ActivationQuantizationShared, "For all groups.")
    different_groups: Free = key(dict, "params: bits.")


class SparsePruningTechnique(Section):
    """`compression_training.sparse_pruning`."""

    shared_parameters: SparsePruningShared = key(SparsePruningShared, "For all groups.")
    different_groups: Free = key(dict, "params: dense_ratio.")


class RowPruningTechnique(Section):
    """`compression_training.row_pruning` and `compression_training.channel_pruning`."""

    shared_parameters: RowPruningShared = key(RowPruningShared, "For all groups.")
    different_groups: Free = key(dict, "params: dense_ratio; related_modules lose the columns.")


class HeadPruningTechnique(Section):
    """`compression_training.head_pruning`."""

    shared_parameters: HeadPruningShared = key(HeadPruningShared, "For all groups.")
    different_groups: Free = key(dict, "params: dense_ratio; related_modules (query, key, value) lose the rows.")


class CompressionConfig(Section):
    """`compression_training`: `deepspeed.compression.init_compression` prepares the model, the engine follows the
    schedule, `redundancy_clean` creates the smaller model."""

    layer_reduction: LayerReductionConfig = key(LayerReductionConfig, "Fewer layers.")
    weight_quantization: WeightQuantizationTechnique = key(WeightQuantizationTechnique, "Weights of few bits.")
    activation_quantization: ActivationQuantizationTechnique = key(
        ActivationQuantizationTechnique, "Inputs of few bits."
    )
    sparse_pruning: SparsePruningTechnique = key(SparsePruningTechnique, "Zeros anywhere in weights.")
    row_pruning: RowPruningTechnique = key(RowPruningTechnique, "Fewer outputs of linear layers.")
    head_pruning: HeadPruningTechnique = key(HeadPruningTechnique, "Fewer heads of attention.")
    channel_pruning: RowPruningTechnique = key(RowPruningTechnique, "Fewer channels of convolutions.")


# ---- Mixture of Quantization, the older form ------------------------------------------------------------------------


class EigenvalueConfig(Section):
    """`eigenvalue`: curvature estimates that lengthen the quantization periods of Mixture of Quantization."""

    enabled: Flag = key(False, "Estimate the largest eigenvalue of each layer's block of the Hessian.")
    verbose: Flag = key(False, "Log estimates.")
    max_iter: Int = key(100, "Power iterations, at most.", ge=1)
    tol: Float = key(0.01, "An estimate is done when it changes by a smaller share.", ge=0)
    stability: Float = key(1e-6, "Added to norms.", ge=0)
    gas_boundary_resolution: Int = key(1, "Updates between estimates.", unit="steps", ge=1)
    layer_name: str = key("bert.encoder.layer", "The list of layers in the model.")
    layer_num: Int = key(0, "How many of them; 0: all.", ge=0)


class QuantizeAlgoConfig(Section):
    """`quantize_training.quantize-algo`."""

    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Range of a group.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "How values become levels.")

    closed: ClassVar[bool] = True


class QuantizeBitsConfig(Section):
    """`quantize_training.quantize_bits`."""

    start_bits: Int = key(16, "Bits at first.", ge=1, le=16)
    target_bits: Int = key(16, "Bits in the end, at most start_bits.", ge=1, le=16)

    closed: ClassVar[bool] = True


class QuantizeScheduleConfig(Section):
    """`quantize_training.quantize_schedule`."""

    quantize_period: Int = key(
        100, "Steps after which there is one bit less; it doubles each time.", unit="steps", ge=1
    )
    schedule_offset: Int = key(100, "The step after which weights are rounded first.", unit="step", ge=0)

    closed: ClassVar[bool] = True


class QuantizeTrainingConfig(Section):
    """`quantize_training`: Mixture of Quantization of all weights with two or more dimensions."""

    enabled: Flag = key(False, "Round weights after each step; the optimizer keeps them unrounded.")
    quantize_verbose: Flag = key(False, "Log when the bits change.")
    quantizer_kernel: Flag = key(False, "Use a kernel.", support=quiet("a kernel is used where there is one"))
    quantize_type: Literal["symmetric", "asymmetric"] | None = key(None, "As quantize-algo.q_type.")
    quantize_algo: QuantizeAlgoConfig = key(QuantizeAlgoConfig, "Range and rounding.", json_key="quantize-algo")
    quantize_bits: QuantizeBitsConfig = key(QuantizeBitsConfig, "Bits.")
    quantize_schedule: QuantizeScheduleConfig = key(QuantizeScheduleConfig, "When they fall.")
    quantize_groups: Int = key(1, "Scales per weight; has to divide its elements.", ge=1)
    fp16_mixed_quantize: MixedQuantizeConfig = key(MixedQuantizeConfig, "A gradual start.")
    modules: list[Text] = key(["*"], "Modules whose weights are rounded: parts of names, or patterns.")
    eigenvalue: EigenvalueConfig | None = key(None, "The same as the section of this name at the top level.")

    closed: ClassVar[bool] = True


# ---- groups ---------------------------------------------------------------------------------------------------------


class BitsParams(Section):
    """`params` of a group of `weight_quantization`."""

    start_bits: Int = key(8, "Bits at first.", ge=1, le=16)
    target_bits: Int = key(8, "Bits in the end, at most start_bits.", ge=1, le=16)
    quantization_period: Int = key(
        1, "Steps after which there is one bit less; 0 where target_bits is start_bits.", unit="step", ge=0
    )

    closed: ClassVar[bool] = True


class ActivationParams(Section):
    """`params` of a group of `activation_quantization`."""

    bits: Int = key(8, "Bits.", ge=4, le=16)

    closed: ClassVar[bool] = True


class RatioParams(Section):
    """`params` of a group of a pruning technique."""

    dense_ratio: Float = key(0.5, "Share that stays.", gt=0, le=1)

    closed: ClassVar[bool] = True


class CompressionGroup(Section):
    """One of `different_groups`: some layers, and their parameters."""

    params: Free = key(dict, "As the technique has them.")
    modules: list[Text] = key(["*"], "Layers: parts of names, or patterns.")
    related_modules: list[list[Text]] | None = key(None, "For each of modules, those that lose what it loses.")

    closed: ClassVar[bool] = True


_PARAMS: dict[str, type[Section]] = {
    "weight_quantization": BitsParams,
    "activation_quantization": ActivationParams,
    "sparse_pruning": RatioParams,
    "row_pruning": RatioParams,
    "head_pruning": RatioParams,
    "channel_pruning": RatioParams,
}
TECHNIQUES = tuple(_PARAMS)
STRUCTURED = ("row_pruning", "head_pruning", "channel_pruning")


def asks_for_steps(section: CompressionConfig) -> bool:
    """Return whether a technique that acts during training is enabled; layer reduction ends before training."""
    return any(getattr(section, technique).shared_parameters.enabled for technique in TECHNIQUES)


def rounds_after_steps(config: Any) -> bool:
    """Return whether `compression_training.weight_quantization` of a whole configuration rounds weights after each step
    instead of in the forward."""
    shared = config.compression_training.weight_quantization.shared_parameters
    return shared.enabled and not shared.quantize_weight_in_forward and config.weights_dtype in ("fp16", "bf16")


def asks_for_moq(config: Any) -> bool:
    """Return whether a whole configuration asks for Mixture of Quantization.

    Raises:
        ConfigError: two sections ask for it, or eigenvalues are enabled without it.
    """
    of_layers = rounds_after_steps(config)
    if not (config.quantize_training.enabled or of_layers):
        if eigenvalue_of(config) is not None:
            raise ConfigError(
                "eigenvalue.enabled: found true, but only Mixture of Quantization follows eigenvalues, and the "
                "configuration does not ask for it; set quantize_training.enabled to true, or leave eigenvalue out"
            )
        return False
    shared = config.compression_training.weight_quantization.shared_parameters
    if config.quantize_training.enabled and shared.enabled:
        raise ConfigError(
            "quantize_training.enabled: found true together with compression_training.weight_quantization; keep one of "
            "them"
        )
    return True


def eigenvalue_of(config: Any) -> EigenvalueConfig | None:
    """Return the enabled section `eigenvalue`, from the top level or from `quantize_training`; None without any.

    Raises:
        ConfigError: both sections are enabled and differ.
    """
    inner, outer = config.quantize_training.eigenvalue, config.eigenvalue
    found: list[EigenvalueConfig] = [each for each in (inner, outer) if each is not None and each.enabled]
    if len(found) == 2 and inner != outer:
        raise ConfigError(
            "quantize_training.eigenvalue: found other values than in eigenvalue at the top level; keep one of them"
        )
    return found[0] if found else None


def compression_section(config: Mapping[str, Any]) -> CompressionConfig:
    """Return the section `compression_training` of a whole configuration. Raises ConfigError."""
    return parse_section(CompressionConfig, config.get("compression_training", {}), "compression_training")


def groups_of(section: CompressionConfig, technique: str) -> dict[str, tuple[CompressionGroup, Any]]:
    """Return name -> (group, `params`) of an enabled technique; {} for a disabled one.

    Raises:
        ConfigError: there is no group, or a group is invalid; the message names the key.
    """
    settings = getattr(section, technique)
    if not settings.shared_parameters.enabled:
        return {}
    where = f"compression_training.{technique}"
    if technique == "sparse_pruning" and settings.shared_parameters.method == "snip_momentum":
        return _groups_of_blocks(settings, where)
    if technique == "head_pruning" and settings.shared_parameters.num_heads is None:
        raise ConfigError(f"{where}.shared_parameters.num_heads: found nothing; give the heads of each layer")
    if not settings.different_groups:
        raise ConfigError(f"{where}.different_groups: found none; give at least one group, with params and modules")
    return {name: _read_group(technique, name, value) for name, value in settings.different_groups.items()}


def _groups_of_blocks(settings: SparsePruningTechnique, where: str) -> dict[str, tuple[CompressionGroup, Any]]:
    shared = settings.shared_parameters
    if shared.schedule_offset_end < shared.schedule_offset:
        raise ConfigError(
            f"{where}.shared_parameters.schedule_offset_end: found {shared.schedule_offset_end}, before "
            f"schedule_offset {shared.schedule_offset}; end at or after it"
        )
    groups = settings.different_groups or {"all": {}}
    for name, value in groups.items():
        if isinstance(value, Mapping) and value.get("params"):
            raise ConfigError(
                f"{where}.different_groups.{shown_key(name)}.params: found {brief(value['params'])}, but snip_momentum "
                "prunes all layers together to the dense_ratio of shared_parameters; leave params out"
            )
    params = RatioParams(dense_ratio=shared.dense_ratio)
    return {name: (_read_group("sparse_pruning", name, value)[0], params) for name, value in groups.items()}


def _read_group(technique: str, name: str, value: Any) -> tuple[CompressionGroup, Any]:
    where = f"compression_training.{technique}.different_groups.{shown_key(name)}"
    group = parse_section(CompressionGroup, value, where)
    params = parse_section(_PARAMS[technique], group.params, f"{where}.params")
    if isinstance(params, BitsParams) and params.target_bits > params.start_bits:
        raise ConfigError(
            f"{where}.params.target_bits: found {params.target_bits}, above start_bits {params.start_bits}; bits only "
            "get fewer"
        )
    if isinstance(params, BitsParams) and not params.quantization_period and params.target_bits < params.start_bits:
        raise ConfigError(
            f"{where}.params.quantization_period: found 0 with start_bits {params.start_bits} and target_bits "
            f"{params.target_bits}; give the steps after which there is one bit less, or equal bits"
        )
    if group.related_modules is not None:
        if technique not in STRUCTURED:
            raise ConfigError(f"{where}.related_modules: found it with {technique}, which takes no rows; leave it out")
        if len(group.related_modules) != len(group.modules):
            raise ConfigError(
                f"{where}.related_modules: found {brief(group.related_modules)} for {len(group.modules)} of modules; "
                "give a list for each of modules"
            )
    return group, params
