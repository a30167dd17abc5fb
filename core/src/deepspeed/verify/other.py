"""`OtherEngine` uses another configuration, follows a recorded run, and compares each step.

`ds_verify --against other.json` uses it for the second run. Like `plain.py`, it begins each step with the weights, the
loss scale and the random states of the recorded run, and computes

    the forward    with the module and the recorded weights
    the gradient   with its own backward, sums and averages; whole, before clipping
    the norm       of the recorded gradient
    the update     with its own optimizer, from the recorded gradient, clipped by that norm

A step that the recorded run skipped is skipped here too, so that the states of both optimizers belong to the same
steps. `verdict.py` judges the differences by the arithmetic of both runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from deepspeed import comm
from deepspeed.engine.observers import StepStats
from deepspeed.errors import ConfigError
from deepspeed.precision.policy import Verdict
from deepspeed.verify.recording import (
    GRADIENT,
    WEIGHT,
    Arithmetic,
    Finished,
    RecordedEngine,
    Runs,
)
from deepspeed.verify.verdict import Bounds, Comparison
from deepspeed.zero.fragments import safe_set_full_fp32_param, safe_set_full_grad
from deepspeed.zero.gather import GatheredParameters
from deepspeed.zero.param_unit import shape_of, unit_of


class SummandLengths:
    """Adds up the L2 norms of the gradient contributions of all backwards, for the error bounds of gradient sums."""

    def __init__(self, groups: dict[str, ProcessGroup], params: dict[str, Parameter]) -> None:
        self._groups = groups  # name -> process group of the gradient average
        self._lengths: dict[str, Tensor] = {}
        for name, param in params.items():
            param.register_hook(self._adding(name))

    def _adding(self, name: str) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            length = torch.linalg.vector_norm(values.detach(), dtype=torch.float32)
            self._lengths[name] = self._lengths[name] + length if name in self._lengths else length

        return add

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the lengths, summed over ranks, and reset them. A collective."""
        taken: dict[str, float] = {}
        for group in dict.fromkeys(self._groups.values()):
            names = [name for name, its in self._groups.items() if its is group]
            none = torch.zeros((), device=device)
            lengths = torch.stack([self._lengths.get(name, none).to(device) for name in names]).double()
            torch_dist.all_reduce(lengths, group=group)
            taken |= dict(zip(names, lengths.tolist(), strict=True))
        self._lengths = {}
        return taken


