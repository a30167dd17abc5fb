"""Lion: the fronts users import, and their reference. Imports `ops.kernel_optimizer`; read `lion_base.py` first."""

from deepspeed._absent import complete
from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


complete(__name__)
