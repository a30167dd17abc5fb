"""The accelerator in use: its base class, the choice, and the plain device that needs no plugin.

    from deepspeed.accelerator import get_accelerator
    x = torch.empty(8, device=get_accelerator().current_device_name())

May import `plugins` and lower floors. Read next: `current.py` (how the accelerator is chosen),
`abstract_accelerator.py` (the interface of an accelerator), `plain.py` (the smallest complete accelerator).
"""

from deepspeed._absent import complete
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.current import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

complete(__name__)
