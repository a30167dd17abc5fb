"""`Sharding` makes one step of one engine and manages its weights, in all stages of ZeRO.

The engine calls, for every micro-batch and then once for the step:

    gradients.window.open / close      around `loss.backward()`; a plain `loss.backward()` does it through hooks
    gradients.reduce()                 finish every collective; all ranks agree on the norm (`gradients.py`)
    update(scale)                      multiply gradients by `scale`, run the optimizer, all-gather new weights
    gradients.zero_grad()

A `Sharding` has parts: `units` lays out the parameters, `gradients` manages the gradients of backwards, `states` says
whether weights and optimizer states can be used, and `gathering` gathers parameters while a module uses them (stage 3).
One table in `stages.py` shows how the stages differ. docs/explanation/one-step.md walks through one step with the
stages side by side. ZeRO: arXiv 1910.02054.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.give_up import give_up
from deepspeed.errors import StateError
from deepspeed.optim import takes_only_sparse
from deepspeed.optim.traits import is_muon, unwrapped
from deepspeed.zero import managed
from deepspeed.zero.gradient_memory import hint_at_clipping
from deepspeed.zero.gradients import BackwardPlan, Gradients
from deepspeed.zero.matrix_exchange import MatrixExchange
from deepspeed.zero.module_hooks import ParamGathering
from deepspeed.zero.param_unit import ParamUnit, freed_memory_returned, unit_of
from deepspeed.zero.redistribute import unwatch, watch
from deepspeed.zero.states import OutsideChanges, States, note_write
from deepspeed.zero.step_agreement import Scalar
from deepspeed.zero.unit_groups import broadcast_from
from deepspeed.zero.units import ShardingOptions, Units
from deepspeed.zero.update import OptimizerUpdate, TouchedRows, multiply, takes_one_pass


def _add_param_group(sharding: "weakref.ref[Sharding]", optimizer: Optimizer) -> Callable[[dict[str, Any]], None]:
    """Return `add_param_group` for the user's optimizer; it calls the engine while the engine lives."""

    def add_param_group(param_group: dict[str, Any]) -> None:
        owner = sharding()
        if owner is None:
            type(optimizer).add_param_group(optimizer, param_group)
        else:
            owner.add_param_group(param_group)

    return add_param_group


def _zero_grad(sharding: "weakref.ref[Sharding]", optimizer: Optimizer) -> Callable[[bool], None]:
    """Return `zero_grad` for the user's optimizer; while the engine lives, it also clears the buckets."""

    def zero_grad(set_to_none: bool = True) -> None:
        owner = sharding()
        if owner is None:
            type(optimizer).zero_grad(optimizer, set_to_none)
        else:
            owner.gradients.zero_grad()

    return zero_grad


