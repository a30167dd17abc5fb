"""The current accelerator: who chooses it, when, and why it was this one.

    set_accelerator(X())  >  DS_ACCELERATOR=name  >  the available offer of highest priority  >  the plain device

The choice is made on the first `get_accelerator()`, once per process, and logged in one line. `DS_ACCELERATOR` loads
that plugin alone. `explain()` gives `ds_report` the whole story.

An accelerator whose class does not derive from DeepSpeedAccelerator is wrapped in one that does. The wrapper asks the
object first, for methods, properties and private names such as `_compile_backend`; the base answers what the object
lacks. The object itself is left as it was.
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

# What a class that does not derive from DeepSpeedAccelerator must answer itself; the base answers the rest.
_OWN_ANSWERS = ("device_name", "current_device_name", "device_count", "is_available", "communication_backend_name")
_MISSING = object()


def as_accelerator(candidate: Any) -> DeepSpeedAccelerator:
    """`candidate` itself, or its wrapper when its class does not derive from the base.

    Called for the argument of `set_accelerator` and for what a plugin's `ds_accelerator` returns.

    Raises:
        PluginError: it is a class, lacks the methods that every device answers, or has no `_name`.
    """
    kind = type(candidate)
    if isinstance(candidate, type):
        raise PluginError(f"an accelerator object is required, not the class; call it: {candidate.__name__}()")
    accelerator = candidate if isinstance(candidate, DeepSpeedAccelerator) else _wrap(candidate)
    if not accelerator._name:
        raise PluginError(f"{kind.__name__} has no `_name`; set it to the device type of torch, for example 'cpu'")
    return accelerator


class WrappedAccelerator(DeepSpeedAccelerator):
    """The base of all wrappers; each wrapped class gets a subclass with its name, made by `_wrap`.

    Names that the base does not know are looked up on the object, when they are asked.
    """

    _wrapped: Any

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped" or name.startswith("__"):  # a copy that is still empty
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def op_builder_dir(self) -> str:
        return builders_beside(type(self._wrapped))


class _Delegated:
    """A name that the wrapped object has: read from it, and written to it."""

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
    # The vendor's names of class and module, so that logs and reports show them.
    members.update(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    wrapper_class = type(kind.__name__, (WrappedAccelerator,), members)
    accelerator: DeepSpeedAccelerator = wrapper_class(candidate)
    accelerator._name = getattr(candidate, "_name", None) or candidate.device_name()
    return accelerator


def _has(candidate: Any, name: str) -> bool:
    """Whether the object has the name. A property is not read: `Stream` may start the device."""
    return inspect.getattr_static(candidate, name, _MISSING) is not _MISSING


VARIABLE = ACCELERATOR_VARIABLE
SET_BY_HAND = "set_accelerator was called"
_TRACEBACK = "`ds_report --verbose` shows the traceback"
_HOST = "cpu"


@dataclass(frozen=True)
class AcceleratorChoice:
    """The current accelerator, the plugin it came from (None: from no plugin), and why it was chosen."""

    accelerator: DeepSpeedAccelerator
    plugin: str | None
    why: str


_choice: AcceleratorChoice | None = None
#: `_choice.accelerator`, one lookup away; None before the choice
installed: DeepSpeedAccelerator | None = None
_lock = threading.RLock()  # re-entrant, so that a plugin that calls back gets an error and not a deadlock
_choosing = False


def get_accelerator() -> DeepSpeedAccelerator:
    """The current accelerator, the same object for the whole process. Called everywhere, so it costs a lookup.

    Raises:
        PluginError: `DS_ACCELERATOR` names a plugin that is missing, broken or has no device, or two plugins offer
            devices with equal priority. Nothing is remembered then; the next call tries again.
    """
    return installed if installed is not None else _choose_once().accelerator


def set_accelerator(accelerator: Any) -> None:
    """Use `accelerator` from now on, over every other rule. Called by user scripts before anything else.

    Args:
        accelerator: an instance of `DeepSpeedAccelerator`, or of a class with its methods that does not derive from it:
            such an object is wrapped, and `get_accelerator()` returns the wrapper: an instance of the base that asks
            the object first and answers itself what the object lacks.

    Raises:
        PluginError: it is neither, for example None. The accelerator stays as it was.
    """
    chosen = as_accelerator(accelerator)
    with _lock:
        _install(AcceleratorChoice(chosen, None, SET_BY_HAND))


def reset_accelerator() -> None:
    """Forget the choice, so that the next `get_accelerator()` chooses again. For tests."""
    with _lock:
        _install(None)


def is_current_accelerator_supported() -> bool:
    """True when the current accelerator can be used: its device is there."""
    return get_accelerator().is_available()


def explain() -> AcceleratorChoice:
    """The choice and its reason; chooses when nothing was chosen yet. For `ds_report`, with `candidates.py`."""
    return _choice if _choice is not None else _choose_once()


def plugin_of(accelerator: DeepSpeedAccelerator) -> str | None:
    """The plugin that `accelerator` came from; None when it was set by hand, is the plain one, or is not current."""
    return accelerator._plugin


def __getattr__(name: str) -> DeepSpeedAccelerator | None:
    """`deepspeed.accelerator.real_accelerator.ds_accelerator`: the current accelerator, None before the choice."""
    if name == "ds_accelerator":
        return installed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _choose_once() -> AcceleratorChoice:
    global _choosing
    if inside_probe():  # it runs in another thread, for which the lock below would be a deadlock
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
    """The only writer of the choice. Keeps the hooks of the chosen plugin, and no other's, active."""
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
        except PluginError as error:  # its device is there but its package is broken: the others still count
            plugin_manager().withdraw(best.name, error)
        else:
            found = choice.accelerator._name
            if found != _HOST:  # every package may compute there, and a priority says whose kernels are better
                _check_claims(best, found, available)
            return choice


def _warn_of_broken(offers: list[Offer]) -> None:
    """One warning per broken plugin, whichever accelerator wins: its device may be the one that was meant."""
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
    """Refuse a choice between packages for one device of torch, of which a process has one: a priority says which
    vendor's device is better, not whose this device is."""
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
    """Errors stand alone, without the traceback of their cause: they say it, and the report shows where it was."""
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
    """`built` by a plugin, as an accelerator by whose name torch can place a tensor."""
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
    if offers:
        refused = "; ".join(f"{offer.name}: {offer.reason}" for offer in offers)
        why = f"no installed accelerator is available ({refused})"
        logger.warning(f"{why}; running on the plain CPU device. {VARIABLE}={PLAIN} silences this")
    else:
        why = "no accelerator extension is installed"
        logger.warning(
            f"{why}; running on the plain CPU device. {pip_install('ds-ext-cpu')}, or your vendor's ds-ext-<device>; "
            f"{VARIABLE}={PLAIN} silences this"
        )
    return AcceleratorChoice(PlainAccelerator(), None, why)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch, and all devices of the accelerator.

    Args:
        seed: 0 to 2**32 - 1.

    Raises:
        ValueError: from NumPy, for another seed; Python's generator is seeded then.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def _after_fork() -> None:
    """Called in each forked child: a choice that another thread was making is forgotten, one that was made stays."""
    global _lock, _choosing
    if _lock.acquire(blocking=False):
        _lock.release()
        return
    _lock, _choosing = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
