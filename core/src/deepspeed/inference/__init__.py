"""Inference with a trained model, on one rank or divided over several ranks.

Start reading at `entry.py` (`deepspeed.init_inference`), then `config.py` and `engine.py`.
"""

from deepspeed._forward import forward

_NAMES = {
    "DeepSpeedInferenceConfig": "deepspeed.inference.config:DeepSpeedInferenceConfig",
    "DeepSpeedTPConfig": "deepspeed.inference.config:DeepSpeedTPConfig",
    "InferenceEngine": "deepspeed.inference.engine:InferenceEngine",
    "InferenceEngineV2": "deepspeed.inference.v2.engine_v2:InferenceEngineV2",
    "RaggedInferenceEngineConfig": "deepspeed.config.inference:RaggedInferenceEngineConfig",
    "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_v2:build_engine_from_ds_checkpoint",
    "build_hf_engine": "deepspeed.inference.v2.engine_v2:build_hf_engine",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)
