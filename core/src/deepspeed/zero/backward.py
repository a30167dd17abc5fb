"""`Reducing`: what happens to gradients in a backward, in all stages.

The engine opens the window around a backward; a plain `loss.backward()` does it through hooks. Inside, each gradient
goes to its bucket, and a full bucket is launched (`gradient_reduction.py`). The step, in `strategy.py`, finishes what
was launched. A rank that fails in either abandons its collectives here, so that no peer waits for it.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.give_up import give_up, makes_collectives_besides
from deepspeed.errors import CommError, StateError, counted, first_line
from deepspeed.log import log_dist, logger
from deepspeed.zero.backward_window import BackwardWindow
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient_reduction import GradientReduction, ReplicaSum, TouchedRows
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.shown_gradients import ShownGradients
from deepspeed.zero.stateful import Stateful
from deepspeed.zero.step_facts import Scalar

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """A `BackwardPlan` carries the decisions of the schedule about the backward that begins."""

    reduces: bool  # whether the gradients are needed after it
    postpones: bool  # whether it leaves them to `reduce_postponed`, at a stage too that reduces after every backward
    factor: float  # by which its gradients are multiplied, besides the averaging over ranks
    refusal: Exception | None = None  # raised if a parameter gets a gradient in it


def abandons_on_error(method: _F) -> _F:
    """Decorator of a part of the step: if it fails on this rank, nothing waits for its collectives in flight."""

    @functools.wraps(method)
    def call(self: "Reducing", *args: Any) -> Any:
        try:
            return method(self, *args)
        except BaseException:
            self._abandon()
            raise

    return call  # type: ignore[return-value]


class Reducing(Stateful):
    """`Reducing` takes the gradients of one rank's backwards and reduces them over the ranks."""

    #: whether gradients are reduced after every backward, or only when they are needed
    reduces_always = False
    #: whether `param.grad` shows the gradients of a backward when it is over
    shows_gradients = False

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self.window = BackwardWindow(self._begin_backward, self._end_backward, self._abort_backward)
        self._plan: Callable[[bool], BackwardPlan]  # these two are given to `attach`
        self._dropped: Callable[[], None]
        self._others: list[tuple[str, torch.nn.Parameter]] = []  # parameters of the module that are not attached
        self._used_anywhere: list[bool] = []  # by parameter: some rank has a gradient for this step
        self._adds_up = False  # there are gradients of a backward of this step that is over
        self._shown = ShownGradients()
        self._replica_sum = ReplicaSum(options.wire_dtype)
        self._norm: Scalar | None = None  # of the reduced gradients, once the ranks have agreed on it
        self._rows: TouchedRows | None = None  # for an optimizer that takes sparse gradients only
        self.reduction = self._create_reduction()  # of nothing yet
        average = options.predivide_factor or float(self.world_size)
        self._before_sum = 1.0 / average
        self._after_sum = average / self.world_size

    # ---- what a stage decides -----------------------------------------------------------------------------------

    def _reduce(self, bucket: Bucket, wire_N: Tensor) -> Work:
        """Start to sum a bucket over the ranks, into the part of `wire_N` that is its `result`."""
        return self.groups[bucket.index].ranks.shards.all_reduce(wire_N, tag=bucket.index)

    def _after_arrival(self, unit: ParamUnit) -> None:
        """A gradient of `unit` was taken."""

    def _max_in_flight(self) -> int | None:
        """Launched buckets from which on sums are taken out during the backward; None: not before its end."""
        return self.placement.max_in_flight

    def _after_launch(self) -> None:
        """Every bucket of this backward was launched; nobody reads gradients before the step, so they go on."""

    # ---- one backward -------------------------------------------------------------------------------------------

    def _create_reduction(self) -> GradientReduction:
        return GradientReduction(
            self.window,
            self.groups,
            self.buckets,
            reduce=self._reduce,
            open_window=self._open_from_hook,
            sees_all=self.shows_gradients,
            after_arrival=self._after_arrival,
            name_of=self._name_of,
            overlaps=self.options.overlap,
            max_in_flight=self._max_in_flight(),
            waits_on_device=not self.backend.capabilities.completes_on_host,
            rows=self._rows,
        )

    def _begin_backward(self, by_user: bool) -> None:
        self.require_states("backward")
        plan = self._plan(by_user)
        self._take_shown()
        if self._shown:
            self._hide_gradients()
        self._shown.restore_views()
        if len(self._gradients) < len(self.groups):
            self._allocate_gradients()
        self._replica_sum.reopen(self._reduced_units())
        self._adds_up = any(self.reduction.used)  # the user may have dropped shown ones
        self._norm = None
        self.reduction.begin(
            reduces=plan.reduces or (self.reduces_always and not plan.postpones),
            factor=plan.factor * self._before_sum,
            refusal=plan.refusal,
        )

    def _take_shown(self) -> None:
        """Take what the user made of the shown gradients: other values, another tensor, or None."""
        for index in self._shown.take():
            self._used_anywhere[index] = False
            self.reduction.drop(index)

    def take_unseen(self) -> None:
        """Take gradients of a backward that neither an output of the forward nor a hook has seen, or that the user has
        set."""
        if not (self._shown or self.window.is_open) and self._has_gradients():
            self.window.open_and_close()

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.params)

    def _open_from_hook(self) -> None:
        """The first gradient of a backward that no output of the forward has seen begin; hooks see some only."""
        if self.window.is_left:
            raise StateError(
                "backward: found gradients of a backward that an exception ended; call engine.zero_grad() before the "
                "next one"
            )
        if self._shown:  # autograd has just added into the bucket's own memory
            self._abandon()
            raise StateError(
                "backward: found a second backward before step() that does not pass through the engine's outputs; "
                "add the losses up and call backward once, or use zero_optimization.stage 1, where they add up"
            )
        self.window.open_from_autograd()

    def _end_backward(self) -> None:
        self._end_reduction()
        self._adds_up = any(self.reduction.used)
        if self.reduction.is_launched:
            self._after_launch()
        if untrained := [name for name, param in self._others if param.grad is not None]:
            self._others = [(name, param) for name, param in self._others if name not in untrained]  # said once
            log_dist(
                f"{counted(len(untrained), 'parameter')} got a gradient and will not be trained, such as "
                f"{untrained[0]}: what is frozen when initialize() is called, or the optimizer is not given, has no "
                "place in the step. To train it from now on unfreeze it and call "
                "engine.optimizer.add_param_group({'params': [...]}); else freeze it by requires_grad_(False)",
                level=logging.WARNING,
            )

    @abandons_on_error
    def reduce_postponed(self) -> None:
        """Launch every bucket that backwards before have filled and not launched."""
        if not self.reduction.is_launched:
            self.reduction.launch_rest()
            self._after_launch()

    @abandons_on_error
    def _end_reduction(self) -> None:
        self.reduction.end()

    def _abort_backward(self) -> None:
        """A backward that failed leaves unknown gradients: the step starts again, without them."""
        self._warn_of_dropped("backward")
        self._abandon()

    def _warn_of_dropped(self, what_failed: str) -> None:
        """Say that a failure costs gradients of backwards before it, if it does."""
        if self._adds_up:
            logger.warning(
                "%s: an exception ended it, and the gradients of the backwards before it in the same step are dropped "
                "too; repeat those micro-batches, or omit the step",
                what_failed,
            )

    # ---- an end before the step ---------------------------------------------------------------------------------

    def _abandon(self, *works: tuple[GroupBackend, Work]) -> None:
        """Forget every gradient, and the collectives in flight: `works` and those of buckets. This rank has failed.

        Waits for no peer, since peers may be in another collective; those that wait for this rank raise: `give_up`.
        """
        works += tuple(self.reduction.abandon())
        if sums := self._replica_sum.abandon():
            works += tuple(sums)
            if not self.placement.is_offloaded:  # else copies are summed
                self._drop_gradient_memory()
        self.zero_grad()
        self._dropped()
        give_up(works)

    def abandon(self) -> None:
        """Forget every gradient, outside of a backward: this rank has failed, and peers that wait for it raise.

        Called while the exception is handled.
        """
        self._abandon()

    def forward_failed(self, error: BaseException, *, all_make_it: bool = False) -> None:
        """The module's forward raised `error`, which is being handled. Peers that go on would wait for this rank in the
        same forward, or in the reduction that follows it. So the step starts again, without its gradients; on one rank,
        too, so that a program which catches the error trains alike in every world. A checkpoint ends a forward inside a
        backward by an exception of its own, when it has what the backward needs.

        Args:
            all_make_it: peers go on to what follows it together, also without gradients.
        """
        if isinstance(error, _StopRecomputationError):
            return
        is_lost = isinstance(error, CommError | OSError)  # offloaded weights, too
        if is_lost or all_make_it or torch.is_grad_enabled() or self._waits_in_forwards():
            self._warn_of_dropped("forward")
            self._abandon()

    def _waits_in_forwards(self) -> bool:
        """Whether a forward without gradients may wait for peers, too."""
        return bool(self.sharded_units()) or makes_collectives_besides(self.backends)

    def _drop_gradient_memory(self) -> None:
        """Leave the memory to works in flight; the next backward allocates other memory."""
        for bucket in self.buckets:
            bucket.release()
        self._gradients, self._reduced = [], []

    def _finish_and_forget(self) -> None:
        """Finish the collectives in flight, which all ranks have issued, and forget the gradients. How many are left to
        wait for differs between ranks, so they cannot be abandoned alike."""
        try:
            self._finish_in_flight()
        except CommError as error:
            logger.warning("destroy: gradients that were being reduced are dropped: %s", first_line(error))
            self._abandon()
        self.zero_grad()

    def _finish_in_flight(self) -> None:
        self.reduction.finish()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        if self.window.is_open:  # what is open was left by an exception inside autograd
            self.window.abort()
            return
        self.reduction.clear()
        self._adds_up = False
        self.placement.forget()
        self._replica_sum.forget()
        if self._rows is not None:
            self._rows.clear()
        self._hide_gradients()
        self._norm = None

    def _hide_gradients(self) -> None:
        self._shown.forget()
        for param in self.params:
            param.grad = None
