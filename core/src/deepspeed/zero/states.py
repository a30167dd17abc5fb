"""`States` says whether this rank's weights and optimizer states can be used: all present, and all of one step.

Code that reads or writes them checks first: a backward, a step, a save, `safe_get_full_fp32_param`.

`OutsideChanges` detects values that others than the engine assign to attached parameters between steps (all stages).
`param.data = value` (`vector_to_parameters`, pruning, averages of weights) moves a parameter to other memory than the
engine's, which no update would reach. `param.copy_(value)` (`load_state_dict`) changes a weight in low precision, and
the next step would restore its former value from the master weight. The engine takes over both before it reads or
writes master weights: the parameter gets its own memory back with the new value, and so does the master weight.

An in-place operation on `param.data`, which torch does not count, is not detected if the parameter has a master weight.
Sharded parameters have no values that could change between steps; `ParamUnit` handles them.

A conversion (`module.half()`, `module.to("meta")`) cannot be taken over. It is refused only when a call needs the
parameters: a script may convert the module when training is over.

[Note: cheap checks] Every step checks for changes, so the check is one comparison per parameter and kind of change, in
C: about 0.1 us each.
"""

import itertools
from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from deepspeed.comm import failure
from deepspeed.errors import StateError, first_line
from deepspeed.zero.managed import manager_of
from deepspeed.zero.offload.moved_states import MovedStates
from deepspeed.zero.unit import Unit

#: numbers the `States` of this process; ranks create them in the same order
_numbers = itertools.count()
_num_writes = 0


def note_write() -> None:
    """Count that an engine writes weights: in an update, a load or a `safe_set_...`."""
    global _num_writes
    _num_writes += 1


def num_writes() -> int:
    """Return how often `note_write` was called; while the number stays the same, no engine has written weights."""
    return _num_writes


class States:
    """`States` refuses calls that need states which were moved or which a failure left half written.

    Attributes:
        moved: the states in host memory (`offload_states`); None: they are where a step needs them.
        outside_changes: detects changes of the attached parameters; None before there are any.
        broken_by: the failure that left weights of two steps or two checkpoints; None: there was none.
        wait_for_copy: returns when no `PendingTensor` is read any more; called before states change or move.
    """

    def __init__(self) -> None:
        self.moved: MovedStates | None = None
        self.outside_changes: OutsideChanges | None = None
        self.broken_by: str | None = None
        self.wait_for_copy: Callable[[], None] = lambda: None
        self._number, self._num_restored = next(_numbers), 0
        self._num_told = failure.num_told

    def require(self, asked: str, *, weights_only: bool = False) -> None:
        """Refuse a call that needs states that are all present and all of one step.

        Args:
            asked: name of the function that the user called.
            weights_only: whether the call only reads the weights with which modules compute.

        Raises:
            StateError: if `offload_states` has moved the states, or something failed while they were written; names
                the call to make.
        """
        self.require_unmoved(asked, weights_only=weights_only)
        if self.broken_by is None and self._num_told != failure.num_told:
            self._num_told = failure.num_told
            self.broken_by = failure.broken(self._name) or None
        if self.broken_by is not None:
            raise StateError(
                f"{asked}: {self.broken_by}, so weights may be of two steps; load a checkpoint with the optimizer's "
                "states, on all ranks, or make a new engine"
            )

    def require_unmoved(self, asked: str, *, weights_only: bool = False) -> None:
        """Refuse a call that needs states which `offload_states` has moved. Unlike `require`, accept states of two
        steps, because a load replaces them.

        Raises:
            StateError: if they were moved; names the call to make.
        """
        moved = self.moved
        if moved is not None and (moved.has_weights or not weights_only):
            kinds = ", ".join(sorted(moved.kinds))
            raise StateError(
                f"{asked}: found {kinds} in host memory since offload_states(); call engine.reload_states() first"
            )

    @property
    def _name(self) -> str:
        """The name of these states until they are restored again."""
        return f"{self._number}/{self._num_restored}"

    def break_by(self, error: BaseException) -> None:
        """Note that an update failed on this rank. Peers may have completed the update; they refuse to continue once
        they learn of the failure, so that none waits for this rank."""
        self.broken_by = f"the last step failed inside its update ({first_line(error)})"
        failure.note_broken(self._name, self.broken_by)

    def restored(self) -> None:
        """Note that all states were loaded on all ranks."""
        self.broken_by = None
        self._num_restored += 1

    def reload(self, *, non_blocking: bool) -> None:
        """Move states back to where a step needs them if `offload_states` has moved them."""
        moved, self.moved = self.moved, None
        if moved is not None:
            moved.put_back(non_blocking=non_blocking)

    def take_outside_changes(self) -> None:
        """Take over values that others than the engine assigned to parameters; see `OutsideChanges`. Called before
        master weights are read or written.

        Raises:
            StateError: if a value cannot be taken over; names the parameter.
        """
        if self.outside_changes is not None and self.moved is None:
            self.outside_changes.take()

    def refuse_converted(self) -> None:
        """Raise after a failed forward if the module was converted since `initialize`.

        Raises:
            StateError: names the parameter and the fix; its cause is the exception that is being handled.
        """
        if self.outside_changes is not None and self.moved is None:
            self.outside_changes.refuse_converted()


