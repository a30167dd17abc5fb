"""These functions say, by type and never by trying, what the engine must know before it shards an optimizer's state."""

import inspect
import sys
from typing import Any

import torch

# fronts of ours, by module; looked up only where the module is loaded: no instance exists otherwise
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
    """Whether each element's update depends on that element alone, so that state may be cut anywhere.

    True for Adam(W), SGD, Adagrad, Lion and torch's others of that kind, and for subclasses that keep their `step`.
    False for LAMB, Muon, Adafactor, LBFGS, and for every class that is not known, unless the class (or the object)
    says `is_elementwise = True`. A wrapper is asked for its `.optimizer`.
    """
    said = getattr(optimizer, "is_elementwise", None)
    if isinstance(said, bool):
        return said
    return any(_is_a(unwrapped(optimizer), known) for known in (*_ELEMENTWISE, *_loaded(_OURS)))


def looks_at_whole(optimizer: Any) -> bool:
    """Whether an optimizer that is not `is_elementwise` is known to need whole parameters; else nothing is known."""
    said_so = getattr(optimizer, "is_elementwise", None) is False
    return said_so or isinstance(unwrapped(optimizer), (*_WHOLE, *_loaded(_WHOLE_FRONTS)))


def is_tested_with_zero(optimizer: Any) -> bool:
    """Whether the optimizer is one that ZeRO is tested with; any other needs `zero_allow_untested_optimizer: true`.

    DeepSpeed's documented list (Adam, AdamW, Adagrad, Lion, Muon, in torch's and in its own classes), and SGD.
    """
    known = (*_TESTED_WITH_ZERO, *_loaded(_OURS), *_loaded(_MUON))
    return any(_is_a(unwrapped(optimizer), each) for each in known)


def averages_in_step(optimizer: Any) -> bool:
    """Whether the optimizer's ranks average more than gradients in its step (`deepspeed.optim.one_bit`)."""
    return isinstance(unwrapped(optimizer), tuple(_loaded(_AVERAGING)))


def phase_settings(optimizer: Any) -> dict[str, int]:
    """Return what such an optimizer has beside its groups that decides what its ranks send."""
    settings: dict[str, int] = getattr(unwrapped(optimizer), "phase_settings", {})
    return settings


def kept_options(optimizer: Any) -> frozenset[str]:
    """Return the options of groups that a load leaves as this run has them."""
    names: frozenset[str] = getattr(unwrapped(optimizer), "kept_options", frozenset())
    return names


def takes_only_sparse(optimizer: Any) -> bool:
    """Whether the optimizer refuses dense gradients."""
    return isinstance(unwrapped(optimizer), torch.optim.SparseAdam)


def arguments_of_step(optimizer: Any) -> list[str]:
    """The arguments without which the optimizer's `step` cannot be called, such as the closure of LBFGS. A wrapper is
    asked for its `.optimizer`, too."""
    needed: dict[str, None] = {}
    for each in (optimizer, unwrapped(optimizer)):
        try:
            # of the class: a schedule puts a wrapper of its own into the object
            parameters = list(inspect.signature(type(each).step).parameters.values())[1:]
        except ValueError:  # a compiled one does not say
            continue
        is_needed = (each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC)
        needed |= dict.fromkeys(each.name for each in is_needed)
    return list(needed)


def is_host_front(optimizer: Any) -> bool:
    """Whether the optimizer is one of ours for state in host memory, which offload wants to be given.

    See `zero_force_ds_cpu_optimizer`. Subclasses count, whatever their step: the user knows what it costs.
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
    """Return whether `optimizer` is of class `known`, or of a subclass that did not write its own `step`.

    Nor may the subclass have written the parts that our `step` calls.
    """
    cls = type(optimizer)
    if not issubclass(cls, known):
        return False
    return all(
        # torch wraps `step` of every class that is instantiated: compare what is inside
        inspect.unwrap(getattr(cls, method)) is inspect.unwrap(getattr(known, method))
        for method in ("step", "update_params", "before_update")
        if hasattr(known, method)
    )
