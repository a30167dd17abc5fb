"""Mixture of experts: layers that divide their experts over ranks and send tokens to those ranks.

May import `parallel` and below, but not `zero`. Read `layer.py` first.
"""

from deepspeed._forward import forward

_NAMES = {name: f"deepspeed.moe.{name}" for name in ("experts", "layer", "mappings", "sharded_moe", "utils")}

__getattr__, __dir__ = forward(__name__, _NAMES)
