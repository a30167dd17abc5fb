"""Pipeline parallelism: a model as a list of layers, divided into stages that process micro-batches in turn.

May import `activation`, `parallel`, `comm` and below. Read `schedule.py` (the order of each stage's work), `module.py`
(the model), `stage.py` (runs a schedule), `topology.py`; the engine is `deepspeed.engine.pipeline`.
"""

from deepspeed._forward import forward

_NAMES = {
    "LayerSpec": "deepspeed.pipe.layers:LayerSpec",
    "PipelineModule": "deepspeed.pipe.module:PipelineModule",
    "TiedLayerSpec": "deepspeed.pipe.layers:TiedLayerSpec",
    "ProcessTopology": "deepspeed.pipe.topology:ProcessTopology",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)
