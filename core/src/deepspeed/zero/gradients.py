"""`Gradients` manages the gradients of one engine from a backward to the step, in all stages.

    window.open / close     around `loss.backward()`; a plain `loss.backward()` does it through hooks
    (hooks)                 gradient -> bucket; a full bucket is launched (`gradient_reduction.py`)
    reduce()                finish every collective; all ranks agree on the norm and on which parameters were used
    norm()                  global L2 norm of the current gradients (still multiplied by the loss scale)
    (update)                `Sharding.update` reads the gradients from `GradientMemory`
    zero_grad()

A rank that fails in any of these abandons its collectives, so that no peer waits for it (`abandon`).
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import _StopRecomputationError

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.give_up import give_up, makes_collectives_besides
from deepspeed.errors import CommError, StateError, counted, first_line
from deepspeed.log import log_dist, logger
from deepspeed.zero.backward_window import BackwardWindow, see_calls
from deepspeed.zero.gradient_memory import ExposedGrads, GradientMemory
from deepspeed.zero.gradient_reduction import GradientReduction, ReplicaSum, TouchedRows
from deepspeed.zero.module_hooks import ParamGathering
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.placement import GRADIENT
from deepspeed.zero.states import States
from deepspeed.zero.step_agreement import ExactAgreement, Scalar, StepAgreement, norms_of_own_parts
from deepspeed.zero.unit import Unit
from deepspeed.zero.unit_groups import UnitRanks
from deepspeed.zero.units import ShardingOptions, Units

_F = TypeVar("_F", bound=Callable[..., Any])


_LATE = (
    "deterministic.enabled: found a gradient that came after its bucket was sent, as of a block that two checkpoints "
    "run in one backward; set zero_optimization.overlap_comm to false, so that buckets are sent after the backward"
)
_FINAL = (
    "deterministic.enabled: found a backward after the sums of its step were read, as safe_get_full_grad does, which "
    "would join them out of order; read gradients after the last backward of a step"
)


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """`BackwardPlan` holds the engine's decisions about the backward that begins."""

    reduces: bool  # whether to reduce the gradients in this backward
    postpones: bool  # whether to leave them to `reduce_postponed`, even at a stage that reduces after every backward
    factor: float  # multiplies the gradients, besides the averaging over ranks
    refusal: Exception | None = None  # raised if a parameter gets a gradient
    enclosing: AbstractContextManager[None] | None = None  # entered at the beginning, closed at the end


def abandons_on_error(method: _F) -> _F:
    """Decorate a part of the step: if it fails on this rank, abandon the collectives in flight."""

    @functools.wraps(method)
    def call(self: "Gradients", *args: Any) -> Any:
        try:
            return method(self, *args)
        except BaseException:
            self.abandon()
            raise

    return call  # type: ignore[return-value]


