"""Mixture of experts: layers whose experts are divided over ranks, to which tokens travel.

May import `parallel` and below, `zero` not. Read `layer.py` first.
"""

from deepspeed._forward import forward

_NAMES = {name: f"deepspeed.moe.{name}" for name in ("experts", "layer", "mappings", "sharded_moe", "utils")}

__getattr__, __dir__ = forward(__name__, _NAMES)