class Sharding:
    """`Sharding` reduces the gradients and updates the weights of one engine.

    Attributes:
        stage: the stage of ZeRO, 0 to 3.
        set_locally: parameters of which this rank has set its own elements; the weights of other ranks follow with the
            update.
    """

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        self.options = options
        self.stage = options.stage.number
        self.backend = backend
        self.group = group
        # of the ranks that share a checkpoint; with `local_sgd` each trains in a group of its own
        self.world_size = backend.world_size if group is None else group.size()
        self.rank = backend.rank if group is None else group.rank()
        self.placement = options.placement
        self.units = Units(options, backend, group)
        self.backends = self.units.ranks.backends()
        for ranks in self.backends:
            ranks.connect()  # all ranks are here together; in a backward they may not be
        self.states = States()
        self.gradients = Gradients(self.units, options, backend, self.states)
        self.set_locally: set[Tensor] = set()
        self._module = Module()  # the model
        self._updates: OptimizerUpdate | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's optimizer, which updates the weights; None if the engine only evaluates."""
        return self.units.optimizer

    @property
    def gathering(self) -> ParamGathering | None:
        """The `ParamGathering`, which decides when sharded parameters are gathered; None below stage 3."""
        return self.gradients.gathering

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(
        self,
        module: Module,
        optimizer: Optimizer | None,
        plan: Callable[[bool], BackwardPlan],
        dropped: Callable[[], None],
        *,
        is_elementwise: bool = True,
    ) -> None:
        """Take over the parameters of `module` that `optimizer` updates (without one: all that require a gradient and
        that no other engine manages).

        The optimizer's groups are changed in place: under sharding they hold fragments instead of parameters.

        Args:
            plan: called at the beginning of every backward, with True if the user started it.
            dropped: called when a failure has cost the gradients of a step.
            is_elementwise: whether the optimizer's update of an element depends on that element only.

        Raises:
            ConfigError: if a parameter is not in the module; on every rank if ranks differ.
        """
        self._module = module
        self.gradients.attach(plan, dropped)
        with freed_memory_returned() if self.units.modules is not None else nullcontext():
            self.units.attach(module, optimizer, is_elementwise=is_elementwise)
            self._connect()
        if optimizer is not None and not self.options.stage.shows_gradients:
            hint_at_clipping()
        if optimizer is not None:  # a param group that only the optimizer knows would train without averaging
            own = weakref.ref(self)  # the user's optimizer does not keep the engine alive
            optimizer.add_param_group = _add_param_group(own, optimizer)  # type: ignore[method-assign, assignment]
            optimizer.zero_grad = _zero_grad(own, optimizer)  # type: ignore[method-assign, assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take over one more param group; `param_group` as in torch's `Optimizer.add_param_group`."""
        gradients = self.gradients
        if gradients.window.is_open or any(gradients.reduction.used) or gradients.are_set:
            raise StateError("add_param_group: found gradients of a step that is not over; call it after step()")
        self.units.add_group(param_group)
        self._connect()

    def _connect(self) -> None:
        """Create buckets, hooks and update batches for all units; called again after a param group was added."""
        units, optimizer = self.units, self.optimizer
        rows = None
        if takes_only_sparse(optimizer) and units.params:
            rows = TouchedRows(units.params, [units.ranks.of(param).reduce_group for param in units.params])
        managed.register(self)
        self.gradients.connect(self._module, rows)
        self.states.outside_changes = OutsideChanges(self._module, list(units), units.name_of)
        if optimizer is not None:
            used = self.gradients.was_used
            matrices = MatrixExchange(unwrapped(optimizer), list(units), used) if is_muon(optimizer) else None
            self._updates = OptimizerUpdate(optimizer, list(units.batches()), used, rows, matrices)
        if self.gathering is not None:
            watch(self._module)

    def before_compile(self) -> None:
        """Prepare the module for `torch.compile`."""
        if self.gathering is not None:
            self.gathering.hooks.leave_out_of_graphs()

    # ---- one step -----------------------------------------------------------------------------------------------

    def update(self, scale: Scalar = 1.0) -> None:
        """Run one optimizer step with gradients multiplied by `scale`; all ranks end with the same weights."""
        assert self._updates is not None
        self._take_before_update()
        note_write()
        self.states.wait_for_copy()
        gathers: list[tuple[GroupBackend, Work]] = []
        try:
            self.release_gathered()
            scale = scale * self.gradients.postsum_factor
            if isinstance(scale, Tensor) and self.placement.fetches:  # gradients are in swap files until the update
                scale = scale.item()
            if isinstance(scale, Tensor) and takes_one_pass(self.optimizer):  # its kernel takes a Python number
                for reduced in self.gradients.memory.reduced:
                    multiply(reduced, scale)
                scale = 1.0
            for batch in self._updates.step(scale):
                for index in batch.finished:
                    unit = self.units[index]
                    if (work := self.options.stage.gather_weights(unit)) is not None:
                        gathers.append((unit.ranks.shard_group, work))
            for _, work in gathers:
                work.wait()
            if changed := {id(master) for master in self.options.stage.finish_update()}:
                for unit in self.units:
                    if any(id(shard.master) in changed for shard in unit.shards):
                        unit.weights_from_masters()
        except BaseException as error:
            self.states.break_by(error)
            self.gradients.abandon(*gathers)
            raise
        self.placement.finish_sending()
        self.set_locally.clear()
        if self.options.stage.divides_parameters:
            self._renew_held()

    def _take_before_update(self) -> None:
        try:
            self.states.take_outside_changes()
            if self.options.stage.divides_parameters:
                for sharded in self._held():
                    sharded.refuse_unkept("engine.step()")
        except BaseException:
            self.gradients.abandon()
            raise

    # ---- weights ------------------------------------------------------------------------------------------------

    def masters_from_weights(self) -> None:
        """Set the master weights from the module's weights, which were loaded or changed from outside."""
        self.states.wait_for_copy()
        note_write()
        self.states.take_outside_changes()
        for unit in self.units:
            unit.masters_from_weights()

    def weights_from_masters(self) -> None:
        """Set the model's weights from the master weights of all ranks."""
        self.release_gathered()
        note_write()
        if self.states.outside_changes is not None:
            self.states.outside_changes.drop()
        for unit in self.units:
            unit.weights_from_masters()
        works = [work for unit in self.units if (work := self.options.stage.gather_weights(unit)) is not None]
        for work in works:
            work.wait()
        if self.options.stage.divides_parameters:
            self._renew_held()

    def _renew_held(self) -> None:
        """Refresh weights that an enclosing `GatheredParameters` holds, after an update or a load."""
        if held := self._held():
            with self.among_peers():
                for sharded in held:
                    sharded.renew_held()

    def _held(self) -> list[ParamUnit]:
        """Return the units that a `GatheredParameters` holds."""
        divided = () if self.units.modules is None else self.units.modules.all
        return [sharded for sharded in divided if sharded.num_contexts > 0 and sharded.is_sharded]

    def accept_rounded(self) -> None:
        """Accept that the model's weights were rounded after an update; master weights keep their values."""
        note_write()
        if self.states.outside_changes is not None:
            self.states.outside_changes.accept()

    def release_gathered(self) -> None:
        """Release gathered parameters: each rank is about to save, load or update its part of the weights."""
        if self.gathering is not None:
            self.gathering.release()

    def weights_changed(self, params: Set[Tensor]) -> None:
        """Take over changes of `params` inside `GatheredParameters`. If every rank holds whole weights, `share_weights`
        is called instead."""
        if self.gathering is None:
            return
        self.states.wait_for_copy()
        for unit in self.units:
            if not params.isdisjoint(unit.params):
                unit.take_changes()

    def share_weights(self, params: Set[Tensor], source: int) -> None:
        """Broadcast `params` from the global rank `source`, which may have changed them inside `GatheredParameters`.
        Used below stage 3. A collective.

        Raises:
            StateError: if the engine's states are in host memory (`offload_states`).
        """
        self.states.require_unmoved("GatheredParameters with modifier_rank")
        self.states.wait_for_copy()
        self.states.take_outside_changes()
        for unit in self.units:
            if params.isdisjoint(unit.params):
                continue
            for param in unit.params:
                if param in params and unit.ranks.reduce_group.world_size > 1:
                    broadcast_from(unit.ranks.reduce_group, param, source)
            unit.take_changes()
        if self.states.outside_changes is not None:
            self.states.outside_changes.accept()

    @contextmanager
    def among_peers(self) -> Iterator[None]:
        """Enclose the collectives of a save or a load: if this rank fails inside, peers that wait for it raise."""
        try:
            yield
        except BaseException:
            give_up(self.gathering.abandon() if self.gathering is not None else ())
            for sharded in self.units.divided():
                sharded.shards_changed()
            raise

    def finish_before_moving(self) -> None:
        """Return when nothing in flight reads or writes states."""
        self.states.wait_for_copy()
        self.states.take_outside_changes()
        self.gradients.finish()
        self.release_gathered()

    # ---- parameters of other engines ----------------------------------------------------------------------------

    def borrowed_names(self) -> list[str]:
        """Return the names of parameters that another engine holds, sharded, for this engine too."""
        return list(self._find_borrowed())

    def _find_borrowed(self) -> dict[str, Parameter]:
        if self.units.modules is None:
            return {}
        borrowed = self.units.modules.borrowed

        def is_of_another(param: Parameter) -> bool:
            if unit_of(param) is not None:
                return param in borrowed
            # a whole parameter; without an optimizer it is in no shard of this engine that a save would write
            return self.optimizer is None and managed.manager_of(param) not in (None, self)

        return {name: param for name, param in self.units.named_parameters if is_of_another(param)}

    def _find_lenders(self) -> "Sequence[Sharding]":
        """Return the shardings of the engines that train the borrowed parameters."""
        managers = dict.fromkeys(managed.manager_of(param) for param in self._find_borrowed().values())
        return [manager for manager in managers if manager is not None]

    def release_borrowed(self) -> None:
        """Release the parameters of `borrowed_names`, which are about to be loaded.

        Raises:
            StateError: if the states of an engine that trains them are in host memory (`offload_states`).
        """
        if self.gathering is None:
            return
        for lender in self._find_lenders():
            lender.states.require_unmoved("load_checkpoint")
            lender.states.wait_for_copy()
        self.gathering.release_borrowed()

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        """Load the results of `saved_part` for parameters of no optimizer or of another engine's. Whole parameters are
        loaded with the module."""
        if self.gathering is None:
            return
        self.gathering.load_parts(parts, self.backend)
        params = set(self._find_borrowed().values())
        for lender in self._find_lenders():
            lender.weights_changed(params)

    def accept_load(self) -> None:
        """Note that a load has ended or failed; its changes of parameters are not changes by the user."""
        if self.gathering is not None:
            self.gathering.accept_load()

    # ---- the end ------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between steps for collectives and copies, without states."""
        own = self.placement.held_bytes + self.gradients.memory.held_bytes + self.options.stage.held_bytes
        return own + sum(ranks.held_bytes for ranks in self.backends)

    def retire(self) -> None:
        """Leave the sharded parameters of an engine that only evaluates to an engine that trains them."""
        if self.units.modules is not None:
            self.units.modules.leave()
        self.destroy()

    def destroy(self) -> None:
        """Remove the hooks and drop all buffers and states; the module and the optimizer can then be used without the
        engine, or in another one. Idempotent."""
        module = self._module
        if self.gathering is not None:
            self.gathering.remove_hooks()
        self.states.wait_for_copy()
        self.states.reload(non_blocking=False)
        if self.optimizer is not None:
            vars(self.optimizer).pop("add_param_group", None)
            vars(self.optimizer).pop("zero_grad", None)
        self.units.give_back()
        self.gradients.stop()
        self.placement.release()
        managed.release(self)
        self._updates = None
        self._module, self.states.outside_changes = Module(), None
        self.units.drop()
        self.gradients.drop()
        if self.units.modules is not None:
            self.units.modules.destroy()
            unwatch(module)
