"""Estimate memory and traffic of training by formulas: `plan`, which `ds_plan` calls.

`shape.py` (the model, and a rank's share of it), `tape.py` and `blocks.py` (activations), `memory.py`
(units, states, buffers, the peak), `search.py` (bytes sent, all meshes).
"""

from deepspeed.planning.memory import Memory, estimate_measured, estimate_memory
from deepspeed.planning.search import Choice, Machine, Plan, Traffic, count_parameters, estimate_traffic, plan
from deepspeed.planning.shape import Mesh, ModelShape, read_shape
from deepspeed.planning.training import DEVICE, Library, Training, gloo, read_training

__all__ = [
    "DEVICE",
    "Choice",
    "Library",
    "Machine",
    "Memory",
    "Mesh",
    "ModelShape",
    "Plan",
    "Traffic",
    "Training",
    "count_parameters",
    "estimate_measured",
    "estimate_memory",
    "estimate_traffic",
    "gloo",
    "plan",
    "read_shape",
    "read_training",
]
