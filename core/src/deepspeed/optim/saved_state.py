"""Whether an optimizer can go on from a saved optimizer state. Asked at a load, before it changes anything.

What counts is the names of the states, not the class: torch's AdamW, FusedAdam and DeepSpeedCPUAdam keep `exp_avg` and
`exp_avg_sq` and take each other's. In an optimizer that keeps others, a state would be a KeyError at the next step, or
lie unread.

Then the values are looked at: types, dtypes, sizes and ranges, of the states and options whose meaning is known. An
optimizer that takes a text for its step count fails in its next step, and one that takes nan trains to nan.
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

#: states with one number per element, and those of them that are sums of squares, or largest values
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
#: options that are at least 0, and those that are also below 1
_AT_LEAST_0 = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "eps", "weight_decay", "lr_decay", "step"})
_BELOW_1 = frozenset({"betas", "alpha", "rho"})
_NEVER_NONE = frozenset({*_AT_LEAST_0, *_BELOW_1, "momentum", "dampening"})
_SWITCHES = frozenset(
    {
        *("amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable", "foreach", "fused"),
        *("maximize", "nesterov"),
    }
)
#: what a group says of its parameters, of which a load takes none: this run's stay
OF_PARAMETERS = ("params", "param_names")
#: keys that schedules of torch ask for in a state: those of callables, of schedules in one, and of a callable
_PARTS_OF_SCHEDULES = ("lr_lambdas", "_schedulers", "_scale_fn_custom")
_CHUNK_NUMEL = 1 << 22


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, as checkpoints have it, of the weights that an optimizer updates for parameters of `dtype`.

    It is fp32, or, for a `dtype` that has more bits or is complex, the type that torch promotes it and fp32 to.
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else torch.float32


def check_options(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare the options of saved groups with those of this run's groups, which they replace.

    Raises:
        CheckpointError: one has another type than here, or a value that it cannot have.
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
    """Look at the numbers by which groups of a torch state dict know their parameters.

    Raises:
        CheckpointError: two parameters have one number: one would take the other's state.
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
        # the optimizers that an engine can have take no other than this run's
        is_possible = name != "differentiable" or not value or bool(own)
        return (value is None or isinstance(value, bool)) and isinstance(own, bool | None) and is_possible
    if isinstance(value, tuple | list):
        if own is None:
            return all(_is_option(name, each, None, None) for each in value)
        if isinstance(own, list) and len(own) != len(value) and name not in _NEVER_NONE:  # a list that grows
            return all(_is_option(name, each, None, None) for each in value)
        same = isinstance(own, tuple | list) and len(own) == len(value)
        return same and all(_is_option(name, *each, each[1]) for each in zip(value, own, strict=True))
    if value is None:  # where it is a choice, and not a number that was lost
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
    """Look at the states of a parameter, or of a flat group, by name.

    Args:
        whose: completes "optimizer state of".
        numel: elements of the parameter, which its moments have, too; None: not to be compared.
        dtype: of the weights that the optimizer updates: moments are no wider.

    Raises:
        CheckpointError: says what was found.
    """
    for name, value in state.items():
        if name in _MOMENTS:
            check_moment(name, value, whose, numel=numel, dtype=dtype)
        elif name in _NUMBERS and value is not None and not _is_count(value):
            raise _refusal(whose, name, f"{value!r:.60}, and a number of 0 or more is expected")


def check_moment(name: str, value: Any, whose: str, *, numel: int | None = None, dtype: torch.dtype) -> None:
    """One state of `check_state` that has one number per element."""
    if value is None and name == "momentum_buffer":  # of SGD without momentum
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
    """The dtype of a state with one number per element."""
    fits = found.is_floating_point or (found.is_complex and dtype.is_complex)
    if name in _MOMENTS and not (fits and found.itemsize <= max(dtype.itemsize, 4)):
        raise _refusal(whose, name, f"{found}, and the weights that the optimizer updates are {dtype}")


def is_moment(name: str) -> bool:
    """Whether `check_moment` knows the state."""
    return name in _MOMENTS


