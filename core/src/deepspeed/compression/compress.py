"""`init_compression` prepares a model for the section `compression_training`; `redundancy_clean` makes it smaller.

    model = init_compression(model, config)            before deepspeed.initialize
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ...                                                training; `scheduler.py` enables techniques by step
    model = redundancy_clean(engine.module, config)    ordinary layers again, with fewer rows, zeros, rounded values

`planned` returns the techniques of each layer for preparation, scheduling and cleaning. Layers are found by name:
`modules` has parts of names or regular expressions. The k-th entry of `related_modules` belongs to the k-th entry of
`modules`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from deepspeed._absent import complete
from deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    Conv2dLayer_Compress,
    LinearLayer_Compress,
    check_related,
    compressed,
    is_compressible,
    restored,
)
from deepspeed.compression.compressed_layer import CompressedLayer
from deepspeed.compression.layer_reduction import (
    convert_conv1d_to_linear,
    inner_of,
    recursive_getattr,
    recursive_setattr,
    student_initialization,
)
from deepspeed.config.compression import CompressionConfig, compression_section, groups_of
from deepspeed.config.read import ConfigSource, read_config
from deepspeed.errors import ConfigError, counted
from deepspeed.parallel.model_part import is_moe_param, is_sharded

__all__ = [
    "check_deepspeed_config",
    "convert_conv1d_to_linear",
    "fix_compression",
    "get_compression_config",
    "get_module_name",
    "init_compression",
    "module_replacement",
    "recursive_getattr",
    "recursive_setattr",
    "redundancy_clean",
    "student_initialization",
]

_WITH_WEIGHT = (nn.Linear, nn.Conv2d)
#: technique -> classes of layers that support it
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "weight_quantization": (*_WITH_WEIGHT, nn.Embedding),
    "activation_quantization": _WITH_WEIGHT,
    "sparse_pruning": _WITH_WEIGHT,
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d,),
}
#: technique -> classes of related layers, which lose the same rows, heads or channels
_RELATED: dict[str, tuple[type[nn.Module], ...]] = {
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d, nn.BatchNorm2d, nn.Linear),
}
#: attributes of attention modules with the number of heads, and with the total width of all heads
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_WIDTHS = ("all_head_size", "embed_dim", "attention_head_size_all")


@dataclass(frozen=True)
class Planned:
    """One technique of one layer.

    Args:
        technique: a key of `compression_training`.
        name: the name of the layer.
        shared: the technique's `shared_parameters`.
        params: the group's `params`.
        related: names of the layers that lose the same rows, heads or channels.
    """

    technique: str
    name: str
    shared: Any
    params: Any
    related: tuple[str, ...] = field(default=())


def check_deepspeed_config(config: ConfigSource) -> dict[str, Any]:
    """Return a configuration, in any form that `deepspeed.initialize` accepts, as a dict. Raises ConfigError."""
    return read_config(config)


def get_compression_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `compression_training` of a whole configuration with its defaults. Raises ConfigError."""
    return compression_section(param_dict).model_dump()


