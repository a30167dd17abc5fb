"""`GatheredParameters` gathers sharded parameters for a while; it also registers external parameters (stage 3).

In stages 0, 1 and 2 every rank holds whole parameters, so there is nothing to gather. With `modifier_rank`, parameters
that an engine trains are broadcast when the context ends, so that a change on one rank reaches all ranks.

`GatheredChanges` handles changes inside a `GatheredParameters` without `modifier_rank` (stage 3).

Without `modifier_rank` nothing defines which rank's changes count, so every rank drops them: the shards of large
parameters were not touched, and small parameters, which every rank keeps whole, get their former values back. Dropping
a change silently would hide a mistake. So a rank that detects a change informs the others when the context ends, all
ranks compare their whole parameters with the shards, and all raise. A rank detects what torch counts: an in-place
operation on a parameter, or a new `param.data`. With `zero_optimization.enable_sanity_checks` all ranks compare every
time, which also finds operations on `param.data`.

[Note: the outermost context] Of nested contexts, the outermost one that holds a parameter checks it: an outer context
with `modifier_rank` keeps the changes of an inner one. A load, an update or `safe_set_...` inside the context is not a
change by the user; then the parameter is not checked.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from deepspeed._absent import absent_members
from deepspeed.comm.backend import GroupBackend, host_or_device
from deepspeed.comm.give_up import give_up
from deepspeed.comm.parted import in_call
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.errors import StateError, counted
from deepspeed.log import warn_once
from deepspeed.zero.managed import manager_of
from deepspeed.zero.module_hooks import EXTERNAL
from deepspeed.zero.param_marks import KEPT, ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, is_rounded, is_same, unit_of
from deepspeed.zero.states import note_write, num_writes
from deepspeed.zero.unit_groups import broadcast_from


@absent_members("runtime.zero.partition_parameters:GatheredParameters")
class GatheredParameters(contextlib.AbstractContextManager["GatheredParameters"]):
    """`GatheredParameters` is a context with whole parameters. A collective: all ranks enter and leave it together.

    Args:
        params: one parameter, or an iterable of parameters. Parameters of the same unit are gathered as well. Tensors
            that are not sharded stay as they are; None, as in a layer without bias, is skipped.
        modifier_rank: global rank whose changes count: when the context ends, it broadcasts the whole parameters, and
            every rank keeps its shard of them and of the fp32 master weights. For experts that this rank does not hold,
            the first rank that holds them counts. None: the parameters are only read; changes are dropped, and detected
            changes raise an error (`GatheredChanges`).
        fwd_module: a module whose forward reads the parameters as external parameters.
        enabled: False turns the context off.

    Raises:
        TypeError: for anything else in `params`.
        ValueError: if `modifier_rank` is not a rank of the job; at the end, on a rank that has set `param.data` of a
            parameter to a value of another shape.
        StateError: at the beginning, if this object is entered already; at the end without `modifier_rank`, if
            parameters were changed: on every rank, if the context has gathered something.

    Contexts may be nested, each as an object of its own: parameters of the outer one stay whole when the inner ends.
    """

    def __init__(
        self,
        params: Parameter | Iterable[Parameter],
        modifier_rank: int | None = None,
        fwd_module: Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = _listed(params)
        _check_rank(modifier_rank)
        self.enabled = enabled
        self._modifier_rank = modifier_rank
        self._held: list[tuple[ParamUnit, bool]] = []  # with whether to release the unit after its last context
        self._changes: GatheredChanges | None = None  # set while the context is entered
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> "GatheredParameters":
        if self._changes is not None:
            raise StateError(
                "GatheredParameters: found this object entered already, whose parameters the inner context would "
                "release; make one for each with statement"
            )
        if self.enabled:
            try:
                with in_call("GatheredParameters"):
                    self._hold()
                self._changes = GatheredChanges(self._held, self._small_params())
            except BaseException:
                self._tell_peers()
                self._let_go(is_left=True)
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        is_left = True
        try:
            if isinstance(exc[1], Exception | KeyboardInterrupt):
                self._tell_peers()
            elif self._changes is not None and exc[0] is None:
                with in_call("GatheredParameters"):
                    if self._modifier_rank is not None:
                        self._keep_changes(self._modifier_rank)
                    else:
                        self._changes.refuse()
                is_left = False
        except StateError:  # release units that a running forward reads, too: the error ends that forward
            self._held = [(unit, True) for unit, _ in self._held]
            raise
        except BaseException:
            self._tell_peers()
            raise
        finally:
            self._let_go(is_left=is_left)

    def _hold(self) -> None:
        for unit in self._units():
            is_released = unit.status is not ZeroParamStatus.AVAILABLE or not unit.is_read
            unit.enter_context()
            self._held.append((unit, is_released))

    def _tell_peers(self) -> None:
        """Make peers raise, because an exception ends the context on this rank; they may wait where the context begins
        or ends."""
        if not any(unit.unit_ranks.reduce_group.world_size > 1 for unit in self._units()):
            return
        managers = {manager for param in self.params if (manager := manager_of(param)) is not None}
        for sharding in managers:
            sharding.gradients.abandon()
        if not managers:
            give_up([work for unit in self._units() if (work := unit.abandon()) is not None])

    def _let_go(self, *, is_left: bool) -> None:
        held, self._held = self._held, []
        changes, self._changes = self._changes, None
        if changes is not None:
            changes.close(keeps=self._modifier_rank is not None)
        for unit, is_released in held:
            unit.leave_context(is_left=is_left)
            if is_released:
                unit.release()

    def _units(self) -> list[ParamUnit]:
        """Return the units of the parameters in the same order on all ranks; the order of a set differs by rank."""
        units = {unit for param in self.params if (unit := unit_of(param)) is not None}
        return sorted(units, key=lambda unit: min(param.ds_id for param in unit.params))  # type: ignore[attr-defined]

    def _small_params(self) -> list[Any]:
        """Return the parameters that stage 3 keeps whole, in the same order on all ranks."""
        return sorted({param for param in self.params if _stays_whole(param)}, key=lambda each: each.ds_id)

    def _keep_changes(self, source: int) -> None:
        for unit in self._units():
            unit.keep_assigned()
            unit.broadcast(source)
            unit.take_from_full()
        note_write()
        for param in self._small_params():
            broadcast_from(group_backend(param.ds_process_group), param, source)
        for sharding in dict.fromkeys(manager for param in self.params if (manager := manager_of(param)) is not None):
            if sharding.gathering is None:
                sharding.share_weights(set(self.params), source)
            else:
                sharding.weights_changed(set(self.params))


def _listed(params: Any) -> list[Any]:
    """Return the argument `params` as a list."""
    is_one = isinstance(params, (torch.Tensor, Module, str)) or not isinstance(params, Iterable)
    listed = [params] if is_one else list(params)
    listed = [each for each in listed if each is not None]
    if other := [each for each in listed if not isinstance(each, torch.Tensor)]:
        raise TypeError(
            f"GatheredParameters: found {type(other[0]).__name__}, wanted a parameter or an iterable of parameters, "
            "such as module.parameters()"
        )
    return listed


def _check_rank(modifier_rank: Any) -> None:
    if modifier_rank is None or not torch.distributed.is_initialized():
        return
    world_size = torch.distributed.get_world_size()
    if not isinstance(modifier_rank, int) or not 0 <= modifier_rank < world_size:
        raise ValueError(
            f"GatheredParameters: modifier_rank is {modifier_rank!r}; give a global rank from 0 to {world_size - 1}, "
            "or None if nothing is changed"
        )


def _stays_whole(param: Any) -> bool:
    """Return whether it is a small parameter of an engine, which stage 3 does not shard."""
    return getattr(param, "ds_persist", False) and param.ds_world_size > 1


def register_external_parameter(module: Module, parameter: Any) -> None:
    """Declare that `module`'s forward reads a parameter of another module.

    Stage 3 then gathers the parameter with the module; in other stages the parameter is whole anyway.

    Raises:
        TypeError: if `parameter` is not a Parameter.
    """
    _check(parameter)
    module.__dict__.setdefault(EXTERNAL, {})[parameter] = None


def unregister_external_parameter(module: Module, parameter: Any) -> None:
    """Undo `register_external_parameter`.

    Raises:
        TypeError: if `parameter` is not a Parameter.
    """
    _check(parameter)
    module.__dict__.get(EXTERNAL, {}).pop(parameter, None)


def _check(parameter: Any) -> None:
    if not isinstance(parameter, Parameter):
        raise TypeError(f"register_external_parameter: found {type(parameter).__name__}, wanted a torch.nn.Parameter")


@contextlib.contextmanager
def unwrap_model_for_generation(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model (or the engine's module) with whole weights, for token-by-token generation. A collective."""
    module = getattr(model, "module", model)
    with GatheredParameters(list(module.parameters())):
        yield module


