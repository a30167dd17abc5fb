"""Compression in training: quantization, sparsity, and fewer rows, heads, channels or layers, under DeepSpeed's names.

Read `compress.py` first (layer selection, preparation, cleaning), then `compressed_layer.py` and `basic_layer.py` (the
layers), `quantizers.py` (rounding), `scheduler.py` and `layer_reduction.py`. May import `ops` and `config`.
"""

from deepspeed._absent import complete
from deepspeed.compression.compress import init_compression, redundancy_clean, student_initialization
from deepspeed.compression.scheduler import compression_scheduler

__all__ = ["compression_scheduler", "init_compression", "redundancy_clean", "student_initialization"]

complete(__name__)
