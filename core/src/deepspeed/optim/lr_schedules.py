"""DeepSpeed's learning-rate schedules. Each is a closed form of the step count, so its state is one number.

`n` below is `last_batch_iteration`: -1 at construction, 0 after the first `step()`. The engine calls `step()` after
every optimizer step. The constructor sets the learning rate of n = -1, which the first optimizer step uses. A schedule
that is constructed with another count does not change the optimizer until its first `step()`. Values and defaults are
equal to DeepSpeed 0.19.6 (`core/tests/unit/optim/test_lr_schedules.py` has its numbers). Scripts import the names of
the schedules and their arguments from `deepspeed.runtime.lr_schedules`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed._absent import absent_members
from deepspeed.errors import CheckpointError, ConfigError, counted
from deepspeed.log import warn_once
from deepspeed.optim.lr_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from deepspeed.optim.saved_state import number_in

LR_SCHEDULE = "lr_schedule"

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"

TOTAL_NUM_STEPS = "total_num_steps"


__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_params",
    "parse_arguments",
    "update_lr",
]

_SECOND_BETA = 0.99  # OneCycle sets it


def get_torch_optimizer(optimizer: Any) -> Any:
    """Return the object with the `param_groups` that a schedule writes: `optimizer`, or its `.optimizer`."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if hasattr(candidate, "param_groups"):
            return candidate
    raise TypeError(
        f"{type(optimizer).__name__} is not an optimizer: it has no param_groups, nor an .optimizer that has"
    )


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Write one learning rate per group (in place if it is a tensor). Return the learning rates as numbers."""
    for group, lr in zip(param_groups, lrs, strict=True):
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [float(lr) for lr in lrs]


class Schedule:
    """Counts steps and writes the learning rates. Its state is the count. A subclass implements `get_lr`."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self.org_lrs: list[float] = []
        self._own_lrs()
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group at `last_batch_iteration`."""
        raise NotImplementedError(f"{type(self).__name__} must write get_lr")

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that the constructor, `step()` or `load_state_dict` wrote last. AssertionError
        before the first `step()` of a schedule that was constructed with a count other than -1."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next step count, or set the given one, and write the learning rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._last_lr = self._write()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Continue at the saved count, and write its learning rates. CheckpointError if `sd` has no valid count."""
        self.check_state_dict(sd)
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._last_lr = self._write()

    def check_state_dict(self, sd: Any) -> None:
        """Raise a CheckpointError if `load_state_dict(sd)` would. Changes nothing."""
        if not isinstance(sd, Mapping) or "last_batch_iteration" not in sd:
            found = sorted(map(str, sd)) if isinstance(sd, Mapping) else type(sd).__name__
            raise CheckpointError(
                f"{type(self).__name__}: the saved scheduler state has no last_batch_iteration (found: {found}); it "
                "was saved by another kind of scheduler, so load with load_lr_scheduler_states=False"
            )
        count = number_in(sd["last_batch_iteration"])
        if count is None or not math.isfinite(count) or count < -1:
            raise CheckpointError(
                f"{type(self).__name__}: the saved last_batch_iteration is {sd['last_batch_iteration']!r:.60}, and a "
                "number of -1 or more is expected; load another tag, or with load_lr_scheduler_states=False"
            )

    def _write(self) -> list[float]:
        return update_lr(self.optimizer.param_groups, self.get_lr())

    def _begin(self) -> None:
        """Write the learning rates for the first optimizer step, unless the schedule continues at a given count."""
        if self.last_batch_iteration == -1:
            self._last_lr = self._write()

    def _own_lrs(self) -> list[float]:
        """Return the groups' original learning rates. Learning rates of groups added later are recorded here."""
        for group in self.optimizer.param_groups[len(self.org_lrs) :]:
            self.org_lrs.append(float(group["lr"]))
        return self.org_lrs

    def _per_group(self, value: float | Sequence[float], name: str) -> list[float]:
        """Return one number per current param group. A single number also applies to groups added later."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [float(value)] * num_groups  # type: ignore[arg-type]
        if len(value) != num_groups:
            raise ConfigError(
                f"{name}: found {counted(len(value), 'value')} {list(value)}, for {counted(num_groups, 'param group')}"
            )
        return [float(item) for item in value]


@absent_members("runtime.lr_schedules:LRRangeTest")
class LRRangeTest(Schedule):
    """Increases the learning rate until training diverges, to find the largest useful one (L. Smith, arXiv 1803.09820).

    lr = min_lr * (1 + step_rate * (n + 1) / step_size); with `staircase` the fraction is rounded down.

    Args:
        lr_range_test_min_lr: first learning rate, or one per param group.
        lr_range_test_step_size: steps per interval.
        lr_range_test_step_rate: growth per interval, as a multiple of the first learning rate.
        lr_range_test_staircase: increase once per interval instead of at every step.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _checked_rates("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _checked_positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _checked_number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        factor = 1 + self.step_rate * interval
        return [lr * factor for lr in self._per_group(self.min_lr, "lr_range_test_min_lr")]


@absent_members("runtime.lr_schedules:OneCycle")
class OneCycle(Schedule):
    """Raises and lowers the learning rate once, with inverse momentum, then decays it (L. Smith, arXiv 1803.09820).

    With k = n + 1 completed steps, and s rising 0 -> 1 in the first half and falling 1 -> 0 in the second:

        cycle   lr  = min_lr + (max_lr - min_lr) * s          mom = max_mom - (max_mom - min_mom) * s
        after   lr  = min_lr / (1 + decay_lr_rate * d)        mom = max_mom * (1 + decay_mom_rate * d)
                d = (k - cycle length) / decay_step_size, 0 if that is 0

    Args:
        cycle_min_lr, cycle_max_lr: one number, or one per param group.
        decay_lr_rate, decay_mom_rate, decay_step_size: see above.
        cycle_first_step_size, cycle_second_step_size: steps of the halves; second None: as the first.
        cycle_first_stair_count, cycle_second_stair_count: s is rounded down to this number of stairs; 0: no stairs;
            second None: as the first.
        cycle_momentum: also write `betas[0]` of each group, and 0.99 as `betas[1]`, like DeepSpeed. Without betas it is
            disabled with a warning. The first optimizer step uses min_mom.
        cycle_min_mom, cycle_max_mom: one number, or one per param group.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.decay_step_size = _checked_number("decay_step_size", decay_step_size)
        if self.decay_step_size < 0:
            raise ConfigError(f"decay_step_size: found {decay_step_size!r}, but it must be at least 0 (0: no decay)")
        self.cycle_min_lr = _checked_rates("cycle_min_lr", cycle_min_lr)
        self.cycle_max_lr = _checked_rates("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _checked_number("decay_lr_rate", decay_lr_rate)
        self.cycle_min_mom = _checked_rates("cycle_min_mom", cycle_min_mom)
        self.cycle_max_mom = _checked_rates("cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = _checked_number("decay_mom_rate", decay_mom_rate)
        self.first_step_size = _checked_positive("cycle_first_step_size", cycle_first_step_size)
        # negative numbers mean "not given", as on the command line
        self.second_step_size = _given("cycle_second_step_size", cycle_second_step_size, otherwise=self.first_step_size)
        self.first_stair_count = _given("cycle_first_stair_count", cycle_first_stair_count, otherwise=0)
        self.second_stair_count = _given(
            "cycle_second_stair_count", cycle_second_stair_count, otherwise=self.first_stair_count
        )
        self.total_size = self.first_step_size + self.second_step_size
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self._begin()

    def get_lr(self) -> list[float]:
        scale, decay = self._position()
        min_lrs = self._per_group(self.cycle_min_lr, "cycle_min_lr")
        max_lrs = self._per_group(self.cycle_max_lr, "cycle_max_lr")
        if decay is not None:
            return [lr / (1 + self.decay_lr_rate * decay) for lr in min_lrs]
        return [low + (high - low) * scale for low, high in zip(min_lrs, max_lrs, strict=True)]

    def get_mom(self) -> list[float] | None:
        """Return the momentum of each param group at `last_batch_iteration`, or None if it is not cycled."""
        if not self.cycle_momentum:
            return None
        scale, decay = self._position()
        min_moms = self._per_group(self.cycle_min_mom, "cycle_min_mom")
        max_moms = self._per_group(self.cycle_max_mom, "cycle_max_mom")
        if self.last_batch_iteration < 0:
            return min_moms
        if decay is not None:
            return [mom * (1 + self.decay_mom_rate * decay) for mom in max_moms]
        return [high - (high - low) * scale for low, high in zip(min_moms, max_moms, strict=True)]

    def _position(self) -> tuple[float, float | None]:
        """Return (s, None) within the cycle, (0, decay intervals) after it."""
        steps = self.last_batch_iteration + 1
        if steps > self.total_size:
            after = steps - self.total_size
            return 0.0, after / self.decay_step_size if self.decay_step_size else 0.0
        if steps <= self.first_step_size:
            return _stairs(steps, self.first_step_size, self.first_stair_count), None
        return _stairs(self.total_size - steps, self.second_step_size, self.second_stair_count), None

    def _has_betas(self) -> bool:
        found = all("betas" in group for group in self.optimizer.param_groups)
        if not found:
            name = type(self.optimizer).__name__
            warn_once(f"OneCycle: cycle_momentum is off, because {name} has no betas; a momentum of its own stays")
        return found

    def _write(self) -> list[float]:
        moms = self.get_mom()
        if moms is not None:
            if max(moms) >= 1:
                warn_once(
                    f"OneCycle: decay_mom_rate {self.decay_mom_rate} has raised betas[0] to 1 or more, and the "
                    "momentum grows without bound; give 0 to keep cycle_max_mom, or a negative rate to lower it"
                )
            for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
                group["betas"] = (mom, _SECOND_BETA, *group["betas"][2:])
        return super()._write()


@absent_members("runtime.lr_schedules:WarmupLR")
class WarmupLR(Schedule):
    """Raises the learning rate from min to max over the first steps, then holds it.

        lr = min_lr + (max_lr - min_lr) * gamma(n)
        gamma(n) = log(n + 1) / log(W)   (log)    or   n / W   (linear)      for n < W = max(2, warmup_num_steps)
        gamma(n) = 1                                                         for n >= W

    Args:
        warmup_min_lr: one number, or one per param group.
        warmup_max_lr: one number, or one per param group; None: each group's original learning rate.
        warmup_num_steps: positive; 1 counts as 2.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_min_lr = _checked_rates("warmup_min_lr", warmup_min_lr)
        self.warmup_max_lr = None if warmup_max_lr is None else _checked_rates("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = _checked_warmup(warmup_num_steps, warmup_type)
        self.warmup_type = warmup_type
        # a subclass calls `_begin` itself after it has set its attributes
        if type(self) is WarmupLR:
            self._begin()

    def get_lr(self) -> list[float]:
        gamma = self._get_gamma()
        min_lrs = self._per_group(self.warmup_min_lr, "warmup_min_lr")
        own = self._own_lrs()
        max_lrs = own if self.warmup_max_lr is None else self._per_group(self.warmup_max_lr, "warmup_max_lr")
        return [low + (high - low) * gamma for low, high in zip(min_lrs, max_lrs, strict=True)]

    def _get_gamma(self) -> float:
        n = max(0, self.last_batch_iteration)
        return 1.0 if n >= self.warmup_num_steps else _warmup_gamma(n, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Raises the learning rate like `WarmupLR`, then lowers it linearly to min at `total_num_steps` (T) and holds it.

    gamma(n) = max(0, (T - n) / max(1, T - W)) for n >= W.

    Args:
        total_num_steps: number of steps of the training.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type: see `WarmupLR`; warmup_max_lr defaults to 0.001.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _checked_count("total_num_steps", total_num_steps)
        _warn_if_short(type(self).__name__, total_num_steps, warmup_num_steps)
        self._begin()

    def _get_gamma(self) -> float:
        n = self.last_batch_iteration
        if n < self.warmup_num_steps:
            return super()._get_gamma()
        return max(0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup_num_steps))


@absent_members("runtime.lr_schedules:WarmupCosineLR")
class WarmupCosineLR(Schedule):
    """Scales each group's original learning rate: a warm-up to 1, then a half cosine down to `cos_min_ratio`.

        lr = lr at construction * ratio(n), ratio(-1) = 0
        ratio(n) = warmup_min_ratio + (1 - warmup_min_ratio) * gamma(n)             for n < W, gamma as in `WarmupLR`
        ratio(n) = cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * q)) / 2      for n >= W
                   q = min(1, (n - W + 1) / max(1, T - W)), T = total_num_steps

    Args:
        total_num_steps: number of steps of the training.
        warmup_min_ratio: ratio after the first step; before the first step the ratio is 0.
        warmup_num_steps: see `WarmupLR`.
        cos_min_ratio: ratio at the end and afterwards.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _checked_count("total_num_steps", total_num_steps)
        self.warmup_min_ratio = _checked_ratio("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _checked_ratio("cos_min_ratio", cos_min_ratio)
        self.warmup_num_steps = _checked_warmup(warmup_num_steps, warmup_type)
        self.warmup_type = warmup_type
        _warn_if_short(type(self).__name__, total_num_steps, warmup_num_steps)
        self._begin()

    def get_lr_ratio(self) -> float:
        """Return the factor for the groups' original learning rates at `last_batch_iteration`."""
        n, W = self.last_batch_iteration, self.warmup_num_steps
        if n < 0:
            return 0.0
        if n < W:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _warmup_gamma(n, W, self.warmup_type)
        progress = min(1.0, (n - W + 1) / max(1, self.total_num_steps - W))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self._own_lrs()]


def _warmup_gamma(n: int, num_steps: int, warmup_type: str) -> float:
    return math.log(n + 1) / math.log(num_steps) if warmup_type == WARMUP_LOG_RATE else n / num_steps


def _checked_warmup(num_steps: int, warmup_type: str) -> int:
    """Check the warm-up arguments, and return the length: at least 2, because log(1) = 0 is a divisor."""
    remedy = "; give 1 for the shortest warm-up, or leave out a WarmupLR that is to have none"
    count = _checked_count("warmup_num_steps", num_steps, remedy)
    if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        raise ConfigError(f'warmup_type: found {warmup_type!r}, but it must be "log" or "linear"')
    return max(2, count)


def _checked_count(name: str, value: Any, remedy: str = "") -> int:
    count = number_in(value)
    if count is None or not count >= 1 or not count.is_integer():
        raise ConfigError(f"{name}: found {value!r}, but it must be a whole number of 1 or more{remedy}")
    return int(count)


def _checked_number(name: str, value: Any, kind: str = "a finite number") -> float:
    """`value` as a finite number; an integer stays one, and YAML gives a number such as 1e-4 as text."""
    try:
        number = float(value) if isinstance(value, str) else number_in(value)
    except ValueError:
        number = None
    if number is None or not math.isfinite(number):
        raise ConfigError(f"{name}: found {value!r}, but it must be {kind}")
    return value if isinstance(value, int) else number


def _checked_rates(name: str, value: Any) -> float | list[float]:
    kind = "a finite number, or a list of one for each param group"
    if isinstance(value, list | tuple):
        return [_checked_number(name, each, kind) for each in value]
    return _checked_number(name, value, kind)


def _checked_positive(name: str, value: Any) -> float:
    number = _checked_number(name, value, "positive")
    if not number > 0:
        raise ConfigError(f"{name}: found {value!r}, but it must be positive")
    return number


def _checked_ratio(name: str, value: Any) -> float:
    number = _checked_number(name, value, "in [0, 1]")
    if not 0.0 <= number <= 1.0:
        raise ConfigError(f"{name}: found {value!r}, but it must be in [0, 1]")
    return number


def _warn_if_short(name: str, total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        warn_once(f"{name}: total_num_steps {total_num_steps} is less than warmup_num_steps {warmup_num_steps}")


def _given(name: str, value: float | None, otherwise: float) -> float:
    number = otherwise if value is None else _checked_number(name, value)
    return otherwise if number < 0 else number


def _stairs(steps: float, num_steps: float, count: float) -> float:
    """Return `steps / num_steps`, rounded down to one of `count` stairs if `count` is not 0."""
    return math.floor(steps * count / num_steps) / count if count else steps / num_steps
