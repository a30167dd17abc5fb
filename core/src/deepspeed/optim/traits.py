"""Traits of optimizers, found by type, that the engine needs before it shards an optimizer's state."""

import inspect
import sys
from typing import Any

import torch

# our own classes by module; looked up only if the module is imported, because no instance exists otherwise
_OURS = (
    ("deepspeed.ops.adam", ("FusedAdam", "DeepSpeedCPUAdam")),
    ("deepspeed.ops.adagrad", ("DeepSpeedCPUAdagrad",)),
    ("deepspeed.ops.lion", ("FusedLion", "DeepSpeedCPULion")),
)
_HOST_FRONTS = (
    ("deepspeed.ops.adam", ("DeepSpeedCPUAdam",)),
    ("deepspeed.ops.adagrad", ("DeepSpeedCPUAdagrad",)),
    ("deepspeed.ops.lion", ("DeepSpeedCPULion",)),
)
_MUON = (("deepspeed.ops.muon", ("Muon",)),)
_WHOLE_FRONTS = (("deepspeed.ops.lamb", ("FusedLamb",)), *_MUON)
_AVERAGING = (("deepspeed.optim.one_bit", ("OneBitOptimizer",)),)
_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_TESTED_WITH_ZERO = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.SGD,
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_elementwise(optimizer: Any) -> bool:
    """Return whether each element's update depends on this element alone, so that state may be sharded anywhere.

    True for Adam(W), SGD, Adagrad, Lion and similar optimizers of torch, and for subclasses that keep their `step`.
    False for LAMB, Muon, Adafactor, LBFGS, and for every unknown class, unless the class (or the object) sets
    `is_elementwise = True`. For a wrapper, its `.optimizer` counts.
    """
    said = getattr(optimizer, "is_elementwise", None)
    if isinstance(said, bool):
        return said
    return any(_is_a(unwrapped(optimizer), known) for known in (*_ELEMENTWISE, *_loaded(_OURS)))


def looks_at_whole(optimizer: Any) -> bool:
    """Return whether an optimizer is known to need full parameters. If False, nothing is known."""
    said_so = getattr(optimizer, "is_elementwise", None) is False
    return said_so or isinstance(unwrapped(optimizer), (*_WHOLE, *_loaded(_WHOLE_FRONTS)))


def is_muon(optimizer: Any) -> bool:
    """Return whether the optimizer is Muon with its own step, so that ranks may orthogonalize matrices together."""
    return any(_is_a(unwrapped(optimizer), each) for each in _loaded(_MUON))


def is_tested_with_zero(optimizer: Any) -> bool:
    """Return whether ZeRO is tested with the optimizer; any other needs `zero_allow_untested_optimizer: true`.

    These are DeepSpeed's documented list (Adam, AdamW, Adagrad, Lion, Muon, torch's or its own classes), and SGD.
    """
    known = (*_TESTED_WITH_ZERO, *_loaded(_OURS), *_loaded(_MUON))
    return any(_is_a(unwrapped(optimizer), each) for each in known)


def averages_in_step(optimizer: Any) -> bool:
    """Return whether the optimizer's step communicates more than gradients (`deepspeed.optim.one_bit`)."""
    return isinstance(unwrapped(optimizer), tuple(_loaded(_AVERAGING)))


def phase_settings(optimizer: Any) -> dict[str, int]:
    """Return the settings outside of the groups that decide what such an optimizer communicates."""
    settings: dict[str, int] = getattr(unwrapped(optimizer), "phase_settings", {})
    return settings


def kept_options(optimizer: Any) -> frozenset[str]:
    """Return the options of groups that loading a checkpoint does not change."""
    names: frozenset[str] = getattr(unwrapped(optimizer), "kept_options", frozenset())
    return names


def takes_only_sparse(optimizer: Any) -> bool:
    """Return whether the optimizer refuses dense gradients."""
    return isinstance(unwrapped(optimizer), torch.optim.SparseAdam)


def arguments_of_step(optimizer: Any) -> list[str]:
    """Return the required arguments of the optimizer's `step`, such as the closure of LBFGS. For a wrapper, the
    arguments of its `.optimizer` count too."""
    needed: dict[str, None] = {}
    for each in (optimizer, unwrapped(optimizer)):
        try:
            # read the class, because a schedule replaces `step` on the instance by a wrapper
            parameters = list(inspect.signature(type(each).step).parameters.values())[1:]
        except ValueError:  # a compiled function has no signature
            continue
        is_needed = (each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC)
        needed |= dict.fromkeys(each.name for each in is_needed)
    return list(needed)


def is_host_front(optimizer: Any) -> bool:
    """Return whether the optimizer is one of our classes for host memory, which offload requires.

    See `zero_force_ds_cpu_optimizer`. Subclasses count even if they override `step`.
    """
    return isinstance(unwrapped(optimizer), tuple(_loaded(_HOST_FRONTS)))


def _loaded(table: tuple[tuple[str, tuple[str, ...]], ...]) -> list[type]:
    return [getattr(sys.modules[module], name) for module, names in table if module in sys.modules for name in names]


def unwrapped(optimizer: Any) -> Any:
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    # Accelerate's wrapper is itself a torch Optimizer
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_a(optimizer: Any, known: type) -> bool:
    """Return whether `optimizer` is an instance of `known`, and its class does not override `step`.

    The class must not override the methods that our `step` calls either.
    """
    cls = type(optimizer)
    if not issubclass(cls, known):
        return False
    return all(
        # torch wraps `step` of every instantiated class: compare the wrapped functions
        inspect.unwrap(getattr(cls, method)) is inspect.unwrap(getattr(known, method))
        for method in ("step", "update_params", "before_update")
        if hasattr(known, method)
    )
