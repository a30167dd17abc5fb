"""Adam and AdamW: the public classes, and their torch reference.

May import `ops.optimizer` and below. Read `adam.py`.
"""

from deepspeed._absent import complete
from deepspeed.ops.adam.adam import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


complete(__name__)
