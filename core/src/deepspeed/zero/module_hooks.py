"""`ModuleHooks` detects when modules use parameters, through hooks on modules and on tensors (stage 3).

    forward of a module       before: gather its units              after: release them
    forward of the root without gradients                           after: ranks compare which units they have gathered
    gradient of an output     gather the module's units (the backward of the module begins)
    gradient of an input      release units whose gradients have all arrived, and frozen units
    the last gradient of a unit has arrived                         release it (hook in `gradient_reduction.py`)
    the end of the backward                                         release all

Hooks are registered on the root, on every module that owns a sharded parameter, and on the module of every unit. A
forward inside a backward (activation checkpointing) gathers units and leaves their release to its backward. A backward
with `create_graph=True` builds a graph that reads the weights again but has none of these hooks, so its units stay
gathered until the step.

[Note: who holds whom] The module holds its hooks, and the hooks hold the fetcher and the units. None of them holds the
engine, so the engine is freed when nobody refers to it. A graph holds tensor hooks and, through its leaves, parameters
and their units; these refer to the module's hooks weakly. Otherwise a module that keeps a tensor of its forward would
keep itself alive through the graph, which Python's garbage collector does not see.

[Note: external parameters] A module may read a parameter of another module: a tied weight through its old name, or
`self.other.weight` in a functional call. `_parameters` of every module is a dict that detects such a read: the unit is
gathered, and from then on belongs to the reading module's units. `register_external_parameter` declares it beforehand.

`ParamGathering` connects these hooks to the units (`module_units.py`) and to the fetcher that gathers and releases them
(`fetcher.py`). It controls which parameters of one engine are gathered at which moment of a step. `Sharding` creates it
in stage 3, and again after a param group was added to the optimizer.
"""

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from deepspeed._absent import absent_members
from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.log import warn_once
from deepspeed.parallel.running import tensors_in
from deepspeed.zero.backward_window import is_in_backward
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.gradient_reduction import GradientReduction
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_marks import WITHOUT_ENGINE, ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of
from deepspeed.zero.redistribute import load_parts, saved_part, whole_of_parts
from deepspeed.zero.states import are_unchanged, links_in

#: torch's errors about a 1-D tensor without elements: "vec (0)", "shape [0]", "tensor b (0)", "got 1-D tensor"
_EMPTY = re.compile(r"[(\[]0[)\]]|1-?D\b|2-?D\b|at least \w+ dimensions")


def add_released_hint(error: Exception, params: Iterable[Tensor]) -> None:
    """Append a hint to the message of `error` if a forward may have failed because a parameter is sharded (stage 3).

    The engine calls it with the exception of the module's forward; the error keeps its type and traceback.

    Args:
        params: the module's parameters.
    """
    if not _EMPTY.search(str(error)) or not any(_is_released(param) for param in params):
        return
    hint = (
        "in ZeRO stage 3 a parameter is empty, of shape (0,), outside of its module's forward and backward; if one "
        "module uses a parameter of another, call deepspeed.zero.register_external_parameter(module, parameter)"
    )
    error.args = (f"{error}; {hint}", *error.args[1:])


def _is_released(param: Tensor) -> bool:
    return getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE


#: attribute of a module: parameters of other modules that its forward reads
EXTERNAL = "_ds_external_params"
#: attribute that `torch.compile` gives to a function it has compiled
COMPILED = "_torchdynamo_orig_callable"


