"""The configuration of `init_inference`, where DeepSpeed has it; it lives in `deepspeed.config.inference`."""

from deepspeed._absent import complete
from deepspeed.config.inference import (
    DeepSpeedInferenceConfig,
    DeepSpeedTPConfig,
    InferenceCheckpointConfig,
    QuantizationConfig,
)

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedTPConfig", "InferenceCheckpointConfig", "QuantizationConfig"]

complete(__name__)
