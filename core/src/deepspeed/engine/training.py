"""`Training`: backward and step of one engine, over its parts. The engine's methods of the same names call it.

`Accumulation` counts micro-batches and says after which one the optimizer steps.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.engine.observers import Observers, Progress, StepStats
from deepspeed.errors import StateError, counted
from deepspeed.log import warn_once
from deepspeed.precision import Precision
from deepspeed.zero.backward_window import add_gathering_hint, backward_roots, is_in_backward, runs_unscaled
from deepspeed.zero.gradients import BackwardPlan
from deepspeed.zero.sharding import Sharding

if TYPE_CHECKING:
    from deepspeed.compression.moq import MixtureOfQuantization
    from deepspeed.engine.determinism import OneOrder


class Accumulation:
    """Gradient accumulation: a forward and a backward per micro-batch; after the last one of a step, the step.

    Micro-batches are counted from the last step, not from the beginning of the run, because `num_steps` may change
    during the run. The engine of a pipeline has the loop (`pipe/schedule.py`), and calls `set_boundary` before its last
    backward; the rest is the same as in every engine.

    Args:
        num_steps: micro-batches per optimizer step (`gradient_accumulation_steps`).
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._micro_steps = 0
        self._step_began = 0  # the value of `micro_steps` when the current step began
        self.boundary: bool | None = None  # set by the user, instead of counting
        self._syncs = True

    @property
    def ends_step(self) -> bool:
        """Whether the ranks reduce after the current micro-batch, and the optimizer steps."""
        return self._syncs and self.is_boundary()

    def advance(self) -> None:
        """End the current micro-batch."""
        ends = self.ends_step
        self._micro_steps += 1
        if ends:
            self.restart()

    def restart(self) -> None:
        """Begin a step with the next micro-batch; earlier ones no longer count."""
        self._step_began = self._micro_steps

    def count_batch(self) -> None:
        """Count all micro-batches of a pipeline's step but one, before the step; `advance` counts the last one."""
        self._micro_steps += self.num_steps - 1

    @property
    def micro_steps(self) -> int:
        """Micro-batches since the beginning of the run."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, number: int) -> None:
        self._micro_steps = number
        self._step_began = number - number % self.num_steps

    @property
    def _since_step(self) -> int:
        return self._micro_steps - self._step_began

    def is_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self.boundary is not None:
            return self.boundary
        return self._since_step + 1 >= self.num_steps

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the current and the following micro-batches are the last of a step; None: count again."""
        self.boundary = is_boundary

    @property
    def syncs(self) -> bool:
        """Whether the ranks reduce; else backwards only accumulate, whatever the stage."""
        return self._syncs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside the context."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before


class AfterUpdate(Protocol):
    """`Training.after_update` holds such functions, called after the update of step number `step`, from 1.

    Args:
        applied: False: the step was skipped, because its gradients overflowed.
        scale: loss scale of the step.
    """

    def __call__(self, step: int, *, applied: bool, scale: float) -> None: ...


