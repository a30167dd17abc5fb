from .cpu_adam import CPUAdamBuilder
from .fused_adam import FusedAdamBuilder
from .no_impl import NotImplementedBuilder

__all__ = ["CPUAdamBuilder", "FusedAdamBuilder", "NotImplementedBuilder"]
