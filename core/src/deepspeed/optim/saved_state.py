"""Checks whether an optimizer can continue from a saved optimizer state, before a load changes anything.

The names of the states count, not the class: torch's AdamW, FusedAdam and DeepSpeedCPUAdam all keep `exp_avg` and
`exp_avg_sq`, and can load each other's state. In an optimizer with other states, the next step would raise a KeyError
or ignore the loaded state.

Then the values are checked: types, dtypes, sizes and ranges of all states and options with a known meaning. Otherwise a
string as step count would fail in the next step, and a nan would spread to the weights.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from deepspeed.errors import CheckpointError, counted
from deepspeed.optim.traits import _is_a, _loaded, unwrapped

#: states with one number per element; and among them, sums of squares and maxima, which are not negative
_MOMENTS = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "exp_avg_sq_fresh"),
    }
)
_NOT_NEGATIVE = frozenset(
    {
        *("exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_fresh", "exp_inf", "square_avg", "acc_delta"),
        "sum",
    }
)
_NUMBERS = frozenset({"step", "variance_step", "mu_product"})
#: options that must be at least 0, and options that must also be below 1
_AT_LEAST_0 = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "lr_decay", "step"})
_BELOW_1 = frozenset({"betas", "alpha", "rho"})
_NEVER_NONE = frozenset({*_AT_LEAST_0, *_BELOW_1, "momentum", "dampening"})
_SWITCHES = frozenset(
    {
        *("amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable", "foreach", "fused"),
        *("maximize", "nesterov"),
    }
)
#: keys of a group that describe its parameters; a load does not change them
OF_PARAMETERS = ("params", "param_names")
#: keys that torch's schedules require in a state: callables, nested schedules, and one callable
_PARTS_OF_SCHEDULES = ("lr_lambdas", "_schedulers", "_scale_fn_custom")
_CHUNK_NUMEL = 1 << 22


def check_options(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare the options of saved groups with the options of this run's groups, which they replace.

    Raises:
        CheckpointError: an option has another type than in this run, or an invalid value.
    """
    defaults = unwrapped(optimizer).defaults
    for index, (here, there) in enumerate(zip(optimizer.param_groups, saved, strict=False)):
        for name, value in there.items():
            own = here.get(name)
            if name not in OF_PARAMETERS and not _is_option(name, value, own, defaults.get(name)):
                raise CheckpointError(
                    f"optimizer state: found {name}={value!r:.60} in group {index}, where this run has "
                    f"{own!r:.60}; load another tag, or with load_optimizer_states=False"
                )


def check_numbers(saved: Sequence[Mapping[str, Any]]) -> None:
    """Check the parameter numbers in the groups of a torch state dict.

    Raises:
        CheckpointError: two parameters have the same number, so one would load the other's state.
    """
    counts = Counter(number for group in saved for number in group["params"])
    if twice := [number for number, count in counts.items() if count > 1]:
        raise CheckpointError(
            f"optimizer state: found the number {twice[0]} in the groups {counts[twice[0]]} times, where each "
            "parameter has a number of its own; load another tag, or with load_optimizer_states=False"
        )


def _is_option(name: str, value: Any, own: Any, default: Any) -> bool:
    if isinstance(value, bool | int | str) and type(value) is type(own) and value == own:
        return True
    if name in _SWITCHES:
        # an engine's optimizers do not support `differentiable`, unless this run's group already has it
        is_possible = name != "differentiable" or not value or bool(own)
        return (value is None or isinstance(value, bool)) and isinstance(own, bool | None) and is_possible
    if isinstance(value, tuple | list):
        if own is None:
            return all(_is_option(name, each, None, None) for each in value)
        if isinstance(own, list) and len(own) != len(value) and name not in _NEVER_NONE:  # the list may grow over time
            return all(_is_option(name, each, None, None) for each in value)
        same = isinstance(own, tuple | list) and len(own) == len(value)
        return same and all(_is_option(name, *each, each[1]) for each in zip(value, own, strict=True))
    if value is None:  # allowed as a choice, but not as a lost number
        can_be = own is None or isinstance(own, bool | str)
        return can_be or (default is None and name not in _NEVER_NONE)
    if isinstance(value, bool | str):
        return own is None or isinstance(own, type(value))
    number = number_in(value)
    if number is None:
        return own is None or (type(own) is type(value) and number_in(own) is None)
    if isinstance(own, bool | str | tuple | list):
        return False
    if not math.isfinite(number):
        return not math.isnan(number) and number == number_in(own)
    return not (name in _AT_LEAST_0 | _BELOW_1 and number < 0) and not (name in _BELOW_1 and number >= 1)