def init_compression(
    model: nn.Module, deepspeed_config: ConfigSource, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare the layers of a model for `compression_training`. Call it before `deepspeed.initialize`.

    Layers are converted in place. The names in the state dict do not change; scores and masks are added.

    Args:
        model: a model whose weights are not sharded.
        deepspeed_config: a configuration as for `deepspeed.initialize`.
        teacher_model: the source of the weights for `layer_reduction`.
        mpu: must be None, because layers that are sharded across ranks cannot be compressed.

    Returns:
        `model`.

    Raises:
        ConfigError: a key does not fit the model; the message has the key and what to do.
    """
    _refuse_mpu("init_compression", mpu)
    section = compression_section(read_config(deepspeed_config))
    inner = inner_of(model)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise ConfigError(
                "compression_training.layer_reduction.enabled: found true without a teacher; pass "
                "init_compression(..., teacher_model=...)"
            )
        student_initialization(inner, teacher_model, deepspeed_config)
    plan = planned(inner, section)
    layers = dict(inner.named_modules())
    _refuse_sharded("init_compression", inner)
    _check(layers, plan)
    for item in plan:
        _enable(layers, item)
    return model


def redundancy_clean(model: nn.Module, deepspeed_config: ConfigSource, mpu: Any = None) -> nn.Module:
    """Apply the compression permanently: round weights, set zeros, and remove rows, heads and channels.

    Rows, heads and channels are removed only if the group has `related_modules`; else they become zeros. Layers become
    ordinary again, in place, except with quantized inputs. Techniques apply in full, even before their first step.

    Args:
        model: a model from `init_compression`, or its engine, which cannot train it afterwards.
        deepspeed_config: the configuration of `init_compression`.
        mpu: must be None.

    Returns:
        `model`.

    Raises:
        ConfigError: the model was not prepared with this configuration, or weights are sharded.
    """
    _refuse_mpu("redundancy_clean", mpu)
    section = compression_section(read_config(deepspeed_config))
    inner = inner_of(model)
    plan = planned(inner, section)
    check_prepared(inner, plan)
    layers = dict(inner.named_modules())
    _refuse_sharded("redundancy_clean", inner)
    for item in plan:
        _refuse_unseen(item, layers[item.name])
    for item in plan:
        _fix(inner, layers, item)
    for name in {name for item in plan for name in (item.name, *item.related)}:
        restored(layers[name])
    return model


# ---- which layers ---------------------------------------------------------------------------------------------------


def planned(model: nn.Module, section: CompressionConfig) -> list[Planned]:
    """Return the techniques of all layers, in the order of cleaning.

    Raises:
        ConfigError: a pattern matches no layer that supports the technique, a layer is in two groups of a technique, or
            the numbers of layers and related layers differ.
    """
    return [item for technique in _KINDS for item in _planned(model, section, technique)]


def _planned(model: nn.Module, section: CompressionConfig, technique: str) -> Iterator[Planned]:
    shared = getattr(section, technique).shared_parameters
    excluded = getattr(shared, "excluded_modules", ())
    seen: dict[str, str] = {}
    for group, (settings, params) in groups_of(section, technique).items():
        where = f"compression_training.{technique}.different_groups.{group}"
        for position, pattern in enumerate(settings.modules):
            names = _matching(model, pattern, _KINDS[technique], excluded)
            if not names:
                kinds = " or ".join(kind.__name__ for kind in _KINDS[technique])
                raise ConfigError(
                    f"{where}.modules: found {pattern!r}, which is in the name of no {kinds} of the model; see "
                    "model.named_modules() for names. Layers of other classes, derived ones too, are not compressed; a "
                    "pattern for a pipeline is to name layers of every stage, as a rank has those of its own alone"
                )
            related: list[tuple[str, ...]] = [()] * len(names)
            if settings.related_modules is not None:
                related = _related(model, technique, where, names, settings.related_modules[position])
            for name, others in zip(names, related, strict=True):
                if seen.get(name) == group and not others:
                    continue  # two patterns of the group match the layer
                if name in seen:
                    raise ConfigError(
                        f"{where}.modules: found {pattern!r}, which names {name!r}, that is in {seen[name]} too; a "
                        "layer can be in one group"
                    )
                seen[name] = group
                yield Planned(technique, name, shared, params, tuple(others))


def _related(
    model: nn.Module, technique: str, where: str, names: Sequence[str], patterns: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the related layers of each layer, one per pattern."""
    found = []
    for pattern in patterns:
        others = _matching(model, pattern, _RELATED[technique])
        if len(others) != len(names):
            raise ConfigError(
                f"{where}.related_modules: found {pattern!r}, which is in the names of {counted(len(others), 'layer')} "
                f"({', '.join(others[:3]) or 'none'}), for {counted(len(names), 'layer')} of modules "
                f"({', '.join(names[:3])}); each needs one"
            )
        found.append(others)
    return list(zip(*found, strict=True)) if found else [()] * len(names)


def _matching(
    model: nn.Module, pattern: str, kinds: tuple[type[nn.Module], ...], excluded: Sequence[str] = ()
) -> list[str]:
    return [
        name
        for name, layer in model.named_modules()
        if is_compressible(layer, kinds) and is_in(pattern, name) and not any(is_in(other, name) for other in excluded)
    ]


def is_in(pattern: str, name: str) -> bool:
    """Return whether a name contains or matches a pattern; "*" matches all names."""
    if pattern == "*":
        return True
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ConfigError(
            f"compression_training: found the pattern {pattern!r}, which is no regular expression ({error}); correct it"
        ) from None


def get_module_name(
    group_name: str,
    model: nn.Module,
    key_word: str,
    exist_module_name: set[str],
    mpu: Any = None,
    verbose: bool = True,
) -> tuple[list[str], set[str]]:
    """Return the layers that match an entry of `modules`, and all layers matched so far.

    Args:
        group_name: the name of the group for the message.
        key_word: a part of names, or a pattern.
        exist_module_name: the layers of earlier groups.

    Raises:
        ConfigError: a layer is in an earlier group.
    """
    _refuse_mpu("get_module_name", mpu)
    names = _matching(model, key_word, _KINDS["weight_quantization"])
    for name in names:
        if name in exist_module_name:
            raise ConfigError(f"{group_name}: found {name!r}, which is in another group too; a layer can be in one")
    return names, exist_module_name | set(names)


def check_prepared(model: nn.Module, plan: Sequence[Planned]) -> None:
    """Check that `init_compression` was called with the plan. Raises ConfigError."""
    layers = dict(model.named_modules())
    for item in plan:
        layer = layers[item.name]
        if not (isinstance(layer, CompressedLayer) and _has(layer, item.technique)):
            raise ConfigError(
                f"compression_training.{item.technique}: found {item.name!r}, which is not prepared for it; call "
                "model = deepspeed.compression.init_compression(model, config), with this configuration, before "
                "deepspeed.initialize, and clean a model once"
            )


def _has(layer: CompressedLayer, technique: str) -> bool:
    if technique == "weight_quantization":
        return layer.weight_quantizer is not None
    if technique == "activation_quantization":
        return bool(layer.activation_quantization_method)
    return technique.removesuffix("_pruning") in layer.prunings


# ---- preparing and cleaning one layer -------------------------------------------------------------------------------


def _check(layers: Mapping[str, nn.Module], plan: Sequence[Planned]) -> None:
    """Refuse layers that cannot be prepared or cleaned, before anything changes.

    Raises:
        ConfigError: a layer is not supported; the message has its name.
    """
    holders = Counter(id(param) for layer in layers.values() for param in layer.parameters(recurse=False))
    owners: dict[tuple[str, str], str] = {}
    for item in plan:
        layer = layers[item.name]
        params = list(layer.parameters(recurse=False))
        where = f"compression_training.{item.technique}: found {item.name!r}"
        if any(map(is_moe_param, params)):
            raise ConfigError(f"{where}, an expert that ranks divide, which is not compressed; leave it out of modules")
        if item.technique != "activation_quantization" and any(holders[id(param)] > 1 for param in params):
            raise ConfigError(
                f"{where}, whose weight another module has too (a tied one), which would change with it; leave the "
                "layer out of modules"
            )
        for name in item.related:
            check_related(layer, layers[name], item.technique)
            former = owners.setdefault((name, item.technique), item.name)
            if former != item.name:
                raise ConfigError(
                    f"{where} and {former!r}, which both have {name!r} in related_modules; prune one of them"
                )


def _refuse_unseen(item: Planned, layer: nn.Module) -> None:
    """Refuse an input range that was never calibrated, because all inputs would become 0."""
    if item.technique == "activation_quantization" and isinstance(layer, CompressedLayer):
        if layer.has_static_range and not layer.activation_quantizer.x_min_max.any():
            raise ConfigError(
                f"redundancy_clean: found {item.name!r}, whose inputs have no range yet (range_calibration "
                f'"static"); train beyond schedule_offset ({item.shared.schedule_offset}), or use "dynamic"'
            )


def _enable(layers: Mapping[str, nn.Module], item: Planned) -> None:
    layer, shared, params = compressed(layers[item.name]), item.shared, item.params
    assert isinstance(layer, CompressedLayer)
    if item.technique == "weight_quantization":
        mixed = shared.fp16_mixed_quantize
        layer.enable_weight_quantization(
            params.start_bits,
            params.target_bits,
            params.quantization_period,
            shared.quantize_weight_in_forward,
            shared.quantization_type,
            shared.quantize_groups,
            stochastic=shared.rounding == "stochastic",
            mixed_ratio=mixed.quantize_change_ratio if mixed.enabled else None,
        )
    elif item.technique == "activation_quantization":
        layer.enable_activation_quantization(params.bits, shared.quantization_type, shared.range_calibration)
    elif item.technique == "sparse_pruning":
        layer.enable_sparse_pruning(params.dense_ratio, shared.method)
    elif item.technique == "row_pruning":
        assert isinstance(layer, LinearLayer_Compress)
        layer.enable_row_pruning(params.dense_ratio, shared.method)
    elif item.technique == "head_pruning":
        assert isinstance(layer, LinearLayer_Compress)
        layer.enable_head_pruning(params.dense_ratio, shared.method, shared.num_heads)
    else:
        assert isinstance(layer, Conv2dLayer_Compress)
        layer.enable_channel_pruning(params.dense_ratio, shared.method)
    for name in item.related:
        other = compressed(layers[name])
        if isinstance(other, BNLayer_Compress):
            assert isinstance(layer, Conv2dLayer_Compress)
            other.pruned_before, layer.tells_mask = (layer,), True


def _fix(model: nn.Module, layers: Mapping[str, nn.Module], item: Planned) -> None:
    mask = fix_compression(model, item.name, item.technique, dim_reduction=bool(item.related))
    for name in item.related:
        fix_compression(model, name, item.technique, mask, dim_reduction=True)
    if item.technique == "head_pruning" and item.related and mask is not None:
        _count_heads(layers, item.related, mask)


def fix_compression(
    model: nn.Module,
    module_name: str,
    compression_technique: str,
    mask: Tensor | None = None,
    dim_reduction: bool = False,
) -> Tensor | None:
    """Apply one technique of one layer permanently.

    Args:
        module_name: the name of the layer.
        compression_technique: a key of `compression_training`.
        mask: the mask of the layer that this one is related to; None: its own mask.
        dim_reduction: remove rows, heads or channels; else they become zeros.

    Returns:
        The mask of rows, heads or channels, or None.
    """
    layer: Any = recursive_getattr(model, module_name)
    if compression_technique == "weight_quantization":
        layer.fix_weight_quantization()
    elif compression_technique == "sparse_pruning":
        layer.fix_sparse_pruning_helper()
    elif compression_technique == "activation_quantization":
        layer.activation_quantization_enabled = True
    elif compression_technique == "row_pruning":
        return layer.fix_row_col_pruning_helper(mask, dim_reduction)  # type: ignore[no-any-return]
    elif compression_technique == "head_pruning":
        num_heads = None if mask is None else mask.numel()
        return layer.fix_head_pruning_helper(mask, num_heads, dim_reduction)  # type: ignore[no-any-return]
    elif compression_technique == "channel_pruning":
        return layer.fix_channel_pruning_helper(mask, dim_reduction)  # type: ignore[no-any-return]
    else:
        raise ConfigError(
            f"fix_compression: found the technique {compression_technique!r}; choose one of {', '.join(_KINDS)}"
        )
    return None


def _count_heads(layers: Mapping[str, nn.Module], projections: Sequence[str], mask: Tensor) -> None:
    """Update the number of heads and their width in the module that holds query, key and value."""
    holder = layers[projections[0].rpartition(".")[0]]
    kept = int(mask.count_nonzero())
    width = getattr(layers[projections[0]], "out_features", None)
    for name in _HEAD_COUNTS:
        if getattr(holder, name, None) == mask.numel():
            setattr(holder, name, kept)
    for name in _HEAD_WIDTHS:
        if isinstance(getattr(holder, name, None), int) and width is not None:
            setattr(holder, name, width)


# ---- modules --------------------------------------------------------------------------------------------------------


def module_replacement(
    model: nn.Module, module_name: str, compression_technique: Mapping[str, Any] | None = None, mpu: Any = None
) -> None:
    """Convert a layer to its compressible class in place.

    Args:
        module_name: the name of the layer.
        compression_technique: must be None; `init_compression` enables techniques.
    """
    _refuse_mpu("module_replacement", mpu)
    if compression_technique is not None:
        raise ConfigError(
            f"module_replacement: found compression_technique {compression_technique!r}; leave it out and call the "
            "layer's enable_... methods, or init_compression"
        )
    layer = recursive_getattr(model, module_name)
    if not is_compressible(layer):
        raise ConfigError(
            f"module_replacement: found {module_name!r}, a {type(layer).__name__}; a Linear, Embedding, Conv2d or "
            "BatchNorm2d can be compressed"
        )
    compressed(layer)


def _refuse_mpu(what: str, mpu: Any) -> None:
    if mpu is not None:
        raise ConfigError(
            f"{what}: found mpu {type(mpu).__name__}; layers that ranks divide are not compressed in this version, so "
            "compress with data parallelism and ZeRO, and pass mpu=None"
        )


def _refuse_sharded(what: str, model: nn.Module) -> None:
    params = model.named_parameters()
    name = next((name for name, param in params if is_sharded(param) or param.numel() == 0), None)
    if name is not None:
        raise ConfigError(
            f"{what}: found sharded weights, such as {name!r}, of zero.Init or ZeRO stage 3; prepare the model "
            "before deepspeed.initialize and outside of zero.Init; to clean it, load the weights of "
            "engine.save_16bit_model or zero_to_fp32 into a model that init_compression made"
        )


complete(__name__)
