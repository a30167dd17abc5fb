"""`ShownGradients`: the averaged gradients that a user finds in `param.grad` between backward and step.

Made by a stage whose ranks have whole gradients (`stage0.py`). What is shown are views of bucket memory, so that what
the user does to them, clipping for example, is what the step takes.
"""

import operator
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from deepspeed.zero.flat_group import FlatGroup


class ShownGradients:
    """What `param.grad` shows of the gradients of one step. False while nothing is shown."""

    def __init__(self) -> None:
        self._units: list[tuple[FlatGroup, Tensor]] = []  # with their gradient memory
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

    def show(self, groups: Sequence[FlatGroup], gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Let each used parameter show its part of the gradient memory of its unit, if both have one dtype.

        Args:
            gradients: by unit, [N].
            used: by attached parameter.
        """
        if self._used != used or [id(memory_N) for _, memory_N in self._units] != list(map(id, gradients)):
            self._units = list(zip(groups, gradients, strict=True))
            self._used = list(used)
            self._create_views()
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view
        self._is_shown = bool(self._params)
        self._versions = [gradients_N._version for gradients_N in gradients]

    def _create_views(self) -> None:
        alike = [(group, memory_N) for group, memory_N in self._units if memory_N.dtype == group.dtype]
        places = [(group.first_index + place, param) for group, _ in alike for place, param in enumerate(group.params)]
        self._indices = [index for index, _ in places if self._used[index]]
        self._params = [param for index, param in places if self._used[index]]
        self._views = [self._memory(index) for index in self._indices]
        self._addresses = [view.data_ptr() for view in self._views]

    def _memory(self, index: int) -> Tensor:
        """The gradient memory of the parameter `index`, in its shape."""
        group, memory_N = next(unit for unit in reversed(self._units) if unit[0].first_index <= index)
        place = index - group.first_index
        shape = group.shapes[place]
        return memory_N.narrow(0, group.layout.offsets[place], shape.numel()).view(shape)

    def take(self) -> list[int]:
        """Bring what the user made of `param.grad` into the gradient memory; returns the parameters whose gradient
        was set to None.

        Every rank has all of them, so no communication is needed; the user does the same on every rank.
        """
        if not self._is_shown:
            return []
        found = [param.grad for param in self._params]
        if all(map(operator.is_, found, self._views)) and list(map(Tensor.data_ptr, self._views)) == self._addresses:
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
            self._params[place].grad = self._views[place] = memory

    def were_written(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the gradient memory was written since it was shown, or since the last call."""
        former, self._versions = self._versions, [gradients_N._version for gradients_N in gradients]
        return former != self._versions

    def forget(self) -> None:
        """Nothing is shown any more; `param.grad` is set by the caller."""
        self._is_shown = False