class GatheredChanges:
    """`GatheredChanges` detects changes in a context. The context creates it, may call `refuse`, and calls `close`.

    Args:
        held: units that the context holds, each with whether the context gathered it.
        small: parameters that every rank keeps whole, in the same order on all ranks.
    """

    def __init__(self, held: Sequence[tuple[ParamUnit, bool]], small: Iterable[Any]) -> None:
        outermost = [(unit, gathers) for unit, gathers in held if unit.num_contexts == 1 and unit.is_sharded]
        self._units = [(unit, unit.num_changes) for unit, _ in outermost]
        self._gathered = {unit for unit, gathers in outermost if gathers}
        self._small = [_KeptValue(param) for param in small if KEPT not in vars(param)]

    def refuse(self) -> None:
        """Raise if parameters were changed. A collective if the context has gathered something.

        Raises:
            StateError: names the parameters; raised on every rank of a group that has gathered some.
        """
        found: dict[str, list[_Change]] = {}
        units = [(unit, num_changes) for unit, num_changes in self._units if unit.params]
        all_ranks = [unit.unit_ranks.reduce_group for unit, _ in units] + [kept.ranks for kept in self._small]
        for everyone in dict.fromkeys(all_ranks):  # also if this rank has nothing to check: its peers may have
            its_units = {unit: num for unit, num in units if unit.unit_ranks.reduce_group is everyone}
            its_small = [kept for kept in self._small if kept.ranks is everyone]
            for change in _changed(everyone, its_units, its_small, self._gathered):
                found.setdefault(change.name, []).append(change)
        real = {name: its for name, its in found.items() if not all(each.is_rounded for each in its)}
        if real:
            raise StateError(
                f"GatheredParameters: found {_which(real, 'changed')} in a context without modifier_rank. The change "
                "was dropped, since ranks would differ; give modifier_rank=0, or the rank whose changes count"
            )
        if found:
            warn_once(
                f"GatheredParameters: found {_which(found, 'changed by no more than rounding')} in a context without "
                "modifier_rank, as after adapters were merged and unmerged; the former values stay. If the change "
                "counts, give modifier_rank=0"
            )

    def close(self, *, keeps: bool) -> None:
        """End the context. `keeps`: whether changes are kept; else they are dropped."""
        for kept in self._small:
            kept.close(keeps=keeps)


