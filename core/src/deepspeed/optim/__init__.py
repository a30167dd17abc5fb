"""Optimizers and learning-rate schedules by name, gradient norms, and traits of optimizers that the engine needs.

May import `ops` and below. Read `factory.py` first; then `lr_schedules.py` and `norm.py`. Names are imported lazily.
"""

from deepspeed._forward import forward

_NAMES = {
    "arguments_of_step": "deepspeed.optim.traits:arguments_of_step",
    "averages_in_step": "deepspeed.optim.traits:averages_in_step",
    "create_optimizer": "deepspeed.optim.factory:create_optimizer",
    "create_scheduler": "deepspeed.optim.factory:create_scheduler",
    "is_elementwise": "deepspeed.optim.traits:is_elementwise",
    "is_host_front": "deepspeed.optim.traits:is_host_front",
    "is_tested_with_zero": "deepspeed.optim.traits:is_tested_with_zero",
    "looks_at_whole": "deepspeed.optim.traits:looks_at_whole",
    "takes_only_sparse": "deepspeed.optim.traits:takes_only_sparse",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)