def check_schedule(scheduler: Any, saved: Any) -> None:
    """Compare the state of a learning rate schedule with that of this run's, which it replaces.

    Of schedules with states that nobody here knows only the kind is looked at.

    Raises:
        CheckpointError: it is of another kind, or has something else where the schedule has numbers, or not what a
            schedule of torch asks for.
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
    """Whether a value can be that of `name` in the state of a schedule of torch, which has `own` there."""
    if name == "_scale_fn_custom":
        return saved is None or isinstance(saved, Mapping)
    if name not in _PARTS_OF_SCHEDULES:
        return _is_alike(own, saved)
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        return False
    return name == "_schedulers" or all(each is None or isinstance(each, Mapping) for each in saved)


def _is_alike(own: Any, saved: Any) -> bool:
    """Whether there are numbers where this run has some; infinity is one, as before a first measurement."""
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
    """A number, also in a tensor; None: it is none."""
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


_BY_PARAMETER = ("parameter_scalars", "parameter_states")  # dicts of states within a flat group's
_COUNTERS = frozenset({"step", "variance_step"})  # some keep it in the state, some in the group, some not at all
_OPTION_OF = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
# written into groups by schedules and by optimizers that count there: they tell nothing of the kind
_ADDED_LATER = frozenset({"step", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Kind:
    """Optimizers that take each other's state."""

    label: str
    classes: tuple[type, ...] = ()
    ours: tuple[tuple[str, tuple[str, ...]], ...] = ()  # fronts of ours: (module, names), looked up where loaded
    states: frozenset[str] = frozenset()  # what every parameter that was updated has
    optional: frozenset[str] = frozenset()  # states of some settings, or of some groups
    options: frozenset[str] = frozenset()  # what some group must have: tells kinds apart before there is a state

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
    """The names of the states of parameters or of flat groups (`zero/state_dict.py`), without counters."""
    names: set[str] = set()
    for state in states:
        names.update(name for name in state if name not in _BY_PARAMETER)
        for nested in _BY_PARAMETER:
            names.update(state.get(nested, {}))
    return frozenset(names) - _COUNTERS


def num_states(optimizer: torch.optim.Optimizer) -> int:
    """Return the most states of its own size that a parameter gets; 2 for an optimizer that the table here lacks."""
    kind = _kind_of(unwrapped(optimizer))
    if kind is None:
        return 2
    groups = optimizer.param_groups
    chosen = [name for name in kind.optional if any(group.get(_OPTION_OF.get(name, "")) for group in groups)]
    by_group = kind.optional & {"exp_avg", "exp_avg_sq"}  # Muon: of the groups that it leaves to Adam
    return max(len(kind.states - {"mu_product"}) + len(chosen), len(by_group))


def check_saved_state(
    optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Any]], param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse the saved state of another kind of optimizer.

    Args:
        states: the saved state of each parameter or flat group: name -> value.
        param_groups: the saved groups.

    Two optimizers of classes that are not in the table here fit, unless each side has names (of states, or of options
    that are numbers) that the other lacks.

    Raises:
        CheckpointError: names both.
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
    """Refuse a state that lacks what each one of its kind has, after `check_saved_state`, which looks at them together.

    A state of nothing, or of a count of no steps, is of a parameter that was never updated.

    Raises:
        CheckpointError: names what is missing.
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
    """Whether the state of a parameter, or of a parameter of a flat group, says that it was updated."""
    by_param = state.get("parameter_scalars", {})
    values = [value for name in _COUNTERS for value in (state.get(name), *by_param.get(name, {}).values())]
    return any(
        bool((value != 0).any()) if isinstance(value, torch.Tensor) else value not in (None, 0) for value in values
    )


def check_needed(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse states of a saved group that lack what its options ask for, or the count of steps, after `check_options`.

    Args:
        states: of parameters or flat groups; those that are empty or have no moments are let pass.

    Raises:
        CheckpointError: names what is missing.
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
    """The options that are numbers, such as `betas`; flags and None differ between versions of one class."""
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
    """Return the name of the kind of optimizer that left a saved state; only what the state holds can tell."""
    return next((kind.label for kind in _KINDS if kind.takes(saved, options)), "another optimizer")


def _listed(what: str, names: frozenset[str]) -> str:
    return f"{what}: {', '.join(sorted(names)) or 'none'}"
