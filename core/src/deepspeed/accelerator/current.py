"""Chooses the current accelerator. The order of precedence is:

    set_accelerator(X())  >  DS_ACCELERATOR=name  >  the available offer of highest priority  >  the plain device

The first `get_accelerator()` makes the choice, once per process, and logs one line. With `DS_ACCELERATOR` set, only the
named plugin is loaded. `explain()` returns the choice and its reason for `ds_report`.

If the class of an accelerator does not derive from DeepSpeedAccelerator, the object is wrapped in a class that does.
The wrapper delegates each method, property and private name (such as `_compile_backend`) that the object has, and
inherits the rest from the base class. The object itself is not modified.
"""

import inspect
import os
import random
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deepspeed._installation import pip_install
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from deepspeed.accelerator.building import builders_beside
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import PluginError, stated
from deepspeed.log import logger, warn_once
from deepspeed.plugins import Offer, plugin_manager
from deepspeed.plugins.admission import ACCELERATOR_VARIABLE, PLAIN, inside_probe
from deepspeed.uncaught import has_launcher

# Methods that a class must implement if it does not derive from DeepSpeedAccelerator. The wrapper inherits the rest.
_OWN_ANSWERS = ("device_name", "current_device_name", "device_count", "is_available", "communication_backend_name")
_MISSING = object()
# in which a rank finds its number on its node, as torchrun, Open MPI, MVAPICH, MPICH and Slurm call it
_MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_RANKS = ("LOCAL_RANK", *_MPI_LOCAL_RANKS, "SLURM_LOCALID")
_NOT_LATER = ("", "-1", "0")  # numbers of the first rank, and of none


def as_accelerator(candidate: Any) -> DeepSpeedAccelerator:
    """Return `candidate`, or a wrapper around it if its class does not derive from the base class.

    `candidate` is the argument of `set_accelerator` or the result of a plugin's `ds_accelerator`.

    Raises:
        PluginError: `candidate` is a class, lacks a required method, or has no `_name`.
    """
    kind = type(candidate)
    if isinstance(candidate, type):
        raise PluginError(f"an accelerator object is required, not the class; call it: {candidate.__name__}()")
    accelerator = candidate if isinstance(candidate, DeepSpeedAccelerator) else _wrap(candidate)
    if not accelerator._name:
        raise PluginError(f"{kind.__name__} has no `_name`; set it to the device type of torch, for example 'cpu'")
    return accelerator


class WrappedAccelerator(DeepSpeedAccelerator):
    """The base class of all wrappers. `_wrap` creates one subclass per wrapped class, with the same name.

    A name that DeepSpeedAccelerator does not have is looked up on the wrapped object at each access.
    """

    _wrapped: Any

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped" or name.startswith("__"):  # `copy` asks an instance that has no `_wrapped` yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def op_builder_dir(self) -> str:
        return builders_beside(type(self._wrapped))


class _Delegated:
    """A descriptor that reads and writes an attribute of the wrapped object."""

    def __init__(self, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: WrappedAccelerator | None, owner: type) -> Any:
        return self if instance is None else getattr(instance._wrapped, self._attribute)

    def __set__(self, instance: WrappedAccelerator, value: Any) -> None:
        setattr(instance._wrapped, self._attribute, value)


