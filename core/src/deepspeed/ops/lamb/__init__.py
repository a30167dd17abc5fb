"""LAMB: the front users import, and its torch reference. May import `errors`; read `fused_lamb.py`."""

from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
