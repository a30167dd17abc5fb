"""`LoRAConfig` and `QuantizationConfig`: the options of `OptimizedLinear`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed._absent import complete
from deepspeed.config.inference import GroupWiseQuantConfig
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer.packed import FLOATING, unit_of

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """Adapters of rank `lora_r` (LoRA, arXiv 2106.09685) beside frozen weights.

    Args:
        lora_r: rank of the adapters.
        lora_alpha: the output of an adapter is scaled by lora_alpha / lora_r.
        base_weight_sharding: must be 1; ZeRO stage 3 shards frozen weights like all others.
        offload, offload_ratio: must be off; `offload_param` of stage 3 keeps frozen weights in host memory.
        delay_lora_init: whether `init_lora` creates the adapters later, after the weights are loaded.
        target_mods: suffixes of the names of layers that get an adapter within `deepspeed.linear.Init`.

    Raises:
        ConfigError: a value is not supported; the message names the value and the alternative.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(default_factory=lambda: list(_TARGETS))

    def __post_init__(self) -> None:
        if not _is_count(self.lora_r):
            raise ConfigError(f"LoRAConfig.lora_r: found {self.lora_r!r}, but the rank must be a whole number >= 1")
        if not isinstance(self.lora_alpha, int | float):
            raise ConfigError(f"LoRAConfig.lora_alpha: found {self.lora_alpha!r}; give a number")
        if isinstance(self.target_mods, str) or not isinstance(self.target_mods, Iterable):
            example = f", such as {[self.target_mods]}" if self.target_mods else ""
            raise ConfigError(f"LoRAConfig.target_mods: found {self.target_mods!r}; give a list of names{example}")
        if self.base_weight_sharding != 1:
            raise ConfigError(
                f"LoRAConfig.base_weight_sharding: found {self.base_weight_sharding}, but layers do not shard their "
                'weights themselves here; leave it out, and set "zero_optimization": {"stage": 3}, which shards frozen '
                "weights too"
            )
        if self.offload or self.offload_ratio:
            raise ConfigError(
                f"LoRAConfig: found offload {self.offload} and offload_ratio {self.offload_ratio}, but layers do not "
                'offload their weights themselves here; set "zero_optimization": {"stage": 3, "offload_param": '
                '{"device": "cpu"}}'
            )


@dataclass
class QuantizationConfig:
    """Storage as low-precision floating-point numbers, with a scale per group; see `ops/quantizer/floats.py`.

    Args:
        q_bits: 8 (e4m3) or 6 (e3m2); `FP_Quantize` also accepts 12.
        mantissa_bits: mantissa bits of 8-bit numbers, for `FP_Quantize.quantize`; layers always use 3.
        group_size: number of elements that share a scale. In a layer a group lies within a row, so the largest divisor
            of the inputs up to this number is used.
        q_dtype: dtype of the stored bytes.

    Raises:
        ConfigError: a value has a wrong type, or a group has no elements.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: Any = torch.uint8

    def __post_init__(self) -> None:
        for name in ("q_bits", "mantissa_bits"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"QuantizationConfig.{name}: found {getattr(self, name)!r}; give a whole number")
        if not _is_count(self.group_size):
            raise ConfigError(
                f"QuantizationConfig.group_size: found {self.group_size!r}, but a group has a whole number >= 1 of "
                "elements"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def stored_as(config: QuantizationConfig, in_features: int) -> GroupWiseQuantConfig:
    """Return the quantization settings with which a layer with `in_features` inputs stores its weight.

    Raises:
        ConfigError: layers do not support the format, or no group size fits.
    """
    of_six = config.q_bits == 6  # mantissa_bits does not apply to 6 bits
    if config.q_bits not in FLOATING or (config.mantissa_bits != FLOATING[config.q_bits].mantissa_bits and not of_six):
        raise ConfigError(
            f"QuantizationConfig: found q_bits {config.q_bits} and mantissa_bits {config.mantissa_bits}, but layers "
            "store 8 bits with 3 of mantissa, or 6; deepspeed.ops.fp_quantizer.FP_Quantize has the others for single "
            "tensors"
        )
    if config.q_dtype != torch.uint8:
        raise ConfigError(f"QuantizationConfig.q_dtype: found {config.q_dtype}, but the bytes are torch.uint8")
    unit = unit_of(config.q_bits, True)
    fits = [
        size for size in range(unit, in_features + 1, unit) if in_features % size == 0 and size <= config.group_size
    ]
    if not fits:
        raise ConfigError(
            f"QuantizationConfig.group_size: found {config.group_size} for a layer of {in_features} inputs, and groups "
            f"of {config.q_bits} bits are multiples of {unit} that divide the inputs; give q_bits 8, or leave the "
            "layer plain"
        )
    keys = {"num_bits": config.q_bits, "group_size": max(fits), "group_dim": 1, "floating": True}
    return GroupWiseQuantConfig.model_validate(keys)


complete(__name__)