class _Change(NamedTuple):
    name: str
    rank: int  # global rank that made the change
    is_rounded: bool  # undone up to rounding, as by `merge_adapter()` and `unmerge_adapter()` of peft


class _KeptValue:
    """`_KeptValue` holds the value of a small parameter from the start of its outermost context."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self.name: str = param.ds_name
        self.ranks = group_backend(param.ds_process_group)
        self.checks_values: bool = param.ds_checks_values
        self._home = param.data
        self._value = self._home.clone()
        self._version = param._version
        self._num_writes = num_writes()
        vars(param)[KEPT] = self

    def was_written(self) -> bool:
        """Return whether an engine wrote weights since the context began."""
        return num_writes() != self._num_writes

    def is_seen(self) -> bool:
        """Return whether torch has counted a change."""
        return self.param._version != self._version or not self.param.is_set_to(self._home)

    def is_changed(self) -> bool:
        return not is_same(self.param.data, self._value)

    def is_rounded(self) -> bool:
        return is_rounded(self.param.data, self._value)

    def close(self, *, keeps: bool) -> None:
        vars(self.param).pop(KEPT, None)
        if not keeps and not self.was_written():
            self.param.data = self._home
            self._home.copy_(self._value)


def _changed(
    everyone: GroupBackend, units: Mapping[ParamUnit, int], small: Sequence[_KeptValue], gathered: set[ParamUnit]
) -> list[_Change]:
    """Return the changes of parameters of the group `everyone`. `units` maps each unit to its count of engine writes
    when the context began."""
    compares = any(unit.checks_values for unit in units) or any(kept.checks_values for kept in small)
    has_gathered = any(unit in gathered for unit in units)
    written = [unit.names[0] for unit, num_changes in units.items() if unit.num_changes != num_changes]
    written += [kept.name for kept in small if kept.was_written()]
    own = [unit for unit in units if unit.names[0] not in written]
    seen = {name: False for unit in own for name in unit.seen_changes()}
    of_small = [kept for kept in small if kept.name not in written and kept.is_seen() and kept.is_changed()]
    seen |= {kept.name: kept.is_rounded() for kept in of_small}
    if not compares and not has_gathered:  # peers may not be in this context
        return [_Change(name, torch.distributed.get_rank(), its) for name, its in seen.items()]
    has_seen, has_written = _on_any_rank([bool(seen), bool(written)], everyone)
    if not compares and not has_seen:
        return []
    if has_written:  # maybe on one rank only: then no rank checks these parameters
        written = [name for theirs in all_gather_values(written, backend=everyone) for name in theirs]
    changes: dict[str, bool] = {}
    for unit in units:
        if unit.names[0] not in written:
            changes |= unit.changes()
    changes |= {kept.name: kept.is_rounded() for kept in small if kept.name not in written and kept.is_changed()}
    members = torch.distributed.get_process_group_ranks(everyone.group)
    by_rank = zip(members, all_gather_values(changes, backend=everyone), strict=True)
    return [_Change(name, rank, its) for rank, theirs in by_rank for name, its in theirs.items()]


def _which(changes: Mapping[str, Sequence[_Change]], how: str) -> str:
    name, its = next(iter(changes.items()))
    more = f" and {counted(len(changes) - 1, 'other')}" if len(changes) > 1 else ""
    return f"the parameter {name}{more} {how} on {named_ranks(sorted({each.rank for each in its}))}"


def _on_any_rank(values: Sequence[bool], ranks: GroupBackend) -> list[bool]:
    """Return for each value whether it is true on any rank of `ranks`. A collective."""
    flags_N = torch.tensor([float(value) for value in values], device=host_or_device(ranks.group))
    ranks.all_reduce(flags_N, tag="changes").wait()
    return [value > 0 for value in flags_N.tolist()]