class Training:
    """`Training` runs backward and step; `build.py` creates it. It knows neither the engine nor the module.

    Args:
        basic_optimizer: torch's optimizer; None for an engine that only evaluates.
        train_batch_size: samples per step, over all ranks.
        progress: counts the steps; the caller may read it.
        order: order in which the gradients of a step are summed (`determinism.py`); None: as they come.
    """

    def __init__(
        self,
        *,
        sharding: Sharding,
        precision: Precision,
        schedule: Accumulation,
        observers: Observers,
        basic_optimizer: Optimizer | None,
        train_batch_size: int,
        progress: Progress,
        order: "OneOrder | None" = None,
    ) -> None:
        self.sharding = sharding
        self.precision = precision
        self.schedule = schedule
        self.observers = observers
        self.basic_optimizer = basic_optimizer
        self.optimizer: Optimizer | None = None  # what users hold: torch's or its wrapper; set by build.py
        self.lr_scheduler: Any = None
        self.moq: MixtureOfQuantization | None = None  # set by build.py, too
        #: called on all ranks with the number of the update, from 1, before the norm of its gradients is taken
        self.before_update: list[Callable[[int], None]] = []
        #: called after each update, also a skipped one, while its gradients are still there
        self.after_update: list[AfterUpdate] = []
        #: returns the error if no backward may begin now, because the weights are changed for a while; None: it may
        self.refuse_backward: Callable[[str], StateError | None] = lambda name: None
        self.train_batch_size = train_batch_size
        self.progress = progress
        self.order = order
        self.stats: StepStats | None = None  # of the last step
        self.has_applied = False  # whether the last call of `step` changed the weights
        self._begun_by: float | None = None  # the scale of the loss at which a plain backward is beginning
        self._had_backward = False  # since the last step
        self._num_divided = 0  # backwards since the last step whose loss is divided by the accumulation steps
        self._was_part = False  # whether the last `optimizer_step` came before all micro-batches of its step
        self._was_dropped = False  # whether a failure has cost this step's gradients, with no call of `step` since
        self._next_batch: tuple[int, int] | None = None  # samples and micro-batches from the next step on

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor | None] | None,
        *,
        is_divided: bool,
        **kwargs: Any,
    ) -> Tensor | list[Tensor]:
        """See `DeepSpeedEngine.backward`. `is_divided`: the loss is divided by the accumulation steps already."""
        self.sharding.gradients.window.abort_if_left()
        self._begin_again_if_dropped()
        tensors, gradients = backward_roots(loss, gradient)
        undivided, num_steps = tensors, self.schedule.num_steps
        if num_steps > 1 and not is_divided:
            tensors = [tensor / num_steps for tensor in tensors]
        elif num_steps > 1 and self.order is not None:
            undivided = [tensor * num_steps for tensor in tensors]
        self._num_divided += not is_divided
        if num_steps > 1 or self.precision.loss_scaler.loss_scale != 1.0:
            self.sharding.gradients.collect_unseen_grads()  # unseen gradients have another factor
        with self.observers.phase("backward"):
            scaled = [self.precision.scale(each) for each in (undivided if self.order is not None else tensors)]
            if self.moq is not None and self.schedule.ends_step:
                step, scale = self.progress.global_steps + 1, self.precision.loss_scaler.loss_scale
                with self.sharding.gradients.window.unseen():
                    self.moq.saw_loss(scaled, gradients, step=step, scale=scale)
            self._run_backward(scaled, gradients, **kwargs)
            self.end_backward()
        for tensor, grad in zip(tensors, gradients, strict=True):
            if grad is None:
                self.observers.saw_loss(tensor)
        return tensors[0] if isinstance(loss, Tensor) else tensors

    def backward_part(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None, *, ends: bool) -> None:
        """Run the backward of one pipeline stage.

        Args:
            tensors: roots of the backward; empty: nothing has a gradient.
            gradients: gradients of `tensors`, scaled and divided like these; None: `tensors` are scalars: a scaled
                loss, or roots of gradients that an earlier part left.
            ends: whether it is the last one of a step. `end_backward`, which may wait for other stages, must follow.
        """
        self.sharding.gradients.window.abort_if_left()
        with self.observers.phase("backward"):
            self._run_backward(tensors, gradients)
            if not ends:
                self.end_backward()

    def _run_backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, **kwargs: Any
    ) -> None:
        with self.sharding.gradients.window.opened(), self.observers.phase("backward_inner"):
            if tensors:
                try:
                    torch.autograd.backward(tensors, gradients, **kwargs)
                except (RuntimeError, IndexError) as error:
                    if self.sharding.gathering is not None:
                        add_gathering_hint(error)
                    raise

    def end_backward(self) -> None:
        """End a backward: reduce its gradients if the schedule says so."""
        with self.observers.phase("backward_allreduce"):
            self.sharding.gradients.window.close()

    def reduce_postponed(self) -> None:
        """Reduce gradients that were only accumulated so far, if the schedule or the stage reduces now."""
        if self.sharding.options.stage.reduces_every_backward or self.schedule.ends_step:
            if self.order is not None and (refusal := self.order.saw_reduction()) is not None:
                self.zero_grad()
                raise refusal
            with self.observers.phase("backward_allreduce"):
                self.sharding.gradients.window.abort_if_left()
                self.sharding.gradients.reduce_postponed()

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss for the user's own `.backward()`.

        A hook on the loss notes that a backward runs through it. So a scaled loss that is never differentiated does
        not excuse an unscaled one, and a scaled loss may be differentiated twice.
        """
        scaled = self.precision.scale(loss)
        if scaled is not loss and scaled.requires_grad:
            itself, scale = weakref.ref(self), self.precision.loss_scaler.loss_scale

            def saw() -> None:
                if (owner := itself()) is not None:
                    owner._runs_through_scaled(scale)

            self.sharding.gradients.window.watch_scaled(scaled, saw)
        return scaled

    def _runs_through_scaled(self, scale: float) -> None:
        """Begin a plain backward; called when a backward runs through a loss that was scaled by `scale`."""
        window = self.sharding.gradients.window
        if window.is_engines:
            raise StateError(
                "backward: engine.backward(loss) scales the loss, and found one that engine.scale(loss) has scaled "
                "before; use one of them: engine.backward(loss) or engine.scale(loss).backward()"
            )
        self._begun_by = scale
        try:
            window.open_from_autograd()
        finally:
            self._begun_by = None

    def plan_backward(self, by_user: bool) -> BackwardPlan:
        """Plan a backward; the sharding calls this. An unscaled loss in fp16 is refused at its first gradient."""
        self._begin_again_if_dropped()
        self._had_backward = True
        refusal = self.refuse_backward("backward")
        drawing = None
        if self.order is not None:
            drawing = self.order.of_backward(self.progress.global_steps)
            refusal = (self.order.saw_reduction() if self.schedule.syncs else None) or refusal
        if by_user:
            refusal = self._refuse_scale(self._begun_by) or self._refuse_unseen() or refusal
            self._num_divided += 1
        return BackwardPlan(
            reduces=self.schedule.ends_step,
            postpones=not self.schedule.syncs,
            factor=1.0 / self.schedule.num_steps if by_user or self.order is not None else 1.0,  # else the loss has it
            refusal=refusal,
            enclosing=drawing,
        )

    def _refuse_unseen(self) -> StateError | None:
        if self.moq is None or not self.moq.refuses_plain_backward:
            return None
        return StateError(
            "backward: eigenvalue.enabled estimates eigenvalues of each loss, and loss.backward() does not show it; "
            "call engine.backward(loss)"
        )

    def _refuse_scale(self, begun_by: float | None) -> StateError | None:
        """Return the error for a plain `loss.backward()` whose loss has another scale than the step expects.

        None: the scale is right, and the gradients may be used.
        """
        scale = self.precision.loss_scaler.loss_scale
        if begun_by is None and scale == 1.0:
            return None
        if begun_by is None or runs_unscaled(self.sharding.gradients.window):
            if not is_in_backward():  # found outside a backward, by a step for example
                return StateError(
                    f"param.grad: the loss scale is {scale:g} and found gradients that came with no backward which the "
                    "engine has seen, so by what they are scaled is not known (torch.autograd.grad, or set by hand); "
                    "call engine.scale(loss).backward() or engine.backward(loss), and change the gradients afterwards"
                )
            found = (
                "an unscaled loss, or one that was scaled by hand"
                if begun_by is None
                else "a sum of scaled and unscaled losses"
            )
            return StateError(
                f"backward: the loss scale is {scale:g} and loss.backward() got {found}; call "
                "engine.backward(loss) or engine.scale(loss).backward()"
            )
        if begun_by != scale:
            return StateError(
                f"backward: the loss scale is {scale:g} and loss.backward() got a loss that was scaled by {begun_by:g} "
                "before a step changed it; call engine.scale(loss) after the step"
            )
        return None

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the current micro-batch. At the last one of a step, reduce the gradients and update the weights."""
        self.has_applied = False
        self.sharding.gradients.window.abort_if_left()
        self._was_dropped = False
        if self.order is not None and (refusal := self.order.end_micro_batch(self.schedule)) is not None:
            self.zero_grad()
            raise refusal
        if self.schedule.ends_step:
            self._was_part = False
            self._reduce_gradients()
            self._update(lr_kwargs)
        self.observers.micro_batch_ended()
        self.schedule.advance()
        self._take_next_batch()

    def optimizer_step(self) -> None:
        """Make one step, whatever the schedule says; `engine.optimizer.step()` calls it."""
        self._warn_of_parts()
        self._reduce_gradients()
        self._update(None)
        self.schedule.restart()
        self._take_next_batch()

    def reduce_before_steps_of(self, optimizer: Optimizer) -> None:
        """Reduce gradients before a step that the user makes with torch's own optimizer: `param.grad` does not show
        those of an unfinished accumulation yet. The engine's own steps have reduced them already."""
        itself = weakref.ref(self)

        def reduce(*_: Any) -> None:
            owner = itself()
            if owner is None or not owner._had_backward:
                return
            owner._warn_of_parts()
            owner._num_divided = 0
            if not owner.sharding.gradients.are_set:
                owner._reduce_gradients()
                owner.schedule.restart()

        reduce.reads_no_gradients = True  # type: ignore[attr-defined] # one-pass kernels are asked for all the same
        optimizer.register_step_pre_hook(reduce)

    def _warn_of_parts(self) -> None:
        """Warn at the second partial step in a row. A single one may be the rest of an epoch."""
        before = self._was_part
        self._was_part = 0 < self._num_divided < self.schedule.num_steps and not self.schedule.is_boundary()
        if before and self._was_part:
            warn_once(
                "engine.optimizer.step: found a second step in a row after "
                f"{counted(self._num_divided, 'backward')} of a loss divided by {self.schedule.num_steps} "
                "(gradient_accumulation_steps). It updates the weights at each call: call engine.step() after each "
                "micro-batch, which counts them, or set no gradient_accumulation_steps, and divide the loss yourself"
            )

    def zero_grad(self) -> None:
        """Drop the gradients of the step that has begun, and their losses."""
        self.sharding.gradients.zero_grad()
        self._forget_backwards()
        self.observers.step_began_again()
        self._take_next_batch()

    def _forget_backwards(self) -> None:
        self._had_backward, self._num_divided = False, 0
        if self.order is not None:
            self.order.restart()

    def set_batch(self, train_batch_size: int, num_steps: int) -> None:
        """Change the samples and the micro-batches per step. If the current step has gradients, which are divided by
        the former number, the change waits for the next step."""
        self._next_batch = train_batch_size, num_steps
        self._take_next_batch()

    @property
    def next_num_steps(self) -> int:
        """Micro-batches per step, as set last."""
        return self.schedule.num_steps if self._next_batch is None else self._next_batch[1]

    def gradients_were_dropped(self) -> None:
        """Note that a failure has cost the gradients of this step; called by the sharding. The step begins again with
        the next backward. If `step` is called before that, the script counts micro-batches that failed."""
        self._was_dropped = True
        if self.order is not None:
            self.order.restart()

    def _begin_again_if_dropped(self) -> None:
        if self._was_dropped:
            self._was_dropped = False
            self._forget_backwards()
            self.schedule.restart()
            self.observers.step_began_again()
            self._take_next_batch()

    def _take_next_batch(self) -> None:
        if self._next_batch is not None and not self._had_backward:
            self.train_batch_size, self.schedule.num_steps = self._next_batch
            self._next_batch = None
            self.schedule.restart()

    def _reduce_gradients(self) -> None:
        if self.basic_optimizer is None:
            raise StateError(
                'step: the engine has no optimizer; give one to initialize() or name one in the config ("optimizer"), '
                "with a model that has parameters to train"
            )
        with self.observers.phase("backward_allreduce"):
            self.sharding.gradients.collect_unseen_grads()
            self.sharding.gradients.reduce()
        if not self._had_backward:
            warn_once(
                "step: found no backward since the last step; no weight gets a new gradient, and the step is counted "
                "and moves the learning rate schedule all the same. Call engine.backward(loss) before engine.step()"
            )
        elif (was_used := self.sharding.gradients.was_used) and not any(was_used):
            warn_once(
                "step: found backwards since the last step, and no parameter that this engine trains got a gradient; "
                "no weight changes, and the step is counted all the same. Where there are several engines, call "
                "backward and step of the one whose module made the loss"
            )
        self._forget_backwards()

    def _update(self, lr_kwargs: dict[str, Any] | None) -> None:
        progress = self.progress
        self.stats = self._take_step(lr_kwargs)
        self.has_applied = self.stats.applied
        progress.global_steps += 1
        progress.global_samples += self.train_batch_size
        progress.skipped_steps += not self.stats.applied
        rates = {"lr": self.group_values("lr"), "momentum": self.momentum()}
        self.observers.step_ended(self.stats, progress, batch_size=self.train_batch_size, **rates)

    def _take_step(self, lr_kwargs: dict[str, Any] | None) -> StepStats:
        """Check the reduced gradients, update, drop them. The learning rate schedule moves only if the step is made."""
        sharding, precision = self.sharding, self.precision
        loss_scale, number = precision.loss_scaler.loss_scale, self.progress.global_steps + 1
        for call in self.before_update:
            call(number)
        with self.observers.phase("step"):
            verdict = precision.verdict(sharding.gradients.norm())
            if verdict.applies:
                sharding.update(verdict.grad_scale)
                self._step_schedule(lr_kwargs)
            elif hasattr(self.lr_scheduler, "skip_batch"):  # a schedule that follows batches; this batch is used up
                self.lr_scheduler.skip_batch()
            for follow in self.after_update:
                follow(number, applied=verdict.applies, scale=loss_scale)
            sharding.gradients.zero_grad()
            precision.after_step(verdict)
            if (feedback := sharding.options.stage.feedback) is not None:
                feedback.end_step(keeps=verdict.applies and precision.loss_scaler.loss_scale == loss_scale)
        return StepStats(self.progress.global_steps, verdict.applies, verdict.norm, loss_scale)

    def _step_schedule(self, lr_kwargs: dict[str, Any] | None) -> None:
        try:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        except BaseException as error:  # the weights are those of this step, and peers have another learning rate
            self.sharding.states.break_by(error)
            self.sharding.gradients.abandon()
            raise

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; empty without an optimizer."""
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else []

    def group_values(self, name: str) -> list[Any]:
        """Return one hyperparameter of every parameter group that has it."""
        return [group[name] for group in self.param_groups if name in group]

    def momentum(self) -> list[Any]:
        """Return the momentum, or betas, of every parameter group."""
        return self.group_values("betas") or self.group_values("momentum")
