"""`ExposedGrads`: the averaged gradients that a user finds in `param.grad` between backward and step.

Made by `Gradients`, where all ranks have whole gradients (stage 0). What is shown are the views through which buckets
write their memory, so that what the user does to them, clipping for example, is what the step takes. A view may get
other `.data` from its user; it is given its memory back before a bucket writes through it again.

At stages 1 to 3 `param.grad` is None between backward and step, so that `torch.nn.utils.clip_grad_norm_` and
`clip_grad_value_` clip nothing, and say nothing either: `hint_at_clipping` has them say so. Scripts import these
functions before there is an engine. So the hint is put where they call on: each is a wrapper of torch's that turns
gradients off, around a function in a cell of its closure.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from types import CellType
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad

from deepspeed.log import warn_once
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.managed import manager_of
from deepspeed.zero.unit import Unit
from deepspeed.zero.units import Units


class ExposedGrads:
    """`ExposedGrads` lets `param.grad` show the gradients of one step. The object is false while nothing is shown."""

    def __init__(self) -> None:
        self._units: list[tuple[Unit, Tensor, Sequence[Tensor]]] = []  # with their memory [N] and its views
        self._used: list[bool] = []  # by attached parameter
        # What is shown of these, kept between steps; one entry for each parameter:
        self._indices: list[int] = []
        self._params: list[Parameter] = []
        self._views: list[Tensor] = []
        self._addresses: list[int] = []  # of the views, which a user may give other `.data`
        self._is_shown = False
        self._versions: list[int] = []  # of the memory, by unit: torch counts what is written into it

    def __bool__(self) -> bool:
        return self._is_shown

    def show(self, units: Units, buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
        """Let each used parameter show its part of its bucket's memory, if both have one dtype.

        Args:
            buckets: of the units; their buffers live from step to step.
            used: by attached parameter.
        """
        found = [(units[bucket.index], *bucket.lasting()) for bucket in buckets]
        if self._used != used or [id(part) for _, _, part in self._units] != [id(part) for _, _, part in found]:
            self._units = found
            self._used = list(used)
            self._find_views()
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view
        self._is_shown = bool(self._params)
        self._versions = self._count_versions()

    def _find_views(self) -> None:
        alike = [
            (unit.first_index + place, param, view)
            for unit, memory_N, views in self._units
            if memory_N.dtype == unit.dtype
            for place, (param, view) in enumerate(zip(unit.params, views, strict=True))
        ]
        shown = [(index, param, view) for index, param, view in alike if self._used[index]]
        self._indices = [index for index, _, _ in shown]
        self._params = [param for _, param, _ in shown]
        self._views = [view for _, _, view in shown]
        self._addresses = [view.data_ptr() for view in self._views]

    def _memory(self, index: int) -> Tensor:
        """The gradient memory of the parameter `index`, in its shape."""
        for unit, memory_N, _ in self._units:
            if 0 <= (place := index - unit.first_index) < len(unit.params):
                shape = unit.shapes[place]
                return memory_N.narrow(0, unit.layout.offsets[place], shape.numel()).view(shape)
        raise AssertionError(f"the parameter {index} is in no unit")

    def take(self) -> list[int]:
        """Bring what the user made of `param.grad` into the gradient memory; returns the parameters whose gradient
        was set to None.

        Every rank has all of them, so no communication is needed; the user does the same on every rank.
        """
        if not self._is_shown:
            return []
        found = [param.grad for param in self._params]
        if all(map(operator.is_, found, self._views)) and not self._has_other_data():
            return []
        changed = [
            place
            for place, grad in enumerate(found)
            if grad is not self._views[place] or grad.data_ptr() != self._addresses[place]
        ]
        for place in changed:
            self._take_changed(place)
        return [self._indices[place] for place in changed if found[place] is None]

    def _take_changed(self, place: int) -> None:
        memory, grad = self._memory(self._indices[place]), self._params[place].grad
        if grad is None:
            memory.zero_()
        else:  # another tensor, or other `.data`
            memory.copy_(grad.clone())  # which may be a view of the memory: transposed, for example
            self._params[place].grad = self._views[place]
        self._views[place].data = memory

    def _has_other_data(self) -> bool:
        return list(map(Tensor.data_ptr, self._views)) != self._addresses

    def restore_views(self) -> None:
        """Gradients are about to be written through the views, of which a user may have kept one."""
        if self._has_other_data():
            for index, view in zip(self._indices, self._views, strict=True):
                view.data = self._memory(index)

    def were_written(self) -> bool:
        """Whether the gradient memory was written since it was shown, or since the last call."""
        former, self._versions = self._versions, self._count_versions()
        return former != self._versions

    def _count_versions(self) -> list[int]:
        return [memory_N._version for _, memory_N, _ in self._units]

    def forget(self) -> None:
        """Nothing is shown any more; `param.grad` is set by the caller."""
        self._is_shown = False


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
    """Called when an engine is built whose gradients are not shown. Idempotent."""
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
    if manager is None or manager.options.stage.shows_gradients or manager.optimizer is None:
        return False
    stage, name = manager.stage, type(manager.optimizer).__name__
    where = f"at zero_optimization.stage {stage}" if stage > 0 else f"with {name}"
    if stage == 0 and manager.options.stage.fixes_order:
        where = "with deterministic.enabled"
    warn_once(
        f"{called}: clips nothing, since {where} the engine holds the gradients and param.grad is None; {instead}"
    )
    return True
