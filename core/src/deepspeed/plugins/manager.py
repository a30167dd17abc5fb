"""Finding plugins: entry points by name, one at a time, each failure kept where it happened.

Nothing is imported until a name is asked for; a plugin that cannot be imported, was made for another API, fails or
hangs becomes an `Offer` with a reason, or a `PluginError` when somebody asked for it by name.

Two sets of hooks are kept apart: *candidates* (everything that was loaded, so that it can be probed) and *active*
plugins (the chosen accelerator's and the feature plugins), the only ones whose other hooks are called. Active plugins
are asked in one order, whatever was loaded first: feature plugins by name, then the accelerator's.
"""

import dataclasses
import difflib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pluggy

from deepspeed.errors import PluginError, shown, stated
from deepspeed.log import logger, warn_once
from deepspeed.plugins import hookspecs
from deepspeed.plugins.admission import (
    ACCELERATORS,
    BLOCK_VARIABLE,
    FEATURES,
    KINDS,
    NAMES_VARIABLE,
    blocked,
    call_with_limit,
    check_api,
    distribution_of,
    import_plugin,
    import_timeout_s,
    inside_probe,
    is_lent,
    named,
    one_line,
    read_entry_points,
    refusal,
    timeout_s,
)
from deepspeed.plugins.hookspecs import Offer

Key = tuple[str, str]  # group, name


