"""Continuous batching: sequences of any length share every forward, and a paged key-value cache.

Start reading at `engine_v2.py` (one forward: `put`), then `paged_cache.py`; `scheduler.py` plans each forward.
The fused blocks come from `inference/injection`.
"""

from deepspeed._forward import forward

_NAMES = {
    "DSStateManagerConfig": "deepspeed.config.inference:DSStateManagerConfig",
    "InferenceEngineV2": "deepspeed.inference.v2.engine_v2:InferenceEngineV2",
    "MemoryConfig": "deepspeed.config.inference:MemoryConfig",
    "NewToken": "deepspeed.inference.v2.scheduler:NewToken",
    "RaggedInferenceEngineConfig": "deepspeed.config.inference:RaggedInferenceEngineConfig",
    "RequestError": "deepspeed.inference.v2.scheduler:RequestError",
    "Sampling": "deepspeed.inference.v2.scheduler:Sampling",
    "Scheduler": "deepspeed.inference.v2.scheduler:Scheduler",
    "SchedulingError": "deepspeed.inference.v2.paged_cache:SchedulingError",
    "SchedulingResult": "deepspeed.inference.v2.paged_cache:SchedulingResult",
    "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_v2:build_engine_from_ds_checkpoint",
    "build_hf_engine": "deepspeed.inference.v2.engine_v2:build_hf_engine",
    "generate": "deepspeed.inference.v2.scheduler:generate",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)
