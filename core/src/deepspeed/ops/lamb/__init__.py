"""LAMB: the public class, and its torch reference. May import `ops.optimizer`; read `fused_lamb.py`."""

from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
