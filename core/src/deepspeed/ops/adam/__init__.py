"""Adam and AdamW: the fronts users import, and their torch reference.

May import `ops.kernel_optimizer` and below. Read `adam_step.py` first (the formulas), then `adam_base.py`.
"""

from deepspeed._absent import complete
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


complete(__name__)
