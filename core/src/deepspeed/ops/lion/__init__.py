"""Lion: the fronts users import, and their torch reference. May import `errors`; read `lion_base.py` first."""

from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