class Gradients:
    """`Gradients` takes the gradients of one rank's backwards, sums them over the ranks, and computes their norm.

    Args:
        units: the units whose gradients are managed.
        states: the engine's states; a backward requires them.

    Attributes:
        window: open while a backward runs.
        memory: where gradients are summed, and where the update finds the sums.
        reduction: takes the gradients into `memory` and reduces them.
        gathering: gathers sharded parameters (stage 3); None in other stages.
        was_used: by attached parameter, whether some rank has a gradient of this step; known after `reduce()`.
        rows: touched rows, for an optimizer that needs sparse gradients; else None.
        postsum_factor: the rest of the division by the number of ranks; the update multiplies by it. 1.0 if the whole
            division happens before the sum, that is without `gradient_predivide_factor`.
    """

    def __init__(self, units: Units, options: ShardingOptions, backend: GroupBackend, states: States) -> None:
        self._units, self._options, self._backend, self._states = units, options, backend, states
        self._stage = options.stage
        self._placement = options.placement
        self.window = BackwardWindow(self._begin_backward, self._end_backward, self._abort_backward)
        self.memory = GradientMemory(units, options, backend)
        self.was_used: list[bool] = []
        self.rows: TouchedRows | None = None
        self.reduction = self._create_reduction()  # empty until `connect`
        self.gathering = self._create_gathering(Module())
        self._presum_divisor = options.predivide_factor or float(
            backend.world_size
        )  # divides gradients before their sum over the ranks
        self.postsum_factor = self._presum_divisor / backend.world_size
        self._plan: Callable[[bool], BackwardPlan]  # set by `attach`, as is `_dropped`
        self._dropped: Callable[[], None]
        self._enclosing = ExitStack()  # encloses the running backward
        self._others: list[tuple[str, Parameter]] = []  # parameters of the module that are not attached
        self._ranks_by_param: list[UnitRanks] = []
        self._adds_up = False  # an earlier backward of this step has left gradients
        self._shown = ExposedGrads()
        self._replica_sum = ReplicaSum(options.wire_dtype)
        self._facts = self._create_facts()
        self._norm: Scalar | None = None  # norm of the reduced gradients, once the ranks have agreed on it

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(self, plan: Callable[[bool], BackwardPlan], dropped: Callable[[], None]) -> None:
        """Set the callbacks; see `Sharding.attach`. The caller calls `connect` next."""
        self._plan, self._dropped = plan, dropped

    def connect(self, module: Module, rows: TouchedRows | None) -> None:
        """Create buckets and hooks for all units of `module`; called again after units were added. All ranks call it
        together."""
        units = self._units
        self.rows = rows
        self.reduction.remove_hooks()
        self.memory.cut_buckets()
        attached = {id(param) for param in units.params}
        self._others = [(name, param) for name, param in units.named_parameters if id(param) not in attached]
        self.was_used = [False] * len(units.params)
        for param in units.params:
            param.grad = None  # left by a backward before the engine managed it
        if len(units):
            self._ranks_by_param = [unit.ranks for unit in units for _ in unit.params]
            numel = sum(unit.layout.numel * (1 + unit.dtype.is_complex) for unit in units)  # of real numbers
            self._facts.attach(self._ranks_by_param, units[0].device, numel)
        see_calls(self.window)
        self.reduction = self._create_reduction()
        if self.gathering is not None:
            self.gathering.remove_hooks()
            self.gathering = self._create_gathering(module)

    def _create_reduction(self) -> GradientReduction:
        return GradientReduction(
            self.window,
            self._units,
            self.memory.buckets,
            self._options,
            self.rows,
            open_window=self._open_from_hook,
            after_arrival=self._after_arrival,
            waits_on_device=not self._backend.capabilities.completes_on_host,
        )

    def _create_gathering(self, module: Module) -> ParamGathering | None:
        modules = self._units.modules
        if modules is None:
            return None
        return ParamGathering(module, modules, self._options.partitioning, self.reduction)

    def _create_facts(self) -> StepAgreement:
        agreement = ExactAgreement if self._stage.fixes_order else StepAgreement
        return agreement(self._backend, self._options.model_ranks, is_offloaded=self._placement.is_offloaded)

    # ---- one backward -------------------------------------------------------------------------------------------

    def _begin_backward(self, by_user: bool) -> None:
        self._states.require("backward")
        plan = self._plan(by_user)
        if plan.enclosing is not None:
            self._enclosing.enter_context(plan.enclosing)
        if self._stage.fixes_order and self.memory.is_final:
            raise StateError(_FINAL)
        self._take_shown()
        if self._shown:
            self._hide()
        self._shown.restore_views()
        self.memory.allocate()
        self._replica_sum.reopen(self.memory.of_units())
        self._adds_up = any(self.reduction.used)  # the user may have dropped shown gradients
        self._norm = None
        self.reduction.begin(
            reduces=plan.reduces or (self._stage.reduces_every_backward and not plan.postpones),
            factor=plan.factor * self._stage.begin_backward(self._presum_divisor, self._backend.world_size),
            refusal=plan.refusal,
        )
        if self.gathering is not None:
            self.gathering.begin_backward(unit.sharded for unit in self._units if unit.sharded is not None)

    def _after_arrival(self, sharded: ParamUnit) -> None:
        assert self.gathering is not None
        self.gathering.gradient_arrived(sharded)

    @abandons_on_error
    def _take_shown(self) -> None:
        """Apply the user's changes of the shown gradients: other values, another tensor, or None."""
        for index in self._shown.take():
            self.was_used[index] = False
            self.reduction.drop(index)
        if not self._shown or self._norm is None:
            return
        were_written = self._shown.were_written()
        if self._units.ranks.stages_divide_experts:  # other ranks do not know whether these gradients were written
            self._norm = self._facts.root_over_model(self._facts.sum_squares(self._local_norms()))
        elif were_written:
            counts_all = self._options.counts_replicated
            own = self._placement.norms(self.memory.reduced) if counts_all else self._norms_of_own_parts(self._units)
            self._norm = self._facts.root_over_model(self._facts.own_squares(own))

    def collect_unseen_grads(self) -> None:
        """Take gradients that the user has set, or of a backward that neither the outputs' hooks nor the parameters'
        hooks detected."""
        if not (self._shown or self.window.is_open) and self.are_set:
            self.window.open_and_close()

    @property
    def are_set(self) -> bool:
        """Whether a parameter shows a gradient."""
        return any(param.grad is not None for param in self._units.params)

    @property
    def keeps_hidden(self) -> bool:
        """Whether an earlier backward of this step has left gradients that no `param.grad` shows."""
        return any(self.reduction.used) and not self._shown

    def _open_from_hook(self) -> None:
        """Open the window from a parameter's hook: no output hook detected the beginning of this backward."""
        if self.window.is_left:
            raise StateError(
                "backward: found gradients of a backward that an exception ended; call engine.zero_grad() before the "
                "next one"
            )
        if self._shown:  # autograd has just added into the bucket's own memory
            self.abandon()
            raise StateError(
                "backward: found a second backward before step() that does not pass through the engine's outputs; "
                "add the losses up and call backward once, or use zero_optimization.stage 1, where they add up"
            )
        self.window.open_from_autograd()

    def _end_backward(self) -> None:
        self._enclosing.close()
        self._end_reduction()
        self._adds_up = any(self.reduction.used)
        if self.reduction.is_launched:
            self._all_launched()
        if untrained := [name for name, param in self._others if param.grad is not None]:
            self._others = [(name, param) for name, param in self._others if name not in untrained]  # warn once
            log_dist(
                f"{counted(len(untrained), 'parameter')} got a gradient and will not be trained, such as "
                f"{untrained[0]}: what is frozen when initialize() is called, or the optimizer is not given, has no "
                "place in the step. To train it from now on unfreeze it and call "
                "engine.optimizer.add_param_group({'params': [...]}); else freeze it by requires_grad_(False)",
                level=logging.WARNING,
            )
        if self.gathering is not None:
            self.gathering.end_backward()

    @abandons_on_error
    def reduce_postponed(self) -> None:
        """Launch every bucket that earlier backwards have filled but not launched."""
        if not self.reduction.is_launched:
            self.reduction.launch_rest()
            self._all_launched()

    @abandons_on_error
    def _end_reduction(self) -> None:
        self.reduction.end()

    def _all_launched(self) -> None:
        """Reduce now if `param.grad` shows whole gradients after the backward, so that users can read and clip them;
        otherwise nobody reads gradients before the step. Called when every bucket of this backward was launched."""
        if not (self._stage.divides_states or self._stage.fixes_order):
            self.reduce()

    # ---- the step -----------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Finish every collective, and agree with the other ranks on the norm and on which parameters were used.

        The ranks also agree on which buckets got a gradient after their launch. Such late gradients (of a block that a
        checkpoint runs twice in one backward) are then reduced in a second round on all ranks.
        """
        self._states.require("step")
        self._take_shown()
        if self._norm is not None:
            return
        squares = self._finish_collectives()
        if not (self._options.allows_unused or all(self.was_used)):
            self._refuse_unused()
        if not any(self.was_used):  # no backward: the gradient memory holds gradients of a former step
            squares = 0.0
        self._agree_on_norm(squares)

    @abandons_on_error
    def _agree_on_norm(self, squares: Scalar) -> None:
        self._norm = self._facts.root_over_model(squares) * self.postsum_factor
        if self._stage.shows_gradients and self.postsum_factor == 1.0:
            self._show()

    def _show(self) -> None:
        try:
            self._shown.show(self._units, self.memory.buckets, self.was_used)
        except RuntimeError:  # from torch: the gradient's dtype differs from the parameter's
            self._states.refuse_converted()
            raise

    @abandons_on_error
    def _finish_collectives(self) -> Scalar:
        """Reduce every bucket; return the sum of the squares of all gradients over the ranks."""
        if self.gathering is not None:
            self.gathering.refuse_left_whole()  # here peers still wait for this rank, and no weight has changed
        self.memory.allocate()
        reduction = self.reduction
        if not reduction.is_launched:  # the boundary was set after the backward
            reduction.launch_rest()
        while True:
            reduction.finish()
            if self._stage.fixes_order:
                self.memory.finish_sums()
            self._placement.settle()
            squares, used, late = self._facts.agree(self._local_norms(), reduction.used, reduction.late)
            self.was_used[:] = self._facts.agree_over_stages(used, self._ranks_by_param)
            if not any(late):
                break
            if self._stage.fixes_order:
                raise StateError(_LATE)
            reduction.launch_late(late)
        if self.rows is not None:
            self.rows.add_up()
        ranks = self._units.ranks
        if ranks.tied or (ranks.dense.replicate_group is not None and any(used)):
            self._replica_sum.add_up(self.memory.of_units())
            self._placement.gradients_changed()
            squares = self._facts.sum_squares(self._local_norms())
        return squares

    def _refuse_unused(self) -> None:
        params = self._units.params
        unused = [self._units.name_of(param) for param, used in zip(params, self.was_used, strict=True) if not used]
        raise StateError(
            f"zero_optimization.ignore_unused_parameters is false and {counted(len(unused), 'parameter')} got no "
            f"gradient: {', '.join(unused[:10])}; let the loss depend on them, freeze them, or set the key to true"
        )

    def _local_norms(self) -> list[Tensor]:
        self.memory.zero_without_sum()
        if self._stage.fixes_order:
            return self._own_gradients()
        if self._options.counts_replicated:
            own = [self._stage.part_for_norm(unit, reduced) for unit, reduced in self.memory.of_units()]
            return self._placement.norms(own)
        return self._norms_of_own_parts(filter(self._stage.counts_for_norm, self._units))

    def _norms_of_own_parts(self, units: Iterable[Unit]) -> list[Tensor]:
        return norms_of_own_parts((shard for unit in units for shard in unit.shards), self._units.params)

    def _own_gradients(self) -> list[Tensor]:
        """Return the reduced gradients that only this rank counts in the norm, 1-D, for `ExactAgreement`."""
        if self._placement.fetches:
            shards = (shard for unit in self._units for shard in unit.shards)
            found = (shard.placement.read(shard, GRADIENT, shard.grad) for shard in shards)
            return [grad.reshape(-1) for grad in found if grad is not None]
        return [self._stage.part_for_norm(unit, reduced) for unit, reduced in self.memory.of_units()]

    def norm(self) -> Scalar:
        """Return the global L2 norm of the reduced gradients, still multiplied by the loss scale; inf or nan after an
        overflow. A 0-D tensor if the optimizer updates on a device."""
        assert self._norm is not None, "norm() follows reduce()"
        return self._norm

    def were_replaced(self, index: int) -> None:
        """Note that the reduced gradient of an attached parameter was written from outside, on all ranks."""
        self.reduction.used[index] = True
        self._norm = None
        if self.rows is not None:
            self.rows.note_all(index)
        self._placement.gradients_changed()

    # ---- an end before the step ---------------------------------------------------------------------------------

    def _abort_backward(self) -> None:
        """Drop all gradients of the step after a failed backward, which leaves unknown gradients."""
        self._enclosing.close()
        self._warn_of_dropped("backward")
        self.abandon()

    def _warn_of_dropped(self, what_failed: str) -> None:
        """Warn if a failure costs gradients of earlier backwards in the step."""
        if self._adds_up:
            logger.warning(
                "%s: an exception ended it, and the gradients of the backwards before it in the same step are dropped "
                "too; repeat those micro-batches, or omit the step",
                what_failed,
            )

    def abandon(self, *works: tuple[GroupBackend, Work]) -> None:
        """Forget every gradient and the collectives in flight: `works` and those of buckets and sharded parameters.
        Called on a rank that has failed, while the exception is handled.

        Waits for no peer, since peers may be in another collective; peers that wait for this rank raise: `give_up`.
        """
        if self.gathering is not None:
            works += tuple(self.gathering.abandon())
        works += tuple(self.reduction.abandon())
        if sums := self._replica_sum.abandon():
            works += tuple(sums)
            if not self._placement.is_offloaded:  # if offloaded, copies are summed
                self.memory.leave()
        self.zero_grad()
        self._stage.drop_errors()
        self._dropped()
        give_up(works)
        if self.gathering is not None:
            self.gathering.shards_changed()  # last: it may fail (a disk, for example), and peers must know first

    def forward_failed(self, error: BaseException, *, all_make_it: bool = False) -> None:
        """Drop the step's gradients after the module's forward raised `error`, which is being handled. Otherwise peers
        would wait for this rank in the same forward or in the following reduction. A single rank does the same, so that
        a program that catches the error trains alike in every world size. Ignored: the exception by which a checkpoint
        ends a forward inside a backward once it has what the backward needs.

        Args:
            all_make_it: peers enter the following collectives together, even without gradients.
        """
        if isinstance(error, _StopRecomputationError):
            return
        is_lost = isinstance(error, CommError | OSError)  # OSError: offloaded weights
        if is_lost or all_make_it or torch.is_grad_enabled() or self._waits_in_forwards():
            self._warn_of_dropped("forward")
            self.abandon()

    def _waits_in_forwards(self) -> bool:
        """Return whether a forward without gradients may also wait for peers."""
        return bool(self._units.divided()) or makes_collectives_besides(self._units.ranks.backends())

    def finish(self) -> None:
        """Wait for the collectives in flight that a backward has issued."""
        self.reduction.finish()
        self._placement.settle()

    def stop(self) -> None:
        """Remove the hooks and finish what is in flight; the engine ends. All ranks have issued the same collectives
        but differ in how many are still in flight. So the collectives are finished, unless this rank has failed."""
        self.reduction.remove_hooks()
        if self.window.is_open:
            self.window.abort()
        elif sys.exc_info()[1] is not None:  # in a `finally` or `except`: this rank failed
            self.abandon()
        else:
            self._finish_and_forget()
        self.memory.leave()

    def _finish_and_forget(self) -> None:
        try:
            self.reduction.finish()
            if self.gathering is not None:
                self.gathering.finish()
        except CommError as error:
            logger.warning("destroy: gradients that were being reduced are dropped: %s", first_line(error))
            self.abandon()
        self.zero_grad()

    def drop(self) -> None:
        """Drop all memory; the units were dropped already."""
        self.memory.drop()
        self._stage.drop_errors()
        self.rows, self._others = None, []
        self.reduction = self._create_reduction()
        self._shown, self._facts = ExposedGrads(), self._create_facts()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        if self.window.is_open:  # an exception inside autograd left it open
            self.window.abort()
            return
        self.reduction.clear()
        self._adds_up = False
        self._placement.forget()
        self._replica_sum.forget()
        if self.rows is not None:
            self.rows.clear()
        self._hide()
        self._norm = None
        self.memory.forget()

    def _hide(self) -> None:
        self._shown.forget()
        for param in self._units.params:
            param.grad = None
