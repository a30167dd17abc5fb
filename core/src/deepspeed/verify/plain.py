"""`PlainEngine` is plain torch behind the engine's interface. It follows a recorded run, and compares each step.

It begins each step with the weights of the recorded run, so that rounding errors do not accumulate over steps. It
computes

    the forward    with the module alone; each module's weights must be those after the last step
    the gradient   with autograd: a sum over micro-batches and ranks in fp64, divided by their number
    the norm       of the recorded gradient, in fp64
    the update     with torch's optimizer, from the recorded gradient, clipped by that norm

It uses neither ZeRO nor the engine's reduction and kernels. `verdict.py` judges the differences.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from deepspeed import comm
from deepspeed.engine.observers import StepStats
from deepspeed.engine.training import backward_roots
from deepspeed.errors import ConfigError
from deepspeed.parallel.running import running
from deepspeed.verify.recording import (
    GRADIENT,
    WEIGHT,
    Finished,
    VerifiedEngine,
    WatchedForwards,
    losses_of,
)
from deepspeed.verify.verdict import Bounds, Comparison
from deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)


def of_plain(name: str, param: Parameter, *arguments: Any) -> Any:
    """Handle a `safe_...` call for a parameter of a `PlainEngine`; for other parameters, make the call itself."""
    for engine in _engines:
        for its, trained in engine.trained.items():
            if trained is param:
                return engine.safe_call(name, its, *arguments)
    return SAFE_CALLS[name](param, *arguments)


SAFE_CALLS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(safe_get_full_grad, safe_get_full_fp32_param, safe_get_full_optimizer_state),
        *(safe_set_full_grad, safe_set_full_fp32_param, safe_set_full_optimizer_state),
    )
}
_engines: "weakref.WeakSet[PlainEngine]" = weakref.WeakSet()


class SummedGradient:
    """Sums the gradients of one parameter over micro-batches, in fp64, and averages the sum over ranks."""

    def __init__(self, param: Parameter, group: ProcessGroup) -> None:
        self._param, self._group = param, group
        self._sum: Tensor | None = None
        self._length = 0.0  # the lengths of the summands, added up

    def take(self, factor: float) -> None:
        """Add `param.grad`, after all hooks of the script, times `factor`, and clear it."""
        if self._param.grad is None:
            return
        summand = self._param.grad.detach().to_dense().to(torch.float64) * factor
        self._length += float(summand.norm())
        self._sum = summand if self._sum is None else self._sum.add_(summand)
        self._param.grad = None

    def average(self, divisor: float, *, keeps: bool = False) -> tuple[Tensor | None, float]:
        """Return the sum over ranks and the total length of its summands, both divided by `divisor`. Reset both unless
        `keeps`.

        The sum is None if no rank has a gradient. A collective.
        """
        facts = torch.tensor([self._length, float(self._sum is not None)], dtype=torch.float64)
        facts = facts.to(self._param.device)
        torch_dist.all_reduce(facts, group=self._group)
        length, is_used = facts.tolist()
        if not is_used:
            return None, 0.0
        whole = torch.zeros_like(self._param, dtype=torch.float64) if self._sum is None else self._sum.clone()
        torch_dist.all_reduce(whole, group=self._group)
        if not keeps:
            self.forget()
        return whole / divisor, length / divisor

    def forget(self) -> None:
        """Discard all summands."""
        self._sum, self._length = None, 0.0


class PlainEngine(VerifiedEngine):
    """`PlainEngine` trains with plain torch from the weights of a recorded run. Each rank has the whole model."""

    def take_over(self) -> None:
        """Detach module and optimizer from the engine, and load the recorded initial weights."""
        if not self.is_watched:
            return
        groups = {name: self.group_of(param) for name, param in self.trained.items()}
        self.sharding.destroy()
        optimizer = self.basic_optimizer
        assert optimizer is not None
        self.optimizer = optimizer
        self._step_of_torch = optimizer.step
        optimizer.step = self._optimizer_step  # type: ignore[method-assign, assignment]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.optimizer, optimizer.loss_scaler = optimizer, self.precision.loss_scaler  # type: ignore[attr-defined]
        self._masters = {name: _master_of(param) for name, param in self.trained.items()}
        by_id = {id(param): self._masters[name] for name, param in self.trained.items()}
        for group in optimizer.param_groups:
            group["params"] = [by_id[id(param)] for param in group["params"]]
        self._gradients = {name: SummedGradient(param, groups[name]) for name, param in self.trained.items()}
        num_elements = {name: param.numel() for name, param in self.trained.items()}
        self._arithmetic = self.record.arithmetic
        self._comparison = Comparison(self.record, Bounds(self._arithmetic, num_elements))
        self._forwards = WatchedForwards(self.module)
        self._losses: list[float] = []
        self._before: dict[str, Tensor] = {}  # master weights before the update
        self._shown: dict[str, Tensor] = {}  # averaged gradients that the script may change until the step
        self._replaced: dict[str, Tensor | None] = {}  # averaged gradients that the script has changed
        self._num_micros = 0  # micro-batches of this step so far
        self._counts_micros = True  # False if the script itself decides when a step ends
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                if (value := self.recorded(WEIGHT, name, step=0)) is not None:
                    tensor.copy_(value)
        if missing := [name for name in self.trained if self.recorded(WEIGHT, name, step=0) is None]:
            raise ConfigError(
                f"ds_verify: {self.record.folder.name} had no {missing[0]} when it was recorded; let the script build "
                "the same engines each time, also where one of them fails"
            )
        self._take_weights(0)
        self._begin_step()
        _engines.add(self)

    def safe_call(self, call: str, name: str, *arguments: Any) -> Any:
        """Carry out a call of `safe_get_full_...` or `safe_set_full_...` for one parameter. A collective.

        Args:
            call: name of the function.
            name: name of the parameter.
            arguments: arguments after the parameter.
        """
        master, param = self._masters[name], self.trained[name]
        assert self.basic_optimizer is not None
        state = self.basic_optimizer.state.get(master, {})
        if call == "safe_get_full_grad":
            self._take_gradients()
            gradient, _ = self._gradients[name].average(self._num_summands, keeps=True)
            gradient = self._replaced.get(name, gradient)
            return None if gradient is None else gradient.float()
        if call == "safe_get_full_fp32_param":
            return master.detach().clone()
        if call == "safe_get_full_optimizer_state":
            found = state.get(*arguments)
            return found.clone() if isinstance(found, Tensor) else found
        value = arguments[0]
        if call == "safe_set_full_grad":
            self._take_gradients()
            self._replaced[name] = value.to(torch.float64)
            return None
        with torch.no_grad():
            if call == "safe_set_full_optimizer_state":
                state[arguments[1]].copy_(value)
                return None
            master.copy_(value)
            if param is not master:
                param.copy_(value)
        return None

    @property
    def _num_summands(self) -> float:
        """The divisor of a sum over ranks: the number of ranks, or 1 if the configuration requests sums."""
        return 1.0 if self.config.get("gradient_allreduce_op", "mean") == "sum" else float(comm.get_world_size())

    def _begin_step(self) -> None:
        self._facts = self.record.facts(self._steps + 1)
        if self._facts is not None:
            scale = self.precision.loss_scaler.loss_scale = self._facts["loss_scale"]
            vars(self.optimizer).update(loss_scale=scale, cur_scale=scale)

    def _take_weights(self, step: int) -> None:
        """Load the weights of the recorded run after a step into the master weights and the module."""
        with torch.no_grad():
            for name, param in self.trained.items():
                if (weight := self.recorded(WEIGHT, name, step=step)) is not None:
                    self._masters[name].copy_(weight)
                    if self._masters[name] is not param:
                        param.copy_(weight)

    def _show_gradients(self) -> None:
        """Put the averaged gradients into `param.grad`, where the script may read and change them. A collective."""
        for name, summed in self._gradients.items():
            average, _ = summed.average(self._num_summands, keeps=True)
            param = self.trained[name]
            param.grad = None if average is None else average.to(param.dtype)
            if param.grad is not None:
                self._shown[name] = param.grad.clone()

    def _take_shown(self) -> None:
        """Take back the averaged gradients, and note those that the script has changed."""
        for name, shown in self._shown.items():
            gradient, self.trained[name].grad = self.trained[name].grad, None
            if gradient is None or not torch.equal(gradient, shown):
                self._replaced[name] = None if gradient is None else gradient.to(torch.float64)
        self._shown.clear()

    def _take_gradients(self, *, is_divided: bool = False) -> None:
        """Take the gradients of a finished backward. If the script called `backward`, its loss was not divided."""
        self._take_shown()
        for summed in self._gradients.values():
            summed.take(1.0 if is_divided else 1.0 / self.schedule.num_steps)

    # ---- the step ---------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self.is_watched:
            return super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._take_gradients()
        order = self._training.order if self.module.training or torch.is_grad_enabled() else None
        stream = nullcontext() if order is None else order.of_forward(self.global_steps)
        with self._forwards.watched(inputs, kwargs), stream:
            if torch.is_grad_enabled():
                self.set_random_states(len(self._forwards.facts) - 1)
            inputs, kwargs = self.precision.cast_inputs(inputs, kwargs)
            if self._step_schedules is not None:
                kwargs = {**kwargs, **self._step_schedules.arguments(trains=self.module.training)}
            with self.precision.forward_context(), running(self._running):
                return self.module(*inputs, **kwargs)

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        gradient: Tensor | Sequence[Tensor | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run autograd over the loss, divided by the number of micro-batches."""
        if not self.is_watched:
            return super().backward(loss, retain_graph, scale_wrt_gas, gradient=gradient, **kwargs)
        self._losses += losses_of(loss)
        tensors, gradients = backward_roots(loss, gradient)
        if scale_wrt_gas:
            tensors = [tensor / self.schedule.num_steps for tensor in tensors]
        self._take_gradients()
        scaled = [self.scale(tensor) for tensor in tensors]
        torch.autograd.backward(scaled, gradients, retain_graph=retain_graph, **kwargs)
        self._take_gradients(is_divided=True)
        if self._arithmetic.shows_gradients and self.schedule.ends_step:
            self._show_gradients()
        return tensors[0] if isinstance(loss, Tensor) else tensors

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale of the recorded step."""
        if not self.is_watched:
            return super().scale(loss)
        scale = 1.0 if self._facts is None else float(self._facts["loss_scale"])
        return loss if scale == 1.0 else loss.float() * scale

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self._counts_micros = False
        super().set_gradient_accumulation_boundary(is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        if not self.is_watched:
            super().zero_grad(set_to_none)
            return
        self._shown.clear()
        self._replaced.clear()
        for name, summed in self._gradients.items():
            self.trained[name].grad = None
            summed.forget()

    def compile(self, *arguments: Any, **named: Any) -> None:
        """Leave the module as it is: the reference is not compiled."""

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Do nothing: gradients are summed over ranks only in the step."""
        yield

    def offload_states(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: plain torch moves no states."""

    def reload_states(self, *arguments: Any, **named: Any) -> None:
        """Do nothing."""

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Compare at the end of a step, and load the recorded weights."""
        if not self.is_watched:
            super().step(lr_kwargs)
            return
        self._take_gradients()
        self._num_micros += 1
        self._counts_micros &= self.schedule.syncs
        if self.schedule.ends_step:
            self._compare_step(lr_kwargs)
        self.schedule.advance()

    def _optimizer_step(self, *_: Any, **__: Any) -> None:
        """Make a step independent of the schedule, for `engine.optimizer.step()`."""
        self._counts_micros = False
        self._take_gradients()
        self._compare_step(None)
        self.schedule.restart()

    def _compare_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        self._leave_if_over()
        facts, comparison = self._facts, self._comparison
        comparison.begin(self._steps + 1)
        if facts is None:
            comparison.has_no_equal("the script made no such step when it was recorded")
            comparison.end()
            raise Finished
        comparison.compare_forwards(self._forwards.facts, facts["forwards"])
        if self._counts_micros:
            comparison.compare_count(self.schedule.num_steps, self._num_micros)
        comparison.compare_losses(self._losses, facts["losses"])
        comparison.compare_buffers(self.buffer_digests(), facts["buffers"])
        comparison.compare_rates([float(lr) for lr in self.get_lr()], facts["lr"])
        norm, is_finite = self._compare_gradients(facts)
        if self.precision.checks_overflow:
            comparison.compare_skipped(was_skipped=not facts["applied"], is_finite=is_finite)
        if facts["applied"]:
            comparison.compare_norm(norm, facts["norm"])
            self._update(norm, facts["loss_scale"], lr_kwargs)
        elif hasattr(self.lr_scheduler, "skip_batch"):
            self.lr_scheduler.skip_batch()
        self._compare_weights()
        comparison.end()
        self._go_on(facts)

    def _compare_gradients(self, facts: dict[str, Any]) -> tuple[float, bool]:
        """Compare the gradients; return the norm of the recorded one, and whether this run's gradients are finite."""
        divisor = facts["loss_scale"] * self._num_summands
        pairs, square, is_finite = [], 0.0, True
        for name, summed in self._gradients.items():
            wanted, length = summed.average(divisor)
            if name in self._replaced:
                changed = self._replaced.pop(name)
                wanted = None if changed is None else changed / facts["loss_scale"]
            is_finite &= wanted is None or bool(wanted.isfinite().all())
            found = self.recorded(GRADIENT, name)
            if not self.holds(name):
                continue
            found = None if found is None else found.to(torch.float64) / facts["loss_scale"]
            if found is not None:
                square += float(found.square().sum())
            pairs.append((name, wanted, found, length))
        squares = torch.tensor([square, float(is_finite)], dtype=torch.float64, device=self.device)
        torch_dist.all_reduce(squares)
        norm = float(squares[0].sqrt())
        if facts["applied"]:
            for name, wanted, found, length in pairs:
                self._comparison.compare_gradient(name, wanted, found, length=length, norm=norm)
        return norm, float(squares[1]) == comm.get_world_size()

    def _update(self, norm: float, loss_scale: float, lr_kwargs: dict[str, Any] | None) -> None:
        """Update the master weights with the recorded gradient."""
        clip = self._arithmetic.clip
        factor = min(clip / (norm + 1e-6), 1.0) if clip > 0 else 1.0  # nan for a nan norm, as in torch
        self._before = {name: master.detach().clone() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            gradient = self.recorded(GRADIENT, name)
            master.grad = None if gradient is None else (gradient * (factor / loss_scale)).to(master)
        self._step_of_torch()
        for master in self._masters.values():
            master.grad = None
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _compare_weights(self) -> None:
        for name, master in self._masters.items():
            if self.holds(name):
                before = self._before.get(name, master.detach())
                self._comparison.compare_weight(name, master.detach(), self.recorded(WEIGHT, name), before=before)
        self._before = {}

    def _go_on(self, facts: dict[str, Any]) -> None:
        training = self._training
        training.stats = StepStats(self.global_steps, facts["applied"], facts["norm"], facts["loss_scale"])
        training.has_applied = facts["applied"]
        vars(self.optimizer).update(overflow=not facts["applied"])
        training.progress.global_steps += 1
        training.progress.global_samples += training.train_batch_size
        training.progress.skipped_steps += not facts["applied"]
        self._take_weights(self._steps + 1)
        self._losses, self._num_micros = [], 0
        self._forwards.facts.clear()
        self._count_step()
        self._begin_step()


def _master_of(param: Parameter) -> Parameter:
    """Return the weight that the optimizer updates: an fp32 copy of a 16-bit parameter, or the parameter itself."""
    return Parameter(param.detach().float()) if param.dtype in (torch.bfloat16, torch.float16) else param
