"""Pipeline parallelism: a model as a list of layers, divided into stages that work on micro-batches in turn.

May import `activation`, `parallel`, `comm` and below. Read `schedule.py` (what each stage does, and when), `module.py`
(the model), `stage.py` (who carries a schedule out), `topology.py`; the engine is `deepspeed.engine.pipeline`.
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
