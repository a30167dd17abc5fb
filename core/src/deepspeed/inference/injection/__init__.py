"""Fused transformer blocks in the place of a model's layers ("kernel injection").

`policies.py` is the table of families, `block.py` the one fused block, `weights.py` the parameters' fused memory,
`inject.py` the entry. May import `tensor_parallel`, `ops` and below.
"""

from deepspeed.inference.injection.inject import Injected, inject
from deepspeed.inference.injection.policies import InjectionPolicy

__all__ = ["Injected", "InjectionPolicy", "inject"]
