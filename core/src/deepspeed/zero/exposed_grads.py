"""`ExposedGrads`: the averaged gradients that a user finds in `param.grad` between backward and step.

`Gradients` creates it where all ranks have whole gradients (stage 0). `param.grad` is the view through which the bucket
writes its memory, so the step uses what the user changes in place, such as clipped gradients. If the user assigns other
`.data` to a view, the view gets its memory back before a bucket writes through it again.

At stages 1 to 3 `param.grad` is None between backward and step, so `torch.nn.utils.clip_grad_norm_` and
`clip_grad_value_` silently clip nothing. `hint_at_clipping` adds a warning. Scripts import these functions before an
engine exists, so replacing the names would be too late. Each function is a no-grad wrapper around a function in a cell
of its closure, and the warning is added in that cell.
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
    """`ExposedGrads` lets `param.grad` show the gradients of one step. The object is false while it shows none."""

    def __init__(self) -> None:
        self._units: list[tuple[Unit, Tensor, Sequence[Tensor]]] = []  # with their memory [N] and its views
        self._used: list[bool] = []  # by attached parameter
        # Shown gradients, kept between steps; one entry per shown parameter:
        self._indices: list[int] = []
        self._params: list[Parameter] = []
        self._views: list[Tensor] = []
        self._addresses: list[int] = []  # of the views, which a user may give other `.data`
        self._is_shown = False
        self._versions: list[int] = []  # of the memory, by unit: torch counts writes

    def __bool__(self) -> bool:
        return self._is_shown

    def show(self, units: Units, buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
        """Set `param.grad` of each used parameter to its part of the bucket's memory, if both have one dtype.

        Args:
            buckets: buckets of the units; their buffers live from step to step.
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
        """Return the gradient memory of parameter `index`, in the parameter's shape."""
        for unit, memory_N, _ in self._units:
            if 0 <= (place := index - unit.first_index) < len(unit.params):
                shape = unit.shapes[place]
                return memory_N.narrow(0, unit.layout.offsets[place], shape.numel()).view(shape)
        raise AssertionError(f"the parameter {index} is in no unit")

    def take(self) -> list[int]:
        """Copy the user's changes of `param.grad` to the gradient memory; return the parameters whose gradient was set
        to None.

        Every rank has whole gradients and the user does the same on every rank, so no communication is needed.
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
        """Restore the memory of the views, before gradients are written through them; a user may have kept a view."""
        if self._has_other_data():
            for index, view in zip(self._indices, self._views, strict=True):
                view.data = self._memory(index)

    def were_written(self) -> bool:
        """Return whether the gradient memory was written since it was shown, or since the last call."""
        former, self._versions = self._versions, self._count_versions()
        return former != self._versions

    def _count_versions(self) -> list[int]:
        return [memory_N._version for _, memory_N, _ in self._units]

    def forget(self) -> None:
        """Stop showing gradients; the caller sets `param.grad`."""
        self._is_shown = False


#: by the name in torch's module: the name that scripts call, and the alternative
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
    """Add the warning to torch's functions. Called when an engine with hidden gradients is built. Idempotent."""
    for name, (called, instead) in _INSTEAD.items():
        closure: tuple[CellType, ...] = getattr(getattr(clip_grad, name, None), "__closure__", None) or ()
        if len(closure) == 1 and callable(former := closure[0].cell_contents) and not hasattr(former, "_is_of_zero"):
            closure[0].cell_contents = _hinting(former, called, instead)
        # if torch changes these functions, only the warning is lost


def _hinting(former: Callable[..., Any], called: str, instead: str) -> Callable[..., Any]:
    @functools.wraps(former)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keys: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_hidden(listed, called, instead):
            return None  # torch's clip_grad_value_ would fail for an empty list of gradients
        return former(listed, *args, **keys)

    clip._is_of_zero = True  # type: ignore[attr-defined]
    return clip


def _are_hidden(params: list[Tensor], called: str, instead: str) -> bool:
    """Return whether an engine holds the gradients; warn once if so."""
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