class _ParamPlace(NamedTuple):
    owner: Module
    name: str  # name of the parameter in its owner
    path: str  # path of the parameter in the model


class _Link(NamedTuple):
    children: dict[str, Module | None]  # children of a module
    name: str
    child: Module


class OutsideChanges:
    """`OutsideChanges` detects changes of parameters by others. `Sharding` creates it when its units are complete.

    Args:
        module: the model.
        units: all units of the engine.
        name_of: returns a parameter's name, for errors.
    """

    def __init__(self, module: Module, units: Sequence[Unit], name_of: Callable[[Tensor], str]) -> None:
        self._module = module
        self._name_of = name_of
        self._units = list(units)
        own = {id(param): param for unit in units for param in unit.params}
        places = {key: place for key, place in _places_in(module).items() if key in own}
        self._params = [own[key] for key in places]
        self._places = list(places.values())
        self._links = links_in(module)
        homes = [pair for unit in units for pair in unit.homes()]
        self._placed = [param for param, _ in homes]
        self._homes = [home for _, home in homes]
        self._home_of = {id(param): home for param, home in homes}
        self._free = [param for unit in units if unit.is_free for param in unit.params]
        self._kinds = [(param.shape, param.dtype) for param in self._free]
        self._rounded = [param for unit in units if unit.has_masters for param in unit.params]
        forms = {id(param): (param.dtype, param.device) for param in self._params}
        self._forms = [forms[key] for key in places]  # dtype and device by entry of `self._params`
        self._versions: dict[int, int] = {}
        self.accept()

    def accept(self) -> None:
        """Note that the master weights contain all in-place changes so far."""
        self._versions = {id(param): param._version for param in self._rounded}

    def drop(self) -> None:
        """Drop all changes, since the weights are about to be written from the master weights."""
        for param, home in zip(self._placed, self._homes, strict=True):
            param.data = home
        self.accept()

    def take_of(self, param: Parameter) -> None:
        """Call `take` if this parameter was changed."""
        home = self._home_of.get(id(param))
        if home is not None and not (
            param.is_set_to(home) and self._versions.get(id(param), param._version) == param._version
        ):
            self.take()

    def take(self) -> None:
        """Take over everything that was changed since the last call.

        Raises:
            StateError: if a parameter was replaced, or its value has another shape or dtype; names the parameter.
        """
        found = [place.owner._parameters.get(place.name) for place in self._places]
        if not (all(map(is_, found, self._params)) and are_unchanged(self._links)):
            self.refuse_converted()
            self._follow(found)
        if not all(map(Tensor.is_set_to, self._placed, self._homes)):
            self._take_assigned()
        if [(param.shape, param.dtype) for param in self._free] != self._kinds:
            for param, (shape, dtype) in zip(self._free, self._kinds, strict=True):
                self._refuse_other(param, shape, dtype)
        if [param._version for param in self._rounded] != list(self._versions.values()):
            self._to_masters({id(param) for param in self._rounded if param._version != self._versions[id(param)]})
            self.accept()

    def _take_assigned(self) -> None:
        changed = [pair for pair in zip(self._placed, self._homes, strict=True) if not pair[0].is_set_to(pair[1])]
        for param, home in changed:
            self._refuse_other(param, home.shape, home.dtype)
        own = {home.untyped_storage().data_ptr() for home in self._homes}
        values = [param.data for param, _ in changed]  # may be views of one another, or transposed
        values = [value.clone() if value.untyped_storage().data_ptr() in own else value for value in values]
        for (param, home), value in zip(changed, values, strict=True):
            home.copy_(value)
            param.data = home
        self._to_masters({id(param) for param, _ in changed})

    def _to_masters(self, changed: set[int]) -> None:
        for unit in self._units:
            for place, param in enumerate(unit.params):
                if id(param) in changed:
                    unit.take_changes(place)

    def refuse_converted(self) -> None:
        """Raise if the module was converted; also called after a failed forward.

        Raises:
            StateError: if a parameter has another dtype or device than the engine trains; names it. Its cause is the
                exception that is being handled.
        """
        for param, place, (dtype, device) in zip(self._params, self._places, self._forms, strict=True):
            found = place.owner._parameters.get(place.name)
            if found is None or ((found.dtype, found.device) == (dtype, device)):
                continue
            if found.is_meta or (found is param and found.numel() > 0):
                raise StateError(_conversion(self._name_of(param), found, dtype, device))

    def _refuse_other(self, param: Parameter, shape: torch.Size, dtype: torch.dtype) -> None:
        if param.shape == shape and param.dtype != dtype:
            raise StateError(_conversion(self._name_of(param), param, dtype, param.device))
        if param.shape != shape:
            raise StateError(
                f"parameter {self._name_of(param)}: found a value of shape {tuple(param.shape)} in {param.dtype} that "
                f"was put into it after initialize(), where the engine trains shape {tuple(shape)} in {dtype}; "
                "assign values of this shape and dtype, or change the model before initialize()"
            )

    def _follow(self, found: Sequence[Parameter | None]) -> None:
        """Find the parameters again that are not in their places. Parameters that are no longer in the model, such as
        those of a removed layer, have no gradient and need no place.

        Raises:
            StateError: if another parameter is in the place of one of them, so that no engine would train it.
        """
        now, named = _places_in(self._module), dict(self._module.named_parameters())
        for param, place, other in zip(self._params, self._places, found, strict=True):
            if id(param) in now:
                continue
            others = (other, named.get(place.path))  # in the same module, or in a module that replaces it
            if any(each is not None and each.requires_grad and manager_of(each) is None for each in others):
                raise StateError(
                    f"parameter {self._name_of(param)}: found another Parameter in its place since initialize(), as "
                    "load_state_dict(assign=True) or a new module puts it there. The optimizer does not have it, so it "
                    "would not be trained; load without assign=True, copy values with param.data.copy_(value), or give "
                    "the new parameter to engine.optimizer.add_param_group"
                )
        forms = zip(self._params, self._forms, strict=True)
        self._forms = [form for param, form in forms if id(param) in now]
        self._params = [param for param in self._params if id(param) in now]
        self._places = [now[id(param)] for param in self._params]
        self._links = links_in(self._module)


