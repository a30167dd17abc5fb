"""Number formats: what the model computes in, how losses are scaled, when a step is skipped.

One `Precision` is chosen in `engine/sharding.py` and never changes. May import `comm`, `accelerator` and below. Read
`policy.py` (the base class is fp32).
"""

from deepspeed.precision.policy import BF16, FP16, Autocast, Precision, Verdict

__all__ = ["BF16", "FP16", "Autocast", "Precision", "Verdict"]
