"""Kernel injection: fused transformer blocks replace the forwards of a model's layers.

`policies.py` holds the table of model families, `block.py` the fused block, `weights.py` the fused memory of
parameters, `inject.py` the entry. The package may import `tensor_parallel`, `ops` and below.
"""

from deepspeed.inference.injection.inject import Injected, inject
from deepspeed.inference.injection.policies import InjectionPolicy

__all__ = ["Injected", "InjectionPolicy", "inject"]
