"""What to say when torch's clipping finds no gradients, because the engine holds them (stages 1 to 3).

`param.grad` is None there between backward and step, so that `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`
clip nothing, and say nothing either. Scripts import these functions before there is an engine. So the hint is put where
they call on: each is a wrapper of torch's that turns gradients off, around a function in a cell of its closure.
"""

import functools
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from deepspeed.log import warn_once
from deepspeed.zero.managed import manager_of

#: by the name in torch's module: the name that scripts call, and what to do instead
_INSTEAD = {
    "_clip_grads_with_norm_": (
        "clip_grad_norm_",
        "set gradient_clipping in the configuration, with which engine.step() clips, and read the norm with "
        "engine.get_global_grad_norm()",
    ),
    "clip_grad_value_": (
        "clip_grad_value_",
        "set gradient_clipping in the configuration, with which engine.step() clips by the norm, or change gradients "
        "between backward and step with deepspeed.utils.safe_get_full_grad and safe_set_full_grad",
    ),
}


def hint_at_clipping() -> None:
    """Called when an engine of stages 1 to 3 is built. Idempotent."""
    for name, (called, instead) in _INSTEAD.items():
        closure: tuple[CellType, ...] = getattr(getattr(clip_grad, name, None), "__closure__", None) or ()
        if len(closure) == 1 and callable(former := closure[0].cell_contents) and not hasattr(former, "_is_of_zero"):
            closure[0].cell_contents = _hinting(former, called, instead)
        # torch may write it in another way: then the hint is missing, and no more


def _hinting(former: Callable[..., Any], called: str, instead: str) -> Callable[..., Any]:
    @functools.wraps(former)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keys: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_hidden(listed, called, instead):
            return None  # torch's clip_grad_value_ fails for an empty list of gradients, and says something else
        return former(listed, *args, **keys)

    clip._is_of_zero = True  # type: ignore[attr-defined]
    return clip


def _are_hidden(params: list[Tensor], called: str, instead: str) -> bool:
    """Whether an engine holds the gradients, which is said once."""
    if any(param.grad is not None for param in params):
        return False
    manager = next((found for param in params if (found := manager_of(param)) is not None), None)
    if manager is None or manager.stage == 0 or manager.optimizer is None:
        return False
    warn_once(
        f"{called}: clips nothing, since at zero_optimization.stage {manager.stage} the engine holds the gradients and "
        f"param.grad is None; {instead}"
    )
    return True
