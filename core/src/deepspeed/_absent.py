"""What DeepSpeed has and this version does not: the public names, and what is said to those who use them.

A class or module that is not there is an `AttributeError` of `deepspeed`; a function can be named (libraries pass it
around, or look for it with hasattr) and raises `ConfigError` when it is called. When a feature arrives, its lines
here go. May import `errors`.
"""

from typing import Any, NoReturn

from deepspeed.errors import ConfigError

# public name of deepspeed -> the feature it belongs to
FEATURES = {
    "DeepSpeedHybridEngine": "the hybrid engine",
    "DeepSpeedInferenceConfig": "inference",
    "DeepSpeedTransformerConfig": "the fused transformer layer",
    "DeepSpeedTransformerLayer": "the fused transformer layer",
    "InferenceEngine": "inference",
    "OnDevice": "construction on another device",
    "PipelineEngine": "pipeline parallelism",
    "PipelineModule": "pipeline parallelism",
    "inference": "inference",
    "module_inject": "inference",
    "moe": "mixture of experts",
    "pipe": "pipeline parallelism",
    "sequence": "sequence parallelism",
}


def explain(asked: str, feature: str) -> str:
    """The sentence for something that is not there."""
    return f"{asked}: {feature} is not in this version of ds-core; use DeepSpeed for it, or do without"


def init_inference(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: inference is not in this version."""
    raise ConfigError(explain("deepspeed.init_inference", "inference"))


def default_inference_config() -> NoReturn:
    """Refused: inference is not in this version."""
    raise ConfigError(explain("deepspeed.default_inference_config", "inference"))


def tp_model_init(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: tensor parallelism is not in this version."""
    raise ConfigError(explain("deepspeed.tp_model_init", "tensor parallelism"))
