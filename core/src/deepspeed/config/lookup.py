"""Parts of a config dict, by the functions of DeepSpeed's `runtime.config_utils` and its siblings.

For scripts that read the dict themselves; the engine reads sections of `DeepSpeedConfig`.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.config.intake import parse_section
from deepspeed.config.precision import BF16Config, FP16Config
from deepspeed.config.zero import ZeroConfig


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """`param_dict[param_name]`, or the default where the key is absent."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_scalar_param
get_dict_param = get_scalar_param


def get_zero_config(param_dict: Mapping[str, Any]) -> ZeroConfig:
    """The section `zero_optimization` of a whole config, also in its form `true`. Raises ConfigError."""
    return parse_section(ZeroConfig, param_dict.get("zero_optimization", {}), "zero_optimization")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> BF16Config:
    """The section `bf16`, or `bfloat16`, of a whole config. Raises ConfigError."""
    return parse_section(BF16Config, param_dict.get("bf16", param_dict.get("bfloat16", {})), "bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> FP16Config:
    """The section `fp16` of a whole config. Raises ConfigError."""
    return parse_section(FP16Config, param_dict.get("fp16", {}), "fp16")