class PluginManager:
    """Loads, probes and calls plugins. One per process, from `plugin_manager()`; tests build their own.

    Args:
        entry_points: group -> its entry points; replaced in tests.
    """

    def __init__(self, entry_points: Callable[[str], Iterable[Any]] = read_entry_points) -> None:
        self._read = entry_points
        self._entries: dict[str, list[Any]] = {}
        self._plugins: dict[Key, object] = {}
        self._registered: set[Key] = set()  # those that the program added itself
        self._failures: dict[Key, PluginError] = {}  # of loading: raised again at each load
        self._faults: dict[Key, PluginError] = {}  # of a plugin that was loaded: in its probe, or as it was built
        self._offers: dict[str, Offer] = {}
        self._candidates = _pluggy_manager()
        self._active_keys: set[Key] = set()
        #: the hooks of active plugins; replaced as a whole, so that a call in another thread sees one state
        self.active = _pluggy_manager()
        self._features_loaded = False
        # Re-entrant: building an accelerator may load another plugin.
        self._lock = threading.RLock()

    # ----- what is there ---------------------------------------------------------------------------------------------

    def names(self, group: str = ACCELERATORS) -> list[str]:
        """Names of installed and registered plugins, sorted, also of blocked and broken ones. Imports none."""
        registered = {name for (where, name) in self._plugins if where == group}
        return sorted(registered | {entry.name for entry in self._group(group)})

    def failure(self, name: str, group: str = ACCELERATORS) -> PluginError | None:
        """Return the error of loading, probing or building `name`, or None; its `__cause__` is the plugin's error."""
        return self._failures.get((group, name)) or self._faults.get((group, name))

    def refusal(self, name: str, group: str = ACCELERATORS) -> str | None:
        """Return why `DS_PLUGINS_BLOCK` or `DS_PLUGINS_AUTOLOAD` keeps `name` from being loaded, or None."""
        return refusal(name, group == ACCELERATORS, (group, name) in self._registered)

    def origin(self, name: str, group: str = ACCELERATORS) -> str:
        """Say where `name` comes from, for reports: package, version and module of each announcement."""
        if (group, name) in self._registered:
            return "registered by the program"
        entries = {entry.value: entry for entry in self._group(group) if entry.name == name}
        return ", ".join(f"{distribution_of(entry)} ({value})" for value, entry in entries.items())

    def folder(self, name: str, group: str = ACCELERATORS) -> str | None:
        """The folder of the module of `name`; None when it could not be loaded, or has no file. For reports."""
        file = getattr(self._plugins.get((group, name)), "__file__", None)
        return None if file is None else os.path.dirname(file)

    def stated_api(self, name: str, group: str = ACCELERATORS) -> str | None:
        """The `DS_PLUGIN_API` of `name`; None when it states none or could not be loaded. For reports."""
        stated = getattr(self._plugins.get((group, name)), "DS_PLUGIN_API", None)
        return None if stated is None else str(stated)

    def hooks_of(self, name: str, group: str = ACCELERATORS) -> list[str]:
        """The hooks that `name` implements, sorted; empty when it is not loaded. For reports."""
        plugin = self._plugins.get((group, name))
        callers = self._candidates.get_hookcallers(plugin) if plugin is not None else None
        return sorted(caller.name for caller in callers or [])

    def providers(self, hook_name: str) -> list[str]:
        """Names of the active plugins that implement `hook_name`, in the order in which they are asked."""
        caller = getattr(self.active.hook, hook_name)
        return [impl.plugin_name for impl in reversed(caller.get_hookimpls())]

    # ----- loading ---------------------------------------------------------------------------------------------------

    def register(self, plugin: object, name: str, group: str = ACCELERATORS) -> None:
        """Add `plugin` in this process, as if a package had announced it; wins over an installed one of that name.

        Raises:
            PluginError: its hooks do not fit, or it was made for another API.
        """
        with self._hold():
            self.unregister(name, group)
            self._admit(plugin, name, group)
            self._plugins[group, name] = plugin
            self._registered.add((group, name))

    def unregister(self, name: str, group: str = ACCELERATORS) -> None:
        """Forget what was registered or loaded as `name`. No error when there is none."""
        with self._hold():
            self.deactivate(name, group)
            plugin = self._plugins.pop((group, name), None)
            for kept in (self._failures, self._faults):
                kept.pop((group, name), None)
            self._registered.discard((group, name))
            if group == ACCELERATORS:
                self._offers.pop(name, None)
            still_named = any(other is plugin for other in self._plugins.values())
            if plugin is not None and not still_named and self._candidates.is_registered(plugin):
                self._candidates.unregister(plugin)

    def load(self, name: str, group: str = ACCELERATORS) -> object:
        """Import the plugin called `name`, and no other. The second call is a lookup, also of the failure.

        Raises:
            PluginError: it is not installed, kept out by the environment, announced twice, cannot be imported within
                the limit of `admission.py`, or does not fit this core.
        """
        with self._hold():
            if reason := self.refusal(name, group):
                raise PluginError(f"{KINDS[group]} {name!r} is {reason}")
            if (group, name) in self._failures:
                raise self._failures[group, name]
            if (group, name) not in self._plugins:
                seconds = timeout_s() if group == ACCELERATORS else import_timeout_s()
                try:
                    plugin = import_plugin(name, group, self._group(group), seconds, self._lock)
                    self._admit(plugin, name, group)
                except PluginError as error:
                    self._failures[group, name] = error
                    raise
                self._plugins[group, name] = plugin
            return self._plugins[group, name]

    def activate(self, name: str, group: str = ACCELERATORS) -> None:
        """Call the hooks of `name` from now on; load the plugin first if need be."""
        with self._hold():
            self.load(name, group)
            if (group, name) not in self._active_keys:
                self._active_keys.add((group, name))
                self.active = self._arranged()

    def deactivate(self, name: str, group: str = ACCELERATORS) -> None:
        """Call the hooks of `name` no longer. No error when they were not called before."""
        with self._hold():
            if (group, name) in self._active_keys:
                self._active_keys.discard((group, name))
                self.active = self._arranged()

    # ----- calling ---------------------------------------------------------------------------------------------------

    @property
    def hook(self) -> Any:
        """The hooks of all active plugins, as functions: `plugin_manager().hook.ds_optimizer(name=..., ...)`.

        The first use loads the feature plugins; a broken one is warned about and left out.
        """
        if not self._features_loaded:
            self._load_features()
        return self.active.hook

    def notify(self, event: str, **values: Any) -> dict[str, Exception]:
        """Call the event hook of every active plugin, also after one of them failed.

        Returns:
            plugin name -> what it raised; empty when all went well.
        """
        return self.ask_all(event, **values)[1]

    def ask_all(self, hook: str, /, **values: Any) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Call `hook` of every active plugin, also after one of them failed.

        Returns:
            plugin name -> what it answered, and the same of what those that failed raised.
        """
        answers: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                answers[impl.plugin_name] = impl.function(*(values[argument] for argument in impl.argnames))
            except Exception as error:  # noqa: BLE001 - a plugin, whatever it raises; the caller reports it
                failures[impl.plugin_name] = error
        return answers, failures

    def device_faults(self, index: int | None) -> tuple[dict[tuple[str, str], int], list[str]]:
        """Ask every active plugin for its counts of a device's faults.

        Args:
            index: of the device; None: the host.

        Returns:
            (plugin, kind of fault) -> count, and a sentence for each plugin that failed or did not answer by counts.
        """
        answers, failures = self.ask_all("ds_device_faults", index=index)
        reasons = [
            f"plugin {plugin!r} failed in ds_device_faults: {type(error).__name__}: {error}"
            for plugin, error in failures.items()
        ]
        counts: dict[tuple[str, str], int] = {}
        for plugin, answer in answers.items():
            if isinstance(answer, Mapping) and all(isinstance(count, int) for count in answer.values()):
                counts |= {(plugin, str(kind)): count for kind, count in answer.items()}
            elif answer is not None:
                reasons.append(
                    f"plugin {plugin!r} answered ds_device_faults by {answer!r:.80}; a mapping of kinds of faults to "
                    "whole numbers is expected"
                )
        return counts, reasons

    def probe(self, name: str) -> Offer:
        """Ask the accelerator plugin `name` once whether its device is here. Never raises for the plugin's faults.

        One that gives no answer within `DS_PROBE_TIMEOUT` seconds (10) counts as broken; see `admission.py`.
        """
        with self._hold():
            if reason := self.refusal(name):
                return Offer(name, available=False, reason=reason)
            if name not in self._offers:
                seconds = timeout_s()
                try:
                    self._offers[name] = self._probe(name, seconds)
                except PluginError as error:
                    self._faults[ACCELERATORS, name] = error
                    self._offers[name] = Offer(name, available=False, reason=f"broken: {error}")
            return self._offers[name]

    def offers(self) -> list[Offer]:
        """The offer of every accelerator, the likeliest first: available, then by priority, then by name."""
        found = [self.probe(name) for name in self.names()]
        return sorted(found, key=lambda offer: (not offer.available, -offer.priority, offer.name))

    def withdraw(self, name: str, error: PluginError) -> None:
        """Make the offer of `name` unavailable for this process: its device was there, but it could not be built."""
        with self._hold():
            self._faults[ACCELERATORS, name] = error
            self._offers[name] = dataclasses.replace(self.probe(name), available=False, reason=f"broken: {error}")

    def build_accelerator(self, name: str, accept: Callable[[Any], Any] = lambda built: built) -> Any:
        """Build the accelerator of the plugin `name` by its `ds_accelerator`, and return what `accept` makes of it.

        Args:
            accept: may refuse the accelerator with a `PluginError`, which then names the plugin.

        Raises:
            PluginError: the plugin cannot be loaded, has no such hook, failed in it, or what it built is refused.
        """
        try:
            built = self._call(name, "ds_accelerator")
            if built is None:
                raise PluginError(f"accelerator {name!r}: its ds_accelerator returned None, not an accelerator")
            try:
                return accept(built)
            except PluginError as error:
                raise PluginError(f"accelerator {name!r}: its ds_accelerator answers wrongly: {error}") from error
        except PluginError as error:
            self._faults[ACCELERATORS, name] = error
            raise

    def op_builders(self, name: str, group: str = ACCELERATORS) -> dict[str, type]:
        """The op builders of the plugin `name`, by builder name; empty when it states none.

        Raises:
            PluginError: the plugin cannot be loaded, or failed in `ds_op_builders`, or names there what is no class.
        """
        if not self._implements(self.load(name, group), "ds_op_builders"):
            return {}
        answer = self._call(name, "ds_op_builders", group)
        try:
            builders = dict(answer)
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{KINDS[group]} {name!r}: its ds_op_builders returned {answer!r}, not builder name -> class"
            ) from error
        for builder_name, builder_class in builders.items():
            if not isinstance(builder_class, type):
                raise PluginError(
                    f"{KINDS[group]} {name!r}: its ds_op_builders gives {builder_class!r} as {builder_name!r}; "
                    "a class that derives from OpBuilder is expected"
                )
        return builders

    def ask(self, name: str, hook_name: str, /, **values: Any) -> Any:
        """Return what the accelerator plugin `name`, active or not, answers to a hook; None if it has no such hook.

        Raises:
            PluginError: the plugin cannot be loaded, or failed in the hook.
        """
        plugin = self.load(name)
        if not self._implements(plugin, hook_name):
            return None
        others = [other for other in self._candidates.get_plugins() if other is not plugin]
        try:
            return self._candidates.subset_hook_caller(hook_name, others)(**values)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{KINDS[ACCELERATORS]} {name!r} failed in {hook_name}: {one_line(error)}") from error

    # ----- inside ----------------------------------------------------------------------------------------------------

    def _group(self, group: str) -> list[Any]:
        if group not in self._entries:
            self._entries[group] = list(self._read(group))
        return self._entries[group]

    def _admit(self, plugin: object, name: str, group: str) -> None:
        """Check API range and hooks of `plugin`, then make it a candidate."""
        label = f"{KINDS[group]} {name!r}"
        if plugin is None or type(plugin).__hash__ is None:  # pluggy keeps plugins in sets
            raise PluginError(f"{label} is {plugin!r}; a module, or a hashable object with hooks, is expected")
        check_api(plugin, label)
        if self._candidates.is_registered(plugin):  # one module may stand under two names or in both groups
            return
        try:
            self._candidates.register(plugin, name=f"{group}:{name}")
        except pluggy.PluginValidationError as error:
            if self._candidates.is_registered(plugin):  # pluggy before 1.7 leaves it half registered
                self._candidates.unregister(plugin)
            raise PluginError(f"{label}: {one_line(error)}") from error
        unknown = [
            caller.name
            for caller in self._candidates.get_hookcallers(plugin) or []
            if not caller.has_spec() and not _optional(caller, plugin)
        ]
        if unknown:
            self._candidates.unregister(plugin)
            known = [hook.__name__ for _, hooks in hookspecs.GROUPS.values() for hook in hooks]
            near = [close for each in unknown for close in difflib.get_close_matches(each, known, n=1)]
            listed = ", ".join(dict.fromkeys([*near, *known]))  # the likeliest first
            raise PluginError(f"{label} implements {', '.join(unknown)}, which is no hook; known: {listed}")

    def _implements(self, plugin: object, hook_name: str) -> bool:
        return any(impl.plugin is plugin for impl in getattr(self._candidates.hook, hook_name).get_hookimpls())

    def _call(self, name: str, hook_name: str, group: str = ACCELERATORS, seconds: float | None = None) -> Any:
        """Call an argument-free start hook of one plugin; what goes wrong inside becomes a `PluginError`."""
        plugin = self.load(name, group)
        if not self._implements(plugin, hook_name):
            raise PluginError(
                f"{KINDS[group]} {name!r} has no {hook_name} hook; a function of that name counts only with @hookimpl "
                "above it; see deepspeed.plugins.hookspecs"
            )
        others = [other for other in self._candidates.get_plugins() if other is not plugin]
        hook = self._candidates.subset_hook_caller(hook_name, others)
        try:
            answers = hook() if seconds is None else call_with_limit(hook, seconds, f"{hook_name} of {name}")
        except (Exception, SystemExit) as error:
            raise PluginError(f"{KINDS[group]} {name!r} failed in {hook_name}: {one_line(error)}") from error
        return answers[0] if answers else None

    def _probe(self, name: str, seconds: float) -> Offer:
        offer = self._call(name, "ds_probe", seconds=seconds)
        if not isinstance(offer, Offer):
            raise PluginError(f"ds_probe returned {offer!r}, not an Offer")
        offer.check_types()
        if offer.name != name:
            raise PluginError(f"ds_probe offers {offer.name!r} under the entry point {name!r}; make them the same")
        return offer

    def _load_features(self) -> None:
        with self._hold():
            if self._features_loaded:
                return
            asked_for = [name for name in named() if name not in self.names(ACCELERATORS)]
            for name in sorted({*self.names(FEATURES), *asked_for}):
                try:
                    if name in asked_for or not self.refusal(name, FEATURES):
                        self.activate(name, FEATURES)
                except PluginError as error:
                    if name in asked_for:
                        raise PluginError(f"{stated(NAMES_VARIABLE)}: {error}") from error
                    logger.warning(f"{error}; going on without it")
            self._warn_of_idle_blocks()
            self._features_loaded = True

    def _warn_of_idle_blocks(self) -> None:
        """Say which names of `DS_PLUGINS_BLOCK` keep nothing out: a misspelt one lets through what it should stop."""
        if names := blocked():
            installed = {*self.names(ACCELERATORS), *self.names(FEATURES)}
            if idle := sorted(names - installed):
                warn_once(
                    f"{stated(BLOCK_VARIABLE)}: nothing installed is named {', '.join(map(shown, idle))}; "
                    f"installed: {', '.join(sorted(installed)) or 'none'}"
                )

    def _arranged(self) -> pluggy.PluginManager:
        """The active plugins in the order of asking: pluggy asks the one that was registered last first."""
        manager = _pluggy_manager()
        order = sorted(self._active_keys, key=lambda key: (key[0] == ACCELERATORS, key[1]))
        shown = {ACCELERATORS: "{}", FEATURES: FEATURES + ":{}"}
        for group, name in reversed(order):
            plugin = self._plugins[group, name]
            if not manager.is_registered(plugin):  # one module may stand in both groups
                manager.register(plugin, name=shown[group].format(name))
        return manager

    @contextmanager
    def _hold(self) -> Iterator[None]:
        """The lock of this manager; a plugin that asks for it while it is probed gets an error: it is waited for."""
        if inside_probe():
            raise PluginError("a plugin asked the plugin manager, which is waiting for its import or its ds_probe")
        if is_lent(self._lock):  # a feature plugin that is being imported: who waits for it holds the lock
            yield
            return
        with self._lock:
            yield

    def _after_fork(self) -> None:
        """Called in each forked child: a thread that held the lock is not in it, and what it did may be half done."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        self._candidates = _pluggy_manager()
        for (group, name), plugin in self._plugins.items():
            if not self._candidates.is_registered(plugin):
                self._candidates.register(plugin, name=f"{group}:{name}")
        self.active = self._arranged()


def _pluggy_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _optional(caller: Any, plugin: object) -> bool:
    return all(impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin)


_PROCESS_MANAGER = PluginManager()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS_MANAGER._after_fork)


def plugin_manager() -> PluginManager:
    """The manager of this process. Nothing is read or loaded before it is asked."""
    return _PROCESS_MANAGER
