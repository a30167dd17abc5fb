"""Stage 0: plain data parallelism. Everything it does is the base class; read `strategy.py`."""

from deepspeed.zero.strategy import Sharding


class Stage0(Sharding):
    """Every rank holds parameters, gradients and optimizer state whole; 16 bytes per parameter in fp32."""
