"""`weight_quantization`: store weights of linear layers, embeddings and experts in 8, 6 or 4 bits, also with ZeRO-3.

There are two ways, which DeepSpeed documents for ZeRO-Inference:

    with QuantizationContext(config):                  weights are stored as a checkpoint loads
        model = AutoModel.from_pretrained(...)         (`quantized_initialization`; also `zero.Init`, at stage 3)

    _init_group_wise_weight_quantization(model, config)      after it was loaded, layers by name (`post_init_quant`)

`ops/quantizer/layers.py` has the layers and the layout. For outputs y = x W^T with the stored weight W'

    |y_o - y'_o| <= sum_i |x_i| scale_oi / 2    scale: max|W| / (2^(b-1) - 1) of the group, (max - min) / (2^b - 1)
                                                where asymmetric

plus the rounding in the dtype of x.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from deepspeed.config import read_config
from deepspeed.config.inference import GroupWiseQuantConfig, WeightQuantizationConfig
from deepspeed.config.intake import parse_section
from deepspeed.config.root import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.ops.experts import is_experts
from deepspeed.ops.quantizer.layers import (
    StoredLayer,
    WeightToStore,
    await_values,
    store_layers,
    take_form,
    weights_to_store,
)
from deepspeed.ops.quantizer.stored_form import StoredForm
from deepspeed.parallel.model_part import can_reshard, is_sharded, reshard, whole_shape
from deepspeed.zero.construct import Init

_KEY = "weight_quantization"
_INITIAL = f"{_KEY}.quantized_initialization"
_AFTER = f"{_KEY}.post_init_quant"


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Any) -> nn.Module:
    """Quantize the weights of the layers that `weight_quantization.post_init_quant` names, in place.

    Each key is a part of layer names: `fc` matches `decoder.layers.0.fc1`. Besides the model, memory holds one whole
    weight at a time. A weight that `zero.Init` has sharded is gathered, quantized, and sharded again: all ranks must
    call this together, before `initialize`.

    Args:
        model: a loaded model. Linear layers (also transformers' Conv1D), embeddings and experts (`gate_up_proj` and
            `down_proj` of a module) are quantized; classes derived from these layers are not.
        ds_config: the DeepSpeed configuration, a path or a dict.

    Returns:
        The model.

    Raises:
        ConfigError: a key matches no layer, two different settings match one layer, or groups do not fit a weight. The
            model does not change then, unless a weight has no values.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    >>> config = {"weight_quantization": {"post_init_quant": {"0": {"num_bits": 4, "group_size": 64}}}}
    >>> _init_group_wise_weight_quantization(model, config)
    Sequential(
      (0): QuantizedLinear(32 x 64, 4 bits, asymmetric, groups of 64)
      (1): Linear(in_features=32, out_features=64, bias=True)
    )
    """
    patterns = _patterns(_section(ds_config))
    if not patterns:
        raise ConfigError(
            f'{_AFTER}: found no pattern; write {{"part of a layer\'s name": {{"num_bits": 4, "group_size": 64}}}}'
        )
    chosen = list(_chosen(model, patterns))
    sharded = [each for each in chosen if is_sharded(each.layer.get_parameter(each.weight_name))]
    _refuse_of_engine(sharded)
    store_layers(each for each in chosen if not any(each is other for other in sharded))
    _store_sharded(model, sharded)
    return model


class QuantizationContext(contextlib.AbstractContextManager["QuantizationContext"]):
    """A context in which new linear layers, embeddings and experts store quantized weights from a checkpoint.

    A new layer has no values. It quantizes a weight when the weight is loaded or assigned (by `from_pretrained`,
    `load_state_dict`, or assignment to `layer.weight`), so the model never exists in 16 or 32 bits. With
    `zero_optimization.stage` 3 the context also acts as `zero.Init`, and the stored weights are sharded.

    Args:
        config_dict_or_path: the DeepSpeed configuration, with `weight_quantization.quantized_initialization`.
        param_swapper: accepted for compatibility and ignored; `offload_param` says where shards are.

    Raises:
        ConfigError: the configuration has no `quantized_initialization`, or its groups do not fit a layer.

    >>> keys = {"num_bits": 8, "group_size": 4, "symmetric": True}
    >>> with QuantizationContext({"weight_quantization": {"quantized_initialization": keys}}):
    ...     layer = torch.nn.Linear(4, 2, bias=False)
    >>> _ = layer.load_state_dict({"weight": torch.tensor([[127.0, -3.2, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])})
    >>> layer(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    tensor([124.,   2.])
    """

    def __init__(self, config_dict_or_path: Any, param_swapper: Any = None) -> None:
        settings = _parsed(config_dict_or_path)
        config = settings.weight_quantization.quantized_initialization
        if config is None:
            raise ConfigError(
                f"{_INITIAL}: is not in the configuration, so QuantizationContext would do nothing; write "
                '{"num_bits": 4, "group_size": 64}, or use _init_group_wise_weight_quantization with post_init_quant'
            )
        self._config = config
        self._undo = contextlib.ExitStack()
        self._sharding = (
            Init(config_dict_or_path=config_dict_or_path) if settings.zero_optimization.stage == 3 else None
        )

    def __enter__(self) -> "QuantizationContext":
        with contextlib.ExitStack() as undo:
            if self._sharding is not None:
                undo.enter_context(self._sharding)
            else:
                undo.enter_context(_transformers_reads_in_turn())
                for cls in _layer_classes():
                    self._patch(undo, cls)
                # transformers has many classes of experts, so they are detected when they are registered in a module
                undo.callback(register_module_module_registration_hook(self._await_experts).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, traceback)

    def _await_experts(self, _: nn.Module, __: str, part: nn.Module | None) -> None:
        if part is not None and is_experts(part) and weights_to_store(part):
            await_values(part, self._config, _INITIAL, allocates=False)

    def _patch(self, undo: contextlib.ExitStack, cls: Any) -> None:
        init = cls.__init__

        @functools.wraps(init)
        def construct(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            init(layer, *args, **kwargs)
            if type(layer) is cls and weights_to_store(layer):
                await_values(layer, self._config, _INITIAL, allocates=False)

        cls.__init__ = construct
        undo.callback(setattr, cls, "__init__", init)


def prepare_stored(module: nn.Module, settings: DeepSpeedConfig, *, trains: bool, dtype: torch.dtype | None) -> None:
    """Check that a model matches the configuration's settings for stored weights. `initialize` calls this.

    Args:
        trains: whether an optimizer was requested.
        dtype: dtype of the model's weights; stored layers output it too. None: keep theirs.

    Raises:
        ConfigError: the configuration requests stored weights, but the model has none, or an optimizer is requested.
    """
    section = settings.weight_quantization
    asked = _AFTER if section.post_init_quant else _INITIAL if section.quantized_initialization is not None else ""
    stored = [each for each in module.modules() if isinstance(each, StoredLayer)]
    if asked and not stored:
        remedy = (
            "call deepspeed.inference.quantization.quantization._init_group_wise_weight_quantization(model, config) "
            "before"
            if section.post_init_quant
            else "make and load the model inside deepspeed.inference.quantization.quantization_context."
            "QuantizationContext(config), or with zero.Init at stage 3"
        )
        raise ConfigError(f"{asked}: found no layer of {type(module).__name__} with a stored weight; {remedy}")
    if asked and trains:
        raise ConfigError(
            f"{asked}: found an optimizer, and weights that are stored in few bits have no gradient; remove the "
            f"optimizer, or {_KEY}, which is for inference"
        )
    if dtype is not None:
        for layer in stored:
            layer.dtype = dtype


@contextlib.contextmanager
def _transformers_reads_in_turn() -> Iterator[None]:
    """Disable transformers' loader threads: they read faster than weights are quantized, and would fill memory."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _layer_classes() -> Iterator[type[nn.Module]]:
    yield nn.Linear
    yield nn.Embedding
    of_transformers = sys.modules.get("transformers.pytorch_utils")
    if of_transformers is not None:
        yield of_transformers.Conv1D


def _parsed(source: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig(read_config(source), batch_required=False)


def _section(source: Any) -> WeightQuantizationConfig:
    return _parsed(source).weight_quantization


def _patterns(section: WeightQuantizationConfig) -> dict[str, GroupWiseQuantConfig]:
    return {
        name: parse_section(GroupWiseQuantConfig, value, f"{_AFTER}.{name}")
        for name, value in section.post_init_quant.items()
    }


def _chosen(model: nn.Module, patterns: dict[str, GroupWiseQuantConfig]) -> Iterator[WeightToStore]:
    """Yield the weights of the layers that match `patterns`, with the checked form in which each is stored."""
    found: dict[str, str] = {}
    layers = {
        path if name == "weight" else f"{path}.{name}": (module, name)
        for path, module in model.named_modules()
        for name in weights_to_store(module)
    }
    for pattern, config in patterns.items():
        matched = [name for name in layers if pattern in name]
        if not matched:
            kind = _kinds_of(model, pattern)
            raise ConfigError(
                f"{_AFTER}: found {pattern!r}, which is part of no name of a linear or embedding layer{kind}; the "
                f"model has {_some(list(layers))}"
            )
        for name in matched:
            other = found.setdefault(name, pattern)
            if patterns[other] != config:
                raise ConfigError(
                    f"{_AFTER}: {other!r} and {pattern!r} both name {name}, and differ; write longer parts of names, "
                    "so that one names it"
                )
    for name, pattern in found.items():
        layer, weight_name = layers[name]
        each = WeightToStore(name, layer, weight_name, patterns[pattern], f"{_AFTER}.{pattern}")
        StoredForm.of(torch.Size(whole_shape(layer.get_parameter(weight_name))), each.config, each.key, name)
        yield each


def _kinds_of(model: nn.Module, pattern: str) -> str:
    kinds = {type(module).__name__ for name, module in model.named_modules() if pattern in name and name}
    return f" (but of {', '.join(sorted(kinds))})" if kinds else ""


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{' ...' * (len(names) > 4)}" if names else "none"


def _refuse_of_engine(weights: list[WeightToStore]) -> None:
    for each in weights:
        if not can_reshard(each.layer.get_parameter(each.weight_name)):
            raise ConfigError(
                f"{each.key}: found {each.name} in an engine, which has sharded its weight; call "
                "_init_group_wise_weight_quantization before deepspeed.initialize"
            )


def _store_sharded(model: nn.Module, weights: list[WeightToStore]) -> None:
    """Quantize weights that `zero.Init` has sharded; each is gathered meanwhile. Tied weights are one parameter."""
    chosen = {each.layer for each in weights}
    users: dict[Any, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            users.setdefault(param, []).append((name, module))
    done: dict[Any, tuple[StoredForm, torch.dtype]] = {}
    for each in weights:
        weight: Any = each.layer.get_parameter(each.weight_name)
        if others := [other for other, module in users[weight] if module not in chosen]:
            raise ConfigError(
                f"{each.key}: found {each.name}, whose weight is also that of {others[0]}, and is sharded; name both, "
                "or neither"
            )
        shape, dtype = torch.Size(whole_shape(weight)), weight.dtype
        if weight in done:
            shape, dtype = torch.Size(done[weight][0].whole_shape), done[weight][1]
        form = take_form(each, shape, dtype).forms[each.weight_name]
        if weight not in done:
            weight.requires_grad_(False)
            reshard(weight, form.pack, weight.ds_process_group)
            done[weight] = form, dtype
        elif done[weight][0] != form:
            raise ConfigError(
                f"{each.key}: found {each.name}, whose weight is tied and stored otherwise; give both the same"
            )
