"""Keys whose default differs from DeepSpeed 0.19.6's on purpose.

`core/tests/compat/test_defaults.py` compares all others. Key -> both defaults, as the configuration has them, and why.
"""

from deepspeed.compatibility.records import Default

DEFAULTS = {
    "tensor_parallel.dtype": Default(None, "torch.float16", "The model is divided in its own type."),
    "zero_optimization.overlap_comm": Default(
        True, None, "Gradients are reduced while backward runs at every stage; null there means at stage 3 only."
    ),
}
