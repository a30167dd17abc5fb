"""What to say when `torch.nn.utils.clip_grad_norm_` finds no gradients, because the engine holds them (stages 1 to 3).

`param.grad` is None there between backward and step, so that torch clips nothing, and says nothing either. Scripts
import the function before there is an engine. So the hint is put where torch's function calls on, in its own module.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from deepspeed.log import warn_once
from deepspeed.zero.managed import manager_of

_NAME = "_clip_grads_with_norm_"


def hint_at_clipping() -> None:
    """Called when an engine of stages 1 to 3 is built. Idempotent."""
    former = getattr(clip_grad, _NAME, None)
    if former is None or hasattr(former, "_is_of_zero"):  # torch may rename it: then the hint is missing, and no more
        return

    @functools.wraps(former)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keys: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _warn_if_hidden(listed)
        return former(listed, *args, **keys)

    clip._is_of_zero = True  # type: ignore[attr-defined]
    setattr(clip_grad, _NAME, clip)


def _warn_if_hidden(params: list[Tensor]) -> None:
    if any(param.grad is not None for param in params):
        return
    manager = next((found for param in params if (found := manager_of(param)) is not None), None)
    if manager is not None and manager.stage > 0 and manager.optimizer is not None:
        warn_once(
            f"clip_grad_norm_: clips nothing, since at zero_optimization.stage {manager.stage} the engine holds the "
            "gradients and param.grad is None; set gradient_clipping in the configuration, with which engine.step() "
            "clips, and read the norm with engine.get_global_grad_norm()"
        )