class OtherEngine(RecordedEngine):
    """`OtherEngine` trains with another configuration, from the weights of a recorded run.

    Args:
        name: name of the configuration's file.
    """

    def __init__(self, module: Module, *, runs: Runs, name: str, **parts: Any) -> None:
        self._name = name
        super().__init__(module, runs=runs, **parts)

    def _begin(self) -> None:
        """Load the recorded initial weights, and prepare the comparison. A collective."""
        recorded, own = self.record.arithmetic, self._arithmetic(each.dtype for each in self._weights().values())
        self._refuse_other_steps(recorded, own)
        self._recorded_arithmetic, self._own_arithmetic = recorded, own
        num_elements = {name: shape_of(param).numel() for name, param in self.trained.items()}
        self._comparison = Comparison(self.record, Bounds(recorded, num_elements, own), self._name)
        self._lengths = SummandLengths(
            {name: self.group_of(param) for name, param in self.trained.items()}, self.trained
        )
        self._before: dict[str, Tensor] = {}  # the weights before the update
        self._are_finite = True  # whether this run's gradients of the step are finite
        self._own_verdict = self.precision.verdict
        self.precision.verdict = self._verdict  # type: ignore[method-assign]
        self._take_untrained()
        self._take_weights(0)
        self._begin_step()

    def _refuse_other_steps(self, recorded: Arithmetic, own: Arithmetic) -> None:
        """Refuse a configuration whose steps do not correspond to the script's steps.

        Raises:
            ConfigError: the batch size differs, or only this configuration scales the loss.
        """
        if own.num_samples != recorded.num_samples:
            raise ConfigError(
                f"ds_verify: train_batch_size is {own.num_samples}, and {recorded.num_samples} by the configuration of "
                "the script, so that their steps are of other samples; give train_micro_batch_size_per_gpu and "
                "gradient_accumulation_steps with the same product"
            )
        if own.scales_loss and not recorded.scales_loss:
            raise ConfigError(
                "ds_verify: found fp16, whose loss scale skips steps that the configuration of the script makes; let "
                "the script run in fp16, and give the other configuration to --against"
            )

    def _take_untrained(self) -> None:
        """Load the recorded initial frozen parameters and buffers. A collective."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if (value := self.recorded(WEIGHT, name, step=0)) is not None:
                    buffer.copy_(value)
            for name, param in self.module.named_parameters():
                if name in self.trained or (value := self.recorded(WEIGHT, name, step=0)) is None:
                    continue
                if unit_of(param) is None:
                    param.copy_(value)
                    continue
                with GatheredParameters([param], modifier_rank=0):
                    param.copy_(value)

    def _take_weights(self, step: int) -> None:
        """Load the weights of the recorded run after a step. A collective."""
        for name, param in self.trained.items():
            weight = self.recorded(WEIGHT, name, step=step)
            if weight is None and step == 0:
                raise ConfigError(
                    f"ds_verify: {self.record.folder.name} had no {name} when it was recorded; let the script build "
                    "the same engines each time, also where one of them fails"
                )
            if weight is not None:
                safe_set_full_fp32_param(param, weight)

    def _begin_step(self) -> None:
        self._followed = self.record.facts(self._steps + 1)
        if self._followed is not None and self._own_arithmetic.scales_loss:
            self.precision.loss_scaler.loss_scale = self._followed["loss_scale"]

    def _see_random_states(self, number: int) -> None:
        self.set_random_states(number)

    def _before_update(self, step: int) -> None:
        """Compare forwards, losses and gradients, and continue with the recorded gradients. A collective.

        Raises:
            Finished: the recorded run does not have this step.
        """
        super()._before_update(step)
        facts, comparison = self._followed, self._comparison
        comparison.begin(self._steps + 1)
        if facts is None:
            comparison.has_no_equal("the script made no such step when it was recorded")
            comparison.end()
            raise Finished
        self._compare_micros(facts)
        comparison.compare_rates(self._facts["lr"], facts["lr"])
        self._compare_gradients(facts)
        self._before = self._weights()
        if facts["applied"]:
            factor = self._facts["loss_scale"] / facts["loss_scale"]
            for name, param in self.trained.items():
                if (gradient := self.recorded(GRADIENT, name)) is not None:
                    safe_set_full_grad(param, gradient * factor)
            self.sharding.gradients.reduce()  # computes the norm

    def _compare_micros(self, facts: dict[str, Any]) -> None:
        """Compare the micro-batches of the step: their number, their forwards, and their losses."""
        comparison, recorded, own = self._comparison, self._recorded_arithmetic, self._own_arithmetic
        same = self._facts["micros"] * recorded.num_micros == facts["micros"] * own.num_micros
        if not same:  # a run's number of micro-batches differs from its configuration
            comparison.compare_count(self._facts["micros"] * recorded.num_micros // own.num_micros, facts["micros"])
            return
        comparison.compare_forwards(self._forwards.facts, facts["forwards"])
        if recorded.num_micros == own.num_micros:
            comparison.compare_losses(self._losses, facts["losses"])
        elif self._losses:
            comparison.compare_losses([self._loss], [facts["loss"]])

    def _compare_gradients(self, facts: dict[str, Any]) -> None:
        own_scale, scale, lengths = self._facts["loss_scale"], facts["loss_scale"], self._lengths.take(self.device)
        pairs, square, is_finite = [], 0.0, True
        for name in filter(self.holds, self.trained):
            wanted, found = self._tensors.get(GRADIENT + name), self.recorded(GRADIENT, name)
            if wanted is not None:
                wanted = wanted.to(self.device, torch.float64) / own_scale
                is_finite &= bool(wanted.isfinite().all())
            if found is not None:
                found = found.to(torch.float64) / scale
                square += float(found.square().sum())
            pairs.append((name, wanted, found))
        facts_of_all = torch.tensor([square, float(is_finite)], dtype=torch.float64, device=self.device)
        torch_dist.all_reduce(facts_of_all)
        norm, self._are_finite = float(facts_of_all[0].sqrt()), float(facts_of_all[1]) == comm.get_world_size()
        if facts["applied"]:
            divisor = own_scale * comm.get_world_size()
            for name, wanted, found in pairs:
                length = lengths[name] / divisor
                self._comparison.compare_gradient(name, wanted, found, length=length, norm=norm)

    def _verdict(self, scaled_norm: float | Tensor) -> Verdict:
        """Return the verdict, with the recorded run's decision on whether to apply the step."""
        verdict = self._own_verdict(scaled_norm)
        return verdict if self._followed is None else replace(verdict, applies=self._followed["applied"])

    def _leave_step(self, facts: dict[str, Any]) -> None:
        """Compare the results of the step, and load the recorded weights. A collective."""
        followed, comparison = self._followed, self._comparison
        assert followed is not None
        comparison.compare_buffers(facts["buffers"], followed["buffers"])
        if self._recorded_arithmetic.checks_overflow and facts["loss_scale"] == followed["loss_scale"]:
            comparison.compare_skipped(was_skipped=not followed["applied"], is_finite=self._are_finite)
        if followed["applied"] and facts["norm"] is not None:
            comparison.compare_norm(float(facts["norm"]), followed["norm"])
        for name, weight in self._weights().items():
            its = name.removeprefix(WEIGHT)
            found = self.recorded(WEIGHT, its)
            comparison.compare_weight(its, weight, None if found is None else found.cpu(), before=self._before[name])
        comparison.end()
        self._take_weights(self._steps + 1)

    def _after_step(self, stats: StepStats) -> None:
        super()._after_step(stats)
        self._begin_step()
