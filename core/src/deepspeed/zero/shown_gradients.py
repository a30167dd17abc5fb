"""`ShownGradients`: the averaged gradients that a user finds in `param.grad` between backward and step.

Made by a stage whose ranks have whole gradients (`stage0.py`). What is shown are views of bucket memory, so that what
the user does to them, clipping for example, is what the step takes.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from deepspeed.zero.flat_group import FlatGroup


class ShownGradients:
    """What `param.grad` shows of the gradients of one step. False while nothing is shown."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[Tensor, int]] = {}  # by attached parameter, with its address; kept between steps
        self._shown: dict[int, Tensor] = {}  # by attached parameter: what param.grad shows now
        self._versions: list[int] = []  # of the memory, by unit: torch counts what is written into it

    def __bool__(self) -> bool:
        return bool(self._shown)

    def show(self, groups: Sequence[FlatGroup], gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Let each used parameter show its part of the gradient memory of its unit, if both have one dtype.

        Args:
            gradients: by unit, [N].
            used: by attached parameter.
        """
        for group, gradients_N in zip(groups, gradients, strict=True):
            if gradients_N.dtype != group.dtype:
                continue
            for index, param in enumerate(group.params, group.first_index):
                if used[index]:
                    view, address = self._views.get(index, (None, 0))
                    if view is None or view.data_ptr() != address:  # a user has set its `.data`
                        view = self._create_view(index, group, gradients_N)
                    param.grad = self._shown[index] = view
        self._versions = [gradients_N._version for gradients_N in gradients]

    def _create_view(self, index: int, group: FlatGroup, gradients_N: Tensor) -> Tensor:
        place = index - group.first_index
        offset, shape = group.layout.offsets[place], group.shapes[place]
        view = gradients_N.narrow(0, offset, shape.numel()).view(shape)
        self._views[index] = (view, view.data_ptr())
        return view

    def take(self, params: Sequence[Parameter]) -> list[int]:
        """Bring what the user made of `param.grad` into the gradient memory; returns the parameters whose gradient
        was set to None.

        Every rank has all of them, so no communication is needed; the user does the same on every rank.
        """
        dropped = []
        for index, view in self._shown.items():
            grad = params[index].grad
            if grad is None:
                view.zero_()
                dropped.append(index)
            elif grad is not view:
                view.copy_(grad)
        return dropped

    def were_written(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the gradient memory was written since it was shown, or since the last call."""
        former, self._versions = self._versions, [gradients_N._version for gradients_N in gradients]
        return former != self._versions

    def forget(self) -> None:
        """Nothing is shown any more."""
        self._shown = {}
