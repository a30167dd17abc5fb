"""Lion: the public classes, and their torch reference. Imports `ops.optimizer`; read `lion.py`."""

from deepspeed._absent import complete
from deepspeed.ops.lion.lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


complete(__name__)