def _wrap(candidate: Any) -> DeepSpeedAccelerator:
    kind = type(candidate)
    missing = [name for name in _OWN_ANSWERS if not _has(candidate, name)]
    if missing:
        raise PluginError(
            f"{candidate!r} ({kind.__name__}) is no accelerator: it lacks {', '.join(missing)}; "
            "derive its class from deepspeed.accelerator.DeepSpeedAccelerator"
        )
    known = [*documented_names(), "_communication_backend_name", "_compile_backend"]
    members: dict[str, Any] = {name: _Delegated(name) for name in known if _has(candidate, name)}
    # Keep the vendor's class and module names for logs and reports.
    members.update(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    wrapper_class = type(kind.__name__, (WrappedAccelerator,), members)
    accelerator: DeepSpeedAccelerator = wrapper_class(candidate)
    accelerator._name = getattr(candidate, "_name", None) or candidate.device_name()
    return accelerator


def _has(candidate: Any, name: str) -> bool:
    """Return whether the object has `name`, without reading a property: reading `Stream` may initialize the device."""
    return inspect.getattr_static(candidate, name, _MISSING) is not _MISSING


VARIABLE = ACCELERATOR_VARIABLE
SET_BY_HAND = "set_accelerator was called"
_TRACEBACK = "`ds_report --verbose` shows the traceback"
_HOST = "cpu"


@dataclass(frozen=True)
class AcceleratorChoice:
    """The current accelerator, the name of its plugin (or None), and the reason for the choice."""

    accelerator: DeepSpeedAccelerator
    plugin: str | None
    why: str


_choice: AcceleratorChoice | None = None
#: `_choice.accelerator`, for a fast lookup; None before the choice
installed: DeepSpeedAccelerator | None = None
_lock = threading.RLock()  # re-entrant, so that a plugin that calls back gets an error instead of a deadlock
_choosing = False


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the current accelerator, the same object for the whole process. After the first call this is a lookup.

    Raises:
        PluginError: `DS_ACCELERATOR` names a plugin that is missing, broken or has no device, or two plugins offer
            devices with equal priority or for the same torch device. The error is not cached: the next call retries.
    """
    return installed if installed is not None else _choose_once().accelerator


def set_accelerator(accelerator: Any) -> None:
    """Use `accelerator` from now on. This overrides every other rule. User scripts call it before anything else.

    Args:
        accelerator: an instance of `DeepSpeedAccelerator`, or an object with the same methods. Such an object is
            wrapped, and `get_accelerator()` returns the wrapper: an instance of `DeepSpeedAccelerator` that delegates
            to the object and inherits the methods that the object lacks.

    Raises:
        PluginError: `accelerator` is neither, for example None. The current accelerator does not change.
    """
    chosen = as_accelerator(accelerator)
    with _lock:
        _install(AcceleratorChoice(chosen, None, SET_BY_HAND))


def reset_accelerator() -> None:
    """Forget the choice, so that the next `get_accelerator()` chooses again. For tests."""
    with _lock:
        _install(None)


def is_current_accelerator_supported() -> bool:
    """Return True when the current accelerator has an available device."""
    return get_accelerator().is_available()


def explain() -> AcceleratorChoice:
    """Return the choice and its reason, for `ds_report`. Makes the choice if there is none yet."""
    return _choice if _choice is not None else _choose_once()


def plugin_of(accelerator: DeepSpeedAccelerator) -> str | None:
    """Return the plugin of `accelerator`, or None if it is not current, was set by hand, or is the plain device."""
    return accelerator._plugin


def __getattr__(name: str) -> DeepSpeedAccelerator | None:
    """Return the current accelerator for `real_accelerator.ds_accelerator`: None before the choice."""
    if name == "ds_accelerator":
        return installed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _choose_once() -> AcceleratorChoice:
    global _choosing
    if inside_probe():  # the probe runs in another thread, which would deadlock on the lock below
        raise PluginError("get_accelerator() was called by a plugin whose import or ds_probe the choice is waiting for")
    with _lock:
        if _choice is not None:
            return _choice
        if _choosing:
            raise PluginError("get_accelerator() was called by an accelerator plugin that is itself being built")
        _choosing = True
        try:
            choice = _choose()
            _install(choice)
        finally:
            _choosing = False
        logger.info(f"accelerator {choice.accelerator._name!r} ({type(choice.accelerator).__name__}): {choice.why}")
        return choice


def _install(choice: AcceleratorChoice | None) -> None:
    """Write the choice; nothing else does. Activate the hooks of the chosen accelerator plugin only."""
    global _choice, installed
    if _choice is not None and _choice.plugin is not None:
        plugin_manager().deactivate(_choice.plugin)
        _choice.accelerator._plugin = None
    if choice is not None and choice.plugin is not None:
        plugin_manager().activate(choice.plugin)
        choice.accelerator._plugin = choice.plugin
    _choice = choice
    installed = None if choice is None else choice.accelerator


def _choose() -> AcceleratorChoice:
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted == PLAIN:
        return AcceleratorChoice(PlainAccelerator(), None, f"{VARIABLE}={PLAIN}")
    if wanted:
        return _by_name(wanted)
    while True:
        offers = plugin_manager().offers()
        _warn_of_broken(offers)
        available = [offer for offer in offers if offer.available]
        if not available:
            return _fall_to_plain(offers)
        best = _highest(available)
        _check_claims(best, best.device, available)
        try:
            choice = _from_plugin(best, f"priority {best.priority} is the highest available ({best.reason})")
        except PluginError as error:  # the device exists but the package is broken: try the other offers
            plugin_manager().withdraw(best.name, error)
        else:
            found = choice.accelerator._name
            if found != _HOST:  # several packages may use the host; the priority decides whose kernels are better
                _check_claims(best, found, available)
            return choice


def _warn_of_broken(offers: list[Offer]) -> None:
    """Warn once per broken plugin, even if another accelerator wins: the user may want the broken plugin's device."""
    manager = plugin_manager()
    for offer in offers:
        error = manager.failure(offer.name)
        if error is not None and not offer.available and not manager.refusal(offer.name):
            label = f"accelerator {offer.name!r}"
            told = str(error) if str(error).startswith(label) else f"{label}: {error}"
            warn_once(f"{told}; going on without it ({_TRACEBACK})")


def _highest(available: list[Offer]) -> Offer:
    best = [offer for offer in available if offer.priority == available[0].priority]
    if len(best) > 1:
        names = " and ".join(repr(offer.name) for offer in best)
        remedy = " or ".join(f"{VARIABLE}={offer.name}" for offer in best)
        raise PluginError(
            f"accelerators {names} are both available with priority {best[0].priority}; choose with {remedy}"
        )
    return best[0]


def _check_claims(best: Offer, device: str, available: list[Offer]) -> None:
    """Refuse to choose between packages for the same torch device. A priority ranks different devices, not packages
    for one device."""
    others = [offer for offer in available if offer.name != best.name and offer.device == device]
    if not others:
        return
    manager = plugin_manager()

    def shown(offer: Offer) -> str:
        poses = f", which poses as {device!r}" if offer.name != device else ""
        return f"{offer.name!r} (from {manager.origin(offer.name)}{poses})"

    names = " and ".join(map(shown, (best, *others)))
    remedy = " or ".join(f"{VARIABLE}={offer.name}" for offer in (best, *others))
    undeclared = best.device != device
    declare = f"; {best.name!r} should say so itself, by Offer(impersonates={device!r})" if undeclared else ""
    raise PluginError(
        f"accelerators {names} {'both' if len(others) == 1 else 'all'} claim torch's device {device!r}, and one can "
        f"have it; choose with {remedy}, or uninstall the other{declare}"
    )


def _by_name(name: str) -> AcceleratorChoice:
    """Load the plugin `name`. Errors are raised `from None`: the text states the cause, and `ds_report` shows where."""
    manager = plugin_manager()
    try:
        manager.load(name)
        offer = manager.probe(name)
        if offer.available:
            return _from_plugin(offer, stated(VARIABLE))
    except PluginError as error:
        is_broken = name in manager.names() and not manager.refusal(name)
        raise PluginError(f"{stated(VARIABLE)}: {error}{f'; {_TRACEBACK}' if is_broken else ''}") from None
    raise PluginError(
        f"{stated(VARIABLE)}: that accelerator cannot be used here: {offer.reason}; "
        f"unset {VARIABLE} to choose another{f'; {_TRACEBACK}' if manager.failure(name) else ''}"
    )


def _from_plugin(offer: Offer, why: str) -> AcceleratorChoice:
    accept = partial(_known_to_torch, offer=offer)
    return AcceleratorChoice(plugin_manager().build_accelerator(offer.name, accept), offer.name, why)


def _known_to_torch(built: Any, offer: Offer) -> DeepSpeedAccelerator:
    """Check that the `_name` of the accelerator `built` by a plugin is a torch device type, and return it."""
    accelerator = as_accelerator(built)
    name = accelerator._name
    if offer.impersonates and name != offer.impersonates:
        raise PluginError(
            f"its Offer poses as {offer.impersonates!r}, and {type(accelerator).__name__} has the `_name` {name!r}; "
            "make them the same"
        )
    try:
        known = torch.device(name).type == name
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise PluginError(
            f"{type(accelerator).__name__} has the `_name` {name!r}, which is no device type of torch "
            f"{torch.__version__}; correct it, or import the vendor's package that registers it before the accelerator "
            "is built"
        )
    return accelerator


def _fall_to_plain(offers: list[Offer]) -> AcceleratorChoice:
    remedy = ""
    if offers:
        refused = "; ".join(f"{offer.name}: {offer.reason}" for offer in offers)
        why = f"no installed accelerator is available ({refused})"
    else:
        why = "no accelerator extension is installed"
        remedy = f"{pip_install('ds-ext-cpu')}, or your vendor's ds-ext-<device>; "
    if not _is_told():
        logger.warning(f"{why}; running on the plain CPU device. {remedy}{VARIABLE}={PLAIN} silences this")
    return AcceleratorChoice(PlainAccelerator(), None, why)


def _is_told() -> bool:
    """Whether another process of this node warns: the launcher, which chose before its ranks, or the first rank."""
    return has_launcher() or any(os.environ.get(name, "") not in _NOT_LATER for name in _LOCAL_RANKS)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch, and all devices of the accelerator.

    Args:
        seed: 0 to 2**32 - 1.

    Raises:
        ValueError: NumPy rejects the seed; Python's generator is already seeded then.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def _after_fork() -> None:
    """Reset the lock in a forked child if another thread held it. A completed choice stays."""
    global _lock, _choosing
    if _lock.acquire(blocking=False):
        _lock.release()
        return
    _lock, _choosing = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