def check_state(state: Mapping[str, Any], whose: str, *, numel: int | None = None, dtype: torch.dtype) -> None:
    """Check the known states of a parameter, or of a flat group.

    Args:
        whose: the owner for error messages, "optimizer state of <whose>".
        numel: number of elements that the moments must have; None: not checked.
        dtype: dtype of the weights that the optimizer updates; moments must not be wider.

    Raises:
        CheckpointError: a state is invalid; the message has the value found.
    """
    for name, value in state.items():
        if name in _MOMENTS:
            check_moment(name, value, whose, numel=numel, dtype=dtype)
        elif name in _NUMBERS and value is not None and not _is_count(value):
            raise _refusal(whose, name, f"{value!r:.60}, and a number of 0 or more is expected")


def check_moment(name: str, value: Any, whose: str, *, numel: int | None = None, dtype: torch.dtype) -> None:
    """Check one state with one number per element; see `check_state`."""
    if value is None and name == "momentum_buffer":  # SGD without momentum
        return
    if not isinstance(value, Tensor):
        raise _refusal(whose, name, f"{value!r:.60}, and a tensor is expected")
    check_dtype(name, value.dtype, whose, dtype)
    if numel is not None and value.numel() != numel:
        raise _refusal(whose, name, f"{counted(value.numel(), 'element')}, and the parameters have {numel}")
    numbers = torch.view_as_real(value) if value.is_complex() else value
    for chunk in numbers.reshape(-1).split(_CHUNK_NUMEL) if numbers.numel() else ():
        low, high = (each.item() for each in chunk.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise _refusal(whose, name, "nan or infinity")
        if name in _NOT_NEGATIVE and low < 0 and not value.is_complex():
            raise _refusal(whose, name, f"the value {low:g}, and no value below 0 is expected")


def check_dtype(name: str, found: torch.dtype, whose: str, dtype: torch.dtype) -> None:
    """Check the dtype of a state with one number per element."""
    fits = found.is_floating_point or (found.is_complex and dtype.is_complex)
    if name in _MOMENTS and not (fits and found.itemsize <= max(dtype.itemsize, 4)):
        raise _refusal(whose, name, f"{found}, and the weights that the optimizer updates are {dtype}")


def is_moment(name: str) -> bool:
    """Return whether `check_moment` knows the state."""
    return name in _MOMENTS


def check_schedule(scheduler: Any, saved: Any) -> None:
    """Compare the saved state of a learning-rate schedule with this run's schedule.

    Schedules that are neither torch's nor have `check_state_dict` are not checked.

    Raises:
        CheckpointError: the state is of another kind of schedule, has other values where the schedule has numbers, or
            lacks a key that torch's schedule requires.
    """
    if hasattr(scheduler, "check_state_dict"):
        scheduler.check_state_dict(saved)
        return
    if isinstance(scheduler, LRScheduler):
        _check_torch_schedule(scheduler, saved, type(scheduler).__name__)


def _check_torch_schedule(scheduler: LRScheduler, saved: Any, whose: str) -> None:
    own = scheduler.state_dict()
    values = saved.items() if isinstance(saved, Mapping) else [("state_dict", saved)]
    for name, value in values:
        if not isinstance(saved, Mapping) or (name in own and not _fits_schedule(name, own[name], value)):
            raise CheckpointError(
                f"{whose}: the saved {name} is {value!r:.60}, where this run has {own.get(name)!r:.60}; load another "
                "tag, or with load_lr_scheduler_states=False"
            )
    for name in _PARTS_OF_SCHEDULES:
        if name in own and name not in saved:
            raise CheckpointError(
                f"{whose}: found no {name} in the saved state, which has {', '.join(map(str, saved)) or 'nothing'}. It "
                "is of another kind of schedule; load another tag, or with load_lr_scheduler_states=False"
            )
    for place, each in enumerate(getattr(scheduler, "_schedulers", ())):
        _check_torch_schedule(each, saved["_schedulers"][place], f"{type(each).__name__}, schedule {place} of {whose}")


def _fits_schedule(name: str, own: Any, saved: Any) -> bool:
    """Return whether `saved` is a valid value for `name` in the state of a torch schedule with value `own`."""
    if name == "_scale_fn_custom":
        return saved is None or isinstance(saved, Mapping)
    if name not in _PARTS_OF_SCHEDULES:
        return _is_alike(own, saved)
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        return False
    return name == "_schedulers" or all(each is None or isinstance(each, Mapping) for each in saved)


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether `saved` has numbers where `own` has numbers. Infinity counts, as before a first measurement."""
    if isinstance(own, list | tuple) and own and all(number_in(each) is not None for each in own):
        return isinstance(saved, list | tuple) and all(_is_alike(own[0], each) for each in saved)
    if number_in(own) is None:
        return True
    number = number_in(saved)
    return number is not None and not math.isnan(number) and not (type(own) is int and math.isinf(number))


def _is_count(value: Any) -> bool:
    number = number_in(value)
    return number is not None and math.isfinite(number) and number >= 0


def number_in(value: Any) -> float | None:
    """Return a number (or a one-element real tensor) as float; None for anything else."""
    if isinstance(value, Tensor):
        is_real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return float(value) if is_real else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _refusal(whose: str, name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"optimizer state of {whose}: {name} has {found}; load another tag, or with load_optimizer_states=False"
    )


_BY_PARAMETER = ("parameter_scalars", "parameter_states")  # nested dicts of states in the state of a flat group
_COUNTERS = frozenset({"step", "variance_step"})  # optimizers keep these in the state, in the group, or not at all
_OPTION_OF = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
# options that schedules, or optimizers that count there, add to groups: they do not identify the kind
_ADDED_LATER = frozenset({"step", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Kind:
    """A set of optimizers that can load each other's state."""

    label: str
    classes: tuple[type, ...] = ()
    ours: tuple[tuple[str, tuple[str, ...]], ...] = ()  # our classes: (module, names), looked up if imported
    states: frozenset[str] = frozenset()  # states of every updated parameter
    optional: frozenset[str] = frozenset()  # states with some settings, or in some groups
    options: frozenset[str] = frozenset()  # options that a group must have: identifies the kind without states

    def takes(self, states: frozenset[str], options: frozenset[str]) -> bool:
        known = not states or self.states <= states <= self.states | self.optional
        return known and self.options <= options


_ONE_BIT = (("deepspeed.optim.one_bit", ("OnebitAdam",)), ("deepspeed.optim.zero_one_adam", ("ZeroOneAdam",)))
_KINDS = (
    Kind("NAdam", (torch.optim.NAdam,), states=_names("exp_avg exp_avg_sq mu_product"), options=_names("betas")),
    Kind(
        "Adam",
        (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam),
        (("deepspeed.ops.adam", ("FusedAdam", "DeepSpeedCPUAdam")), ("deepspeed.ops.lamb", ("FusedLamb",)), *_ONE_BIT),
        states=_names("exp_avg exp_avg_sq"),
        optional=_names("max_exp_avg_sq"),
        options=_names("betas eps"),
    ),
    Kind(
        "1-bit LAMB",
        ours=(("deepspeed.optim.one_bit_lamb", ("OnebitLamb",)),),
        states=_names("exp_avg exp_avg_sq"),
        optional=_names("exp_avg_sq_fresh lamb_coeff_freeze last_factor"),
        options=_names("betas eps"),
    ),
    Kind("Adamax", (torch.optim.Adamax,), states=_names("exp_avg exp_inf"), options=_names("betas eps")),
    Kind(
        "Lion",
        ours=(("deepspeed.ops.lion", ("FusedLion", "DeepSpeedCPULion")),),
        states=_names("exp_avg"),
        options=_names("betas"),
    ),
    Kind(
        "Muon",
        ours=(("deepspeed.ops.muon", ("Muon",)),),
        optional=_names("momentum_buffer exp_avg exp_avg_sq"),
        options=_names("momentum ns_steps"),
    ),
    Kind(
        "RMSprop",
        (torch.optim.RMSprop,),
        states=_names("square_avg"),
        optional=_names("momentum_buffer grad_avg"),
        options=_names("alpha"),
    ),
    Kind("Adadelta", (torch.optim.Adadelta,), states=_names("square_avg acc_delta"), options=_names("rho")),
    Kind("SGD", (torch.optim.SGD,), optional=_names("momentum_buffer"), options=_names("momentum dampening")),
    Kind(
        "Adagrad",
        (torch.optim.Adagrad,),
        (("deepspeed.ops.adagrad", ("DeepSpeedCPUAdagrad",)),),
        states=_names("sum"),
        options=_names("eps"),
    ),
)


def state_names(states: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the states of parameters or flat groups (`zero/state_dict.py`), without counters."""
    names: set[str] = set()
    for state in states:
        names.update(name for name in state if name not in _BY_PARAMETER)
        for nested in _BY_PARAMETER:
            names.update(state.get(nested, {}))
    return frozenset(names) - _COUNTERS


def num_states(optimizer: torch.optim.Optimizer) -> int:
    """Return the maximum number of states of a parameter's size; 2 for an optimizer that is not in `_KINDS`."""
    kind = _kind_of(unwrapped(optimizer))
    if kind is None:
        return 2
    groups = optimizer.param_groups
    chosen = [name for name in kind.optional if any(group.get(_OPTION_OF.get(name, "")) for group in groups)]
    by_group = kind.optional & {"exp_avg", "exp_avg_sq"}  # Muon: states of its Adam groups
    return max(len(kind.states - {"mu_product"}) + len(chosen), len(by_group))


def check_saved_state(
    optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse the saved state of another kind of optimizer.

    Args:
        states: the saved state of each parameter or flat group: name -> value.
        param_groups: the saved groups.

    For a class that is not in `_KINDS`, the state fits unless each side has names (of states, or of numeric options)
    that the other side lacks.

    Raises:
        CheckpointError: the message describes both sides.
    """
    optimizer = unwrapped(optimizer)
    kind, saved, own = _kind_of(optimizer), state_names(states), state_names(optimizer.state.values())
    options, defaults = _numbers(param_groups), _numbers([optimizer.defaults])
    lacks = defaults - {name for group in param_groups for name in group}
    unknown = options - {name for group in (optimizer.defaults, *optimizer.param_groups) for name in group}
    if kind is not None:
        fits = kind.takes(saved, options)
        own |= kind.states | kind.optional
    else:
        fits = not (saved and own and saved - own and own - saved)
    if fits and not (lacks and unknown):
        return
    raise CheckpointError(
        f"optimizer state: found that of {_label(saved, options)} ({_listed('states', saved)}; "
        f"{_listed('options', options)}), this run has {type(optimizer).__name__} ({_listed('states', own)}; "
        f"{_listed('options', defaults)}); use the optimizer of the save, or load_optimizer_states=False"
    )


def check_each_state(optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a state that lacks a required state of its kind. Call `check_saved_state` first, which checks all at once.

    A parameter that was never updated has no state, or only a step count of 0; this is accepted.

    Raises:
        CheckpointError: the message has the missing names.
    """
    kind = _kind_of(unwrapped(optimizer))
    for state in states:
        names = state_names([state])
        missing = kind.states - names if kind is not None and (names or _counts(state)) else frozenset()
        if missing:
            raise CheckpointError(
                f"optimizer state: found states ({', '.join(sorted(names or {'step'}))}) without "
                f"{', '.join(sorted(missing))}, which {type(unwrapped(optimizer)).__name__} needs; load another tag, "
                "or with load_optimizer_states=False"
            )


def _counts(state: Mapping[str, Any]) -> bool:
    """Return whether the state of a parameter, or of a flat group, has a nonzero step count."""
    by_param = state.get("parameter_scalars", {})
    values = [value for name in _COUNTERS for value in (state.get(name), *by_param.get(name, {}).values())]
    return any(
        bool((value != 0).any()) if isinstance(value, torch.Tensor) else value not in (None, 0) for value in values
    )


def check_needed(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse states that lack the step count or a state required by the group's options. Call `check_options` first.

    Args:
        states: states of parameters or flat groups. States that are empty or have no moments are accepted.

    Raises:
        CheckpointError: the message has the missing names.
    """
    kind = _kind_of(unwrapped(optimizer))
    if kind is None:
        return
    needed = {"step"} | {name for name in kind.optional if kind.states and group.get(_OPTION_OF.get(name, ""))}
    for state in states:
        present = {name for name, value in state.items() if value is not None}
        present.update(name for nested in _BY_PARAMETER for name in state.get(nested, {}))
        moments = (kind.states or _names("exp_avg")) & present
        if moments and (missing := sorted(needed - present)):
            because = f", as {_OPTION_OF[missing[0]]} is on" if missing[0] in _OPTION_OF else ""
            raise CheckpointError(
                f"optimizer state: found no {missing[0]} beside {', '.join(sorted(moments))}, which "
                f"{type(unwrapped(optimizer)).__name__} needs{because}; load another tag, or with "
                "load_optimizer_states=False"
            )


def _kind_of(optimizer: Any) -> Kind | None:
    for kind in _KINDS:
        if any(_is_a(optimizer, known) for known in (*kind.classes, *_loaded(kind.ours))):
            return kind
    return None


def _numbers(groups: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the numeric options, such as `betas`. Flags and None are left out: they differ between versions."""
    return frozenset(
        name
        for group in groups
        for name, value in group.items()
        if _is_number(value) or (isinstance(value, tuple | list) and all(map(_is_number, value)))
        if name != "params" and name not in _ADDED_LATER
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(saved: frozenset[str], options: frozenset[str]) -> str:
    """Return the label of the kind that matches a saved state, which does not name its optimizer."""
    return next((kind.label for kind in _KINDS if kind.takes(saved, options)), "another optimizer")


def _listed(what: str, names: frozenset[str]) -> str:
    return f"{what}: {', '.join(sorted(names)) or 'none'}"
