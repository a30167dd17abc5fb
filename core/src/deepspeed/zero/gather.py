"""`GatheredParameters`: sharded parameters made whole for a while, and parameters that other modules read (stage 3).

In stages 0, 1 and 2 every rank holds whole parameters, so the context gives them as they are; with `modifier_rank`
those that an engine trains are broadcast at its end, so that a script that changes them on one rank parts no ranks.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter

from deepspeed._absent_members import absent_members
from deepspeed.comm.give_up import give_up
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.parted import in_call
from deepspeed.errors import StateError
from deepspeed.zero.gathered_changes import GatheredChanges
from deepspeed.zero.managed import manager_of, note_write
from deepspeed.zero.module_hooks import EXTERNAL
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of
from deepspeed.zero.unit_groups import broadcast_from


@absent_members("runtime.zero.partition_parameters:GatheredParameters")
class GatheredParameters(contextlib.AbstractContextManager["GatheredParameters"]):
    """Context in which sharded parameters are whole. A collective: all ranks enter and leave it together.

    Args:
        params: one parameter, or any iterable of them. A parameter brings those that are gathered with it. Tensors that
            are not sharded are left as they are; None, as a layer without bias has it, is passed over.
        modifier_rank: global rank whose changes count: on leaving it broadcasts the whole parameters, and every rank
            keeps its shard of them, also of the fp32 master weights. Of experts that this rank does not hold, those of
            the first rank that does count. None: the parameters are only read, and changes are dropped, of which those
            that are seen are an error (`gathered_changes.py`).
        fwd_module: a module whose forward reads the parameters, which are external to it.
        enabled: False turns the context off.

    Raises:
        TypeError: for anything else in `params`.
        ValueError: if `modifier_rank` is no rank of the job; on leaving, on a rank that has set `param.data` of a
            parameter to a value of another shape.
        StateError: on entering, where this object is entered already; on leaving without `modifier_rank`, where
            parameters were changed: on every rank, where the context has gathered something.

    Contexts may be nested, each an object of its own: what an outer one gathered stays whole when an inner one ends.
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
        self._held: list[tuple[ParamUnit, bool]] = []  # whether it is released when no other context holds it
        self._changes: GatheredChanges | None = None  # made while it is entered
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
        except StateError:  # also of a module that reads them: its forward ends
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
        """An exception ends the context on this rank, and is being handled. Peers, who may wait for it where the
        context begins or ends, raise."""
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
        """The units of the parameters, in the same order on all ranks: a list made from a set differs by rank."""
        units = {unit for param in self.params if (unit := unit_of(param)) is not None}
        return sorted(units, key=lambda unit: min(param.ds_id for param in unit.params))  # type: ignore[attr-defined]

    def _small_params(self) -> list[Any]:
        """The parameters that stage 3 keeps whole, in the same order on all ranks."""
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
    """The parameters of an argument `params`."""
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
    """Whether it is a small parameter, which stage 3 does not shard; not a buffer, or one of no engine."""
    return getattr(param, "ds_persist", False) and param.ds_world_size > 1


def register_external_parameter(module: Module, parameter: Any) -> None:
    """Say that `module`'s forward reads a parameter of another module.

    Stage 3 gathers it with the module; in other stages it is whole anyway.

    Raises:
        TypeError: if `parameter` is not a Parameter.
    """
    _check(parameter)
    module.__dict__.setdefault(EXTERNAL, {})[parameter] = None


def unregister_external_parameter(module: Module, parameter: Any) -> None:
    """Take `register_external_parameter` back.

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
    """The model, or an engine's, with whole weights while a generation calls it token by token. A collective."""
    module = getattr(model, "module", model)
    with GatheredParameters(list(module.parameters())):
        yield module