def _conversion(name: str, found: Tensor, dtype: torch.dtype, device: torch.device) -> str:
    """Return the error message for a parameter with the value `found` that the engine has in `dtype` on `device`."""
    if found.is_meta:
        advice = "It has no values there, so build the model and the engine again"
    elif found.device != device:
        advice = f"Move the module back with module.to({str(device)!r}); engine.offload_states() frees a device"
    else:
        precision = {
            torch.float16: "set fp16.enabled in the configuration",
            torch.bfloat16: "set bf16.enabled in the configuration",
            torch.float32: "train with neither bf16.enabled nor fp16.enabled in the configuration",
        }.get(found.dtype, "convert the model before initialize(), with neither bf16.enabled nor fp16.enabled")
        advice = f"To train in {found.dtype} {precision}; else convert the module back with module.to({dtype})"
    return (
        f"parameter {name}: found a value of shape {tuple(found.shape)} in {found.dtype} on {found.device}, as "
        f"module.to(...) or .half() after initialize() leave it, where the engine trains it in {dtype} on {device}. "
        f"{advice}. When training is over, call engine.destroy() before"
    )


def _places_in(module: Module) -> dict[int, _ParamPlace]:
    """Return by a parameter's id its place in the first module that has it."""
    places: dict[int, _ParamPlace] = {}
    for path, each in module.named_modules():
        for name, param in each._parameters.items():
            if param is not None:
                places.setdefault(id(param), _ParamPlace(each, name, f"{path}.{name}" if path else name))
    return places


def are_unchanged(links: Sequence[_Link]) -> bool:
    """Return whether every module of `links_in` is still in its place."""
    return all(link.children.get(link.name) is link.child for link in links)


def links_in(module: Module) -> list[_Link]:
    """Return each module's place in its parent, so that a replaced module is detected."""
    return [
        _Link(each._modules, name, child)
        for each in module.modules()
        if not isinstance(each, ScriptModule)  # its children cannot be replaced
        for name, child in each._modules.items()
        if child is not None
    ]
