"""Linear layers for fine-tuning, under DeepSpeed's names: frozen weights in 8 or 6 bits, with LoRA adapters.

    layer = OptimizedLinear(4096, 4096, lora_config=LoRAConfig(lora_r=16), quantization_config=QuantizationConfig())

Read `optimized_linear.py` first, then `quantization.py` (the stored weight) and `context_manager.py` (a whole model).
The package may import `ops`, `config` and `accelerator`.
"""

from deepspeed._absent import complete
from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.context_manager import Init, init_lora
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear, OptimizedLinear
from deepspeed.linear.quantization import QuantizedLinear, QuantizedParameter

__all__ = [
    "Init",
    "LoRAConfig",
    "LoRAOptimizedLinear",
    "OptimizedLinear",
    "QuantizationConfig",
    "QuantizedLinear",
    "QuantizedParameter",
    "init_lora",
]

complete(__name__)
