"""Precision policies: the dtype of the model, loss scaling, and when a step is skipped.

`engine/sharding.py` chooses one `Precision`, which never changes. May import `comm`, `accelerator` and below. Read
`policy.py` (the base class is fp32).
"""

from deepspeed.precision.policy import BF16, FP16, Autocast, Precision, Verdict

__all__ = ["BF16", "FP16", "Autocast", "Precision", "Verdict"]
