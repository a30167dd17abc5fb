"""Whether an optimizer can go on from a saved optimizer state. Asked at a load, before it changes anything.

What counts is the names of the states, not the class: torch's AdamW, FusedAdam and DeepSpeedCPUAdam keep `exp_avg` and
`exp_avg_sq` and take each other's. In an optimizer that keeps others, a state would be a KeyError at the next step, or
lie unread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import CheckpointError
from deepspeed.optim.traits import _is_a, _loaded, unwrapped

_BY_PARAMETER = ("parameter_scalars", "parameter_states")  # dicts of states within a flat group's
_COUNTERS = frozenset({"step", "variance_step"})  # some keep it in the state, some in the group, some not at all
_SWITCHES = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
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
    chosen = [name for name in kind.optional if any(group.get(_SWITCHES.get(name, "")) for group in groups)]
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
    needed = {"step"} | {name for name in kind.optional if kind.states and group.get(_SWITCHES.get(name, ""))}
    for state in states:
        present = {name for name, value in state.items() if value is not None}
        present.update(name for nested in _BY_PARAMETER for name in state.get(nested, {}))
        moments = (kind.states or _names("exp_avg")) & present
        if moments and (missing := sorted(needed - present)):
            because = f", as {_SWITCHES[missing[0]]} is on" if missing[0] in _SWITCHES else ""
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