@absent_members("runtime.zero.parameter_offload:DeepSpeedZeRoOffload")
class ModuleHooks:
    """`ModuleHooks` holds hooks on all modules of `module`; libraries know it as `optimizer.parameter_offload`.

    Args:
        fetcher: gathers and releases units.
        units: units of the engine.
    """

    def __init__(self, module: Module, fetcher: ParamFetcher, units: ModuleUnits) -> None:
        self.module = module
        self.param_coordinator = fetcher
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []  # on modules; hooks on tensors are freed with their graph
        self._units = units
        self._units_of_module = units.of_module
        self._active: list[Module] = []  # modules whose forward is running, innermost last
        self._seen: list[tuple[Module, Parameter]] = []  # detected external parameters that were not registered
        self._names = {each: name for name, each in module.named_modules()}
        self._links = links_in(module)
        self._own = weakref.ref(self)
        for unit in fetcher.units:
            unit.hooks_ref = self._own
        if any(map(_is_compiled, module.modules())):
            self.leave_out_of_graphs()
        else:
            self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: Module, num_modules: int = 0) -> None:
        """Register the hooks on `module` and all its submodules; libraries remove them and register them again."""
        for each in module.modules():
            each.ds_external_parameters = _ExternalParameters(each)  # type: ignore[assignment]
            if (hook := each.__dict__.pop(WITHOUT_ENGINE, None)) is not None:
                hook.remove()
        if not any(unit.is_sharded for unit in self.param_coordinator.units):
            return
        for each in module.modules():
            if each._parameters and not isinstance(each._parameters, _WatchedParameters):
                each._parameters = _WatchedParameters(each._parameters, weakref.ref(self))  # type: ignore[assignment]
            if each is self.module or each in self._units_of_module or any(map(unit_of, _own_params(each))):
                before = each.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
                self.forward_hooks += [before, each.register_forward_hook(self._after_forward)]

    def __reduce__(self) -> Any:  # for a copy of the module
        return _NoHooks, ()

    def params(self) -> Iterator[Parameter]:
        """Return the parameters that these hooks gather."""
        return (param for unit in self.param_coordinator.units for param in unit.params)

    def install_again(self) -> None:
        """Register the hooks again after a library removed them."""
        self._remove_handles()
        self._register_deepspeed_module(self.module)

    def leave_out_of_graphs(self) -> None:
        """Make `torch.compile` (called by the engine or the user) break its graphs around the hooks, so that it does
        not trace their collectives."""
        for name in ("_before_forward", "_after_forward", "saw_read"):
            setattr(self, name, torch.compiler.disable(getattr(self, name)))
        self.install_again()

    def _remove_handles(self) -> None:
        for handle in (*self.forward_hooks, *self.backward_hooks):
            handle.remove()
        self.forward_hooks, self.backward_hooks = [], []

    def remove(self) -> None:
        """Remove all hooks and attributes. Idempotent."""
        self._remove_handles()
        for each in self.module.modules():
            if isinstance(each._parameters, _WatchedParameters):
                each._parameters = dict(each._parameters)
            for name in ("ds_external_parameters", EXTERNAL):
                each.__dict__.pop(name, None)

    def give_up(self, unit: ParamUnit) -> None:
        """Leave a unit in its sharded state to another engine that trains some of its parameters."""
        self.param_coordinator.forget(unit)
        self._units.forget(unit)
        unit.hooks_ref = None

    def abandon(self) -> None:
        """Forget modules whose forward a failure has ended, and detected external parameters: ranks that failed at
        other places have detected others."""
        self.reset()
        for module, param in self._seen:
            module.__dict__.get(EXTERNAL, {}).pop(param, None)
        self._seen.clear()

    def reset(self) -> None:
        """Forget modules whose forward an exception has ended."""
        self._active.clear()
        for unit in self.param_coordinator.units:
            unit.num_users = 0

    # ---- forward -------------------------------------------------------------------------------------------------

    def _before_forward(self, module: Module, args: Any, kwargs: Any) -> None:
        in_backward = is_in_backward()
        if not in_backward:
            self._begin_forward(module)
        units = self._units_used_by(module)
        for unit in units:
            self.param_coordinator.use(unit)
        if in_backward:
            self._computed_again(units)
            return
        self._active.append(module)
        for unit in units:
            unit.num_users += 1
        if torch.is_grad_enabled() and module in self._units_of_module:
            self._drop_with_gradients_of(module, (args, kwargs))

    def _begin_forward(self, module: Module) -> None:
        if module is self.module:
            self.reset()
        if not self._active:
            self.param_coordinator.begin_forward()
            if not torch.is_grad_enabled():
                self._warn_of_removed()

    def _warn_of_removed(self) -> None:
        """Warn of trained parameters that left the model while sharded: a merge of an adapter added nothing."""
        if are_unchanged(self._links):
            return
        self._links, present = links_in(self.module), set(self.module.modules())
        for unit in [unit for each, units in self._units_of_module.items() if each not in present for unit in units]:
            was_whole = unit.num_changes_seen == unit.num_changes or unit.status is not ZeroParamStatus.NOT_AVAILABLE
            if was_whole or not any(param.requires_grad for param in unit.params):
                continue
            warn_once(
                f"zero stage 3: {unit.names[0]} and more that the engine trains left the model while sharded. "
                "Merging them into other weights (merge_and_unload) added nothing; load a checkpoint, and merge "
                "inside deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)"
            )
            break

    def _computed_again(self, units: list[ParamUnit]) -> None:
        """Expect all gradients of `units` again, because a checkpoint reruns a forward in the backward. A reentrant one
        then runs its own backward, in which they arrive again; the units must not be released before the last one."""
        for unit in units:
            unit.num_missing = unit.num_gradients

    def _after_forward(self, module: Module, args: Any, output: Any) -> None:
        units = self._units_used_by(module)
        in_backward = is_in_backward()
        has_graph = units and torch.is_grad_enabled() and self._use_with_gradients_of(units, module, output)
        if in_backward:
            return
        while self._active and self._active.pop() is not module:  # a forward that an exception ended
            pass
        for unit in units:
            unit.num_users = max(unit.num_users - 1, 0)
            if unit.num_users == 0 and has_graph is not None:
                self.param_coordinator.release_or_keep(unit)
        if module is self.module and not torch.is_grad_enabled():
            self.param_coordinator.compare_order()

    def _units_used_by(self, module: Module) -> list[ParamUnit]:
        """Return the units of the module, of its own parameters and of its external parameters."""
        units = dict.fromkeys(self._units_of_module.get(module, ()))
        for param in _own_params(module):
            unit = unit_of(param)  # a unit of another engine is gathered by that engine's hooks on the module
            if unit is not None and (unit.hooks_ref is self._own or unit.hooks in (None, self)):
                units[unit] = None
        for param in module.__dict__.get(EXTERNAL, ()):
            unit = unit_of(param)
            if unit is not None:
                units[unit] = None
        return list(units)

    # ---- backward ------------------------------------------------------------------------------------------------

    def _use_with_gradients_of(self, units: list[ParamUnit], module: Module, output: Any) -> bool | None:
        """Gather `units` when a backward reaches an output. None: no output can be watched, so they stay gathered."""
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not watched:
            if output is None or _is_plain(output):
                return False
            warn_once(
                f"zero stage 3: the outputs of {self._names.get(module) or 'the module'} ({type(output).__name__}) "
                "hold no tensor that the engine can find, so its parameters stay whole until the backward is over; "
                "return tensors, or lists, tuples, dicts or dataclasses of them"
            )
            return None

        own = self._own

        def begin(grad: Tensor) -> None:
            hooks = own()
            for unit in units:
                if hooks is None:  # only this graph is left of the module
                    unit.gather()
                    continue
                hooks.param_coordinator.use(unit)
                if torch.is_grad_enabled():  # create_graph=True
                    hooks.param_coordinator.keep(unit)

        for tensor in watched:
            tensor.register_hook(begin)
        return True

    def _drop_with_gradients_of(self, module: Module, inputs: Any) -> None:
        """Release the units of `module` when the gradients of its inputs are computed."""
        units, own = tuple(self._units_of_module[module]), self._own

        def end(grad: Tensor) -> None:
            hooks = own()
            for unit in units:
                if hooks is not None and unit.num_missing == 0:
                    hooks.param_coordinator.release_or_keep(unit)

        for tensor in tensors_in(inputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(end)

    # ---- external parameters -------------------------------------------------------------------------------------

    def saw_read(self, param: Parameter) -> None:
        """Gather a sharded parameter that was read through its module; see [Note: external parameters]."""
        unit = unit_of(param)
        assert unit is not None
        if not self._active:
            if is_in_backward():  # a checkpoint recomputes a function of a module without the module's forward
                self.param_coordinator.use(unit)
                self._computed_again([unit])
            return
        module = self._active[-1]
        external = module.__dict__.setdefault(EXTERNAL, {})
        if param not in external:
            external[param] = None
            self._seen.append((module, param))
            unit.num_users += 1  # `_after_forward` of the module decrements it
        self.param_coordinator.use(unit)


class _NoHooks(ModuleHooks):
    """`_NoHooks` replaces `ModuleHooks` in a copy of the module, whose parameters are plain."""

    def __init__(self) -> None:
        self.module = Module()
        self._own = weakref.ref(self)
        self._units_of_module, self._active, self._seen = {}, [], []

    def _begin_forward(self, module: Module) -> None:
        """Do nothing: no unit is gathered."""

    def _units_used_by(self, module: Module) -> list[ParamUnit]:
        return []


class _WatchedParameters(dict[str, Any]):
    """`_WatchedParameters` is `_parameters` of a module; it detects reads of a parameter that is not gathered."""

    def __init__(self, parameters: Mapping[str, Any], hooks: "weakref.ref[ModuleHooks]") -> None:
        super().__init__(parameters)
        self._hooks = hooks

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
            hooks = self._hooks()
            if hooks is not None:
                hooks.saw_read(param)
        return param

    def __reduce__(self) -> Any:  # copied and pickled as an ordinary dict
        return dict, (list(self.items()),)


def _is_compiled(module: Module) -> bool:
    """Return whether `torch.compile` returned it, its `compile()` was called, or its forward is a compiled function."""
    compiled = module._compiled_call_impl is not None or hasattr(module.__dict__.get("forward"), COMPILED)
    return compiled or "_orig_mod" in module._modules


def _own_params(module: Module) -> Iterator[Parameter]:
    return (param for param in module._parameters.values() if param is not None)


class _ExternalParameters:
    """`module.ds_external_parameters`; a class, because pickle would look a method up in the class of the module."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def __call__(self) -> Iterator[tuple[str, Parameter]]:
        """Return (name, parameter) pairs that the module's forward reads besides its own parameters."""
        params = self._module.__dict__.get(EXTERNAL, ())
        return ((f"external_{param.ds_id}", param) for param in params)  # type: ignore[attr-defined]


def _is_plain(output: Any) -> bool:
    """Return whether an output surely holds no graph."""
    return isinstance(output, (Tensor, bool, int, float, str)) or not any(True for _ in _members(output))


def _members(output: Any) -> Iterator[Any]:
    if isinstance(output, (list, tuple, set)):
        yield from (each for each in output if not isinstance(each, (Tensor, bool, int, float, str, type(None))))
    elif isinstance(output, Mapping):
        yield from _members(list(output.values()))
    else:
        yield output


class ParamGathering:
    """`ParamGathering` connects one engine's module hooks and gradients to its `ParamFetcher`, which gathers and frees.

    Args:
        module: the model.
        units: units of the engine. Units that another engine shards are gathered by that engine's hooks.
        reduction: reduction of the engine's gradients.
    """

    def __init__(
        self, module: Module, units: ModuleUnits, options: Stage3Options, reduction: GradientReduction
    ) -> None:
        self.units = units
        self._module = module
        self._fetcher = ParamFetcher(
            units.all,
            prefetch_numel=options.prefetch_numel,
            max_live_numel=options.max_live_numel,
            max_reuse_numel=options.max_reuse_numel,
            quantizes=options.quantizes_weights,
            reduction=reduction,
        )
        self._lenders = list(dict.fromkeys(unit.hooks for unit in units.borrowed.values()))
        self._owns_hooks = bool(units.all) or not self._lenders
        hooks = self._lenders[0] if not self._owns_hooks else ModuleHooks(module, self._fetcher, units)
        self.hooks: ModuleHooks = hooks

    def begin_backward(self, trained: Iterable[ParamUnit]) -> None:
        """Count the gradients that each unit of `trained` expects."""
        self._fetcher.begin_backward()
        for unit in trained:
            unit.num_missing = unit.num_gradients = len(unit.params)

    def gradient_arrived(self, unit: ParamUnit) -> None:
        """Count a gradient of `unit` that was taken, and release the unit after its last one.

        The hook of a parameter (`GradientReduction.arrived`) calls it through `Gradients`.
        """
        unit.num_missing -= 1
        if unit.num_missing == 0 and unit.num_users == 0:
            self._fetcher.release_or_keep(unit)

    def end_backward(self) -> None:
        """Release units that no module uses."""
        for unit in self.units.all:
            if unit.num_users == 0:
                self._fetcher.release_or_keep(unit)

    def refuse_left_whole(self) -> None:
        """Refuse changes of parameters that an evaluation left gathered; called when a step begins."""
        self._fetcher.refuse_left_whole()

    def finish(self) -> None:
        """Wait for the all-gathers in flight."""
        self._fetcher.finish_all()

    def release(self) -> None:
        """Release every unit, because the shards are about to change."""
        self._fetcher.release_all()
        self.shards_changed()

    def abandon(self) -> list[tuple[GroupBackend, Work]]:
        """Forget the all-gathers in flight without waiting for them; return the group and the work of each. The caller
        calls `shards_changed` next."""
        self.hooks.abandon()
        return list(self._fetcher.abandon())

    def shards_changed(self) -> None:
        """Invalidate copies of the shards: the weights of all units change, or ranks may have gathered differently.

        Raises:
            OSError: if values of offloaded shards could not be written.
        """
        for unit in self.units.all:
            unit.shards_changed()

    def release_borrowed(self) -> None:
        """Release the units of other engines that hold parameters of this engine: their shards are about to change."""
        for hooks in dict.fromkeys(unit.hooks for unit in self._borrowed_units()):
            if hooks is not None:
                hooks.param_coordinator.release_all()
        for unit in self._borrowed_units():
            unit.shards_changed()

    def _borrowed_units(self) -> list[ParamUnit]:
        return list(dict.fromkeys(unit for param in self.units.borrowed if (unit := unit_of(param)) is not None))

    def load_parts(self, parts: dict[str, Tensor], backend: GroupBackend) -> None:
        """Load the results of `saved_part`, by name, for parameters of no optimizer or of another engine's."""
        found: dict[ParamUnit, dict[Parameter, Tensor]] = {}
        for name, param in self._module.named_parameters():
            if name in parts and (unit := unit_of(param)) is not None:
                found.setdefault(unit, {})[param] = parts[name]
        for unit, its in found.items():  # another engine's unit may have parameters that this engine lacks
            load_parts(unit, [its[param] if param in its else saved_part(param) for param in unit.params])
        for name, param in self._module.named_parameters():
            if name in parts and unit_of(param) is None:  # it was sharded when saved
                param.data.copy_(whole_of_parts(parts[name], param.shape, backend))
        self.accept_load()

    def accept_load(self) -> None:
        """Accept that `load_state_dict` has copied empty tensors into the released parameters: that is no change."""
        for unit in (*self.units.all, *self._borrowed_units()):
            unit.accept_changes()

    def remove_hooks(self) -> None:
        """Remove the hooks; hooks of other engines stay. Idempotent."""
        if self._owns_hooks:
            self._owns_hooks = False
            self.hooks.remove()
            others = {each for param in self._module.parameters() if (unit := unit_of(param)) and (each := unit.hooks)}
            for each in others - {self.hooks}:
                each.install_again()
