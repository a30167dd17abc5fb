"""Compression while training: few bits, zeros, fewer rows, heads, channels or layers, by DeepSpeed's names.

Read `compress.py` first (which layers, preparing and cleaning), then `compressed_layer.py` and `basic_layer.py` (what a
layer does), `quantizers.py` (rounding), `scheduler.py` (when) and `layer_reduction.py`. May import `ops` and `config`.
"""

from deepspeed._absent import complete
from deepspeed.compression.compress import init_compression, redundancy_clean, student_initialization
from deepspeed.compression.scheduler import compression_scheduler

__all__ = ["compression_scheduler", "init_compression", "redundancy_clean", "student_initialization"]

complete(__name__)
