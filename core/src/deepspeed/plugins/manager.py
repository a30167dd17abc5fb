"""PluginManager: loads plugins by entry point, one name at a time, and records each failure.

A plugin is imported only when its name is requested. If a plugin cannot be imported, needs another API, fails or hangs,
the result is an unavailable `Offer` with a reason, or a `PluginError` if the caller requested the plugin by name.

The manager keeps two sets of hooks. *Candidates* are all loaded plugins; they can be probed. *Active* plugins are the
chosen accelerator's plugin and the feature plugins; only their other hooks are called. The order of calls does not
depend on the order of loading: feature plugins by name, then the accelerator's plugin.
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
    """Loads, probes and calls plugins. `plugin_manager()` returns the one of the process; tests build their own.

    Args:
        entry_points: a function from a group to its entry points; tests replace it.
    """

    def __init__(self, entry_points: Callable[[str], Iterable[Any]] = read_entry_points) -> None:
        self._read = entry_points
        self._entries: dict[str, list[Any]] = {}
        self._plugins: dict[Key, object] = {}
        self._registered: set[Key] = set()  # plugins that the program registered itself
        self._failures: dict[Key, PluginError] = {}  # errors of loading, raised again by each `load`
        self._faults: dict[Key, PluginError] = {}  # errors of loaded plugins: in the probe or the build
        self._offers: dict[str, Offer] = {}
        self._candidates = _pluggy_manager()
        self._active_keys: set[Key] = set()
        #: the hooks of active plugins; replaced as a whole, so that other threads see a consistent state
        self.active = _pluggy_manager()
        self._features_loaded = False
        # Re-entrant: building an accelerator may load another plugin.
        self._lock = threading.RLock()

    # ----- queries ---------------------------------------------------------------------------------------------------

    def names(self, group: str = ACCELERATORS) -> list[str]:
        """Return the sorted names of installed and registered plugins, even blocked or broken ones. Imports none."""
        registered = {name for (where, name) in self._plugins if where == group}
        return sorted(registered | {entry.name for entry in self._group(group)})

    def failure(self, name: str, group: str = ACCELERATORS) -> PluginError | None:
        """Return the error from loading, probing or building `name`, or None. `__cause__` is the plugin's error."""
        return self._failures.get((group, name)) or self._faults.get((group, name))

    def refusal(self, name: str, group: str = ACCELERATORS) -> str | None:
        """Return why `DS_PLUGINS_BLOCK`, `DS_PLUGINS_AUTOLOAD` or `DS_ACCELERATOR=plain` excludes `name`, or None."""
        return refusal(name, group == ACCELERATORS, (group, name) in self._registered)

    def origin(self, name: str, group: str = ACCELERATORS) -> str:
        """Return where `name` comes from, for reports: package, version and module of each entry point."""
        if (group, name) in self._registered:
            return "registered by the program"
        entries = {entry.value: entry for entry in self._group(group) if entry.name == name}
        return ", ".join(f"{distribution_of(entry)} ({value})" for value, entry in entries.items())

    def folder(self, name: str, group: str = ACCELERATORS) -> str | None:
        """Return the folder of the module of `name`, for reports; None if it is not loaded or has no file."""
        file = getattr(self._plugins.get((group, name)), "__file__", None)
        return None if file is None else os.path.dirname(file)

    def stated_api(self, name: str, group: str = ACCELERATORS) -> str | None:
        """Return the `DS_PLUGIN_API` of `name`, for reports; None if it is not loaded or has no range."""
        stated = getattr(self._plugins.get((group, name)), "DS_PLUGIN_API", None)
        return None if stated is None else str(stated)

    def hooks_of(self, name: str, group: str = ACCELERATORS) -> list[str]:
        """Return the sorted hooks that `name` implements, for reports; empty if it is not loaded."""
        plugin = self._plugins.get((group, name))
        callers = self._candidates.get_hookcallers(plugin) if plugin is not None else None
        return sorted(caller.name for caller in callers or [])

    def providers(self, hook_name: str) -> list[str]:
        """Return the names of the active plugins that implement `hook_name`, in the order of the calls."""
        caller = getattr(self.active.hook, hook_name)
        return [impl.plugin_name for impl in reversed(caller.get_hookimpls())]

    # ----- loading ---------------------------------------------------------------------------------------------------

    def register(self, plugin: object, name: str, group: str = ACCELERATORS) -> None:
        """Add `plugin` as if an installed package declared it. It replaces an installed plugin of the same name.

        Raises:
            PluginError: a hook does not match its specification, or the plugin needs another API version.
        """
        with self._hold():
            self.unregister(name, group)
            self._admit(plugin, name, group)
            self._plugins[group, name] = plugin
            self._registered.add((group, name))

    def unregister(self, name: str, group: str = ACCELERATORS) -> None:
        """Remove the plugin that was registered or loaded as `name`, if any."""
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
        """Import the plugin `name` and no other. The result, or the error, is cached.

        Raises:
            PluginError: the plugin is not installed, excluded by the environment, declared twice, not importable within
                the time limit of `admission.py`, or incompatible with this core.
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
        """Call the hooks of `name` from now on. Loads the plugin if necessary."""
        with self._hold():
            self.load(name, group)
            if (group, name) not in self._active_keys:
                self._active_keys.add((group, name))
                self.active = self._arranged()

    def deactivate(self, name: str, group: str = ACCELERATORS) -> None:
        """Stop calling the hooks of `name`. Does nothing if the plugin is not active."""
        with self._hold():
            if (group, name) in self._active_keys:
                self._active_keys.discard((group, name))
                self.active = self._arranged()

    # ----- calling ---------------------------------------------------------------------------------------------------

    @property
    def hook(self) -> Any:
        """The hooks of all active plugins, as functions: `plugin_manager().hook.ds_optimizer(name=..., ...)`.

        The first use loads the feature plugins. A broken feature plugin is skipped with a warning.
        """
        if not self._features_loaded:
            self._load_features()
        return self.active.hook

    def notify(self, event: str, **values: Any) -> None:
        """Call an event hook of all active plugins. A plugin that fails is named in the log once; training goes on."""
        for plugin, error in self.ask_all(event, **values)[1].items():
            warn_once(f"plugin {plugin!r} failed in {event}: {type(error).__name__}: {error}", (-1,))

    def ask_all(self, hook: str, /, **values: Any) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Call `hook` of every active plugin, even if one of them fails.

        Returns:
            Plugin name -> its answer, and plugin name -> the exception that it raised.
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
            index: the device's index; None means the host.

        Returns:
            (plugin, kind of fault) -> count, and a message for each plugin that failed or returned no valid counts.
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
        """Return the cached offer of the accelerator plugin `name`. Errors of the plugin make the offer unavailable.

        A plugin that gives no answer within `DS_PROBE_TIMEOUT` seconds (10) counts as broken; see `admission.py`.
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
        """Return the offers of all accelerators: available ones first, then by priority, then by name."""
        found = [self.probe(name) for name in self.names()]
        return sorted(found, key=lambda offer: (not offer.available, -offer.priority, offer.name))

    def withdraw(self, name: str, error: PluginError) -> None:
        """Make the offer of `name` unavailable in this process, because its accelerator could not be built."""
        with self._hold():
            self._faults[ACCELERATORS, name] = error
            self._offers[name] = dataclasses.replace(self.probe(name), available=False, reason=f"broken: {error}")

    def build_accelerator(self, name: str, accept: Callable[[Any], Any] = lambda built: built) -> Any:
        """Call `ds_accelerator` of the plugin `name`, and return `accept(accelerator)`.

        Args:
            accept: checks the accelerator. Its `PluginError` is raised again with the plugin's name.

        Raises:
            PluginError: the plugin cannot be loaded, lacks the hook or failed in it, or `accept` refused the result.
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
        """Return builder name -> class from `ds_op_builders` of the plugin `name`; empty if it lacks the hook.

        Raises:
            PluginError: the plugin cannot be loaded, failed in `ds_op_builders`, or returned something but classes.
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
        """Call a hook of the accelerator plugin `name`, active or not. Return None if the plugin lacks the hook.

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
        """Check the API range and the hooks of `plugin`, then add it to the candidates."""
        label = f"{KINDS[group]} {name!r}"
        if plugin is None or type(plugin).__hash__ is None:  # pluggy keeps plugins in sets
            raise PluginError(f"{label} is {plugin!r}; a module, or a hashable object with hooks, is expected")
        check_api(plugin, label)
        if self._candidates.is_registered(plugin):  # one module may have two names, or be in both groups
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
        """Call a start hook without arguments in one plugin. Convert its exceptions to `PluginError`."""
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
        """Warn of names in `DS_PLUGINS_BLOCK` that match no plugin: a misspelled name blocks nothing."""
        if names := blocked():
            installed = {*self.names(ACCELERATORS), *self.names(FEATURES)}
            if idle := sorted(names - installed):
                warn_once(
                    f"{stated(BLOCK_VARIABLE)}: nothing installed is named {', '.join(map(shown, idle))}; "
                    f"installed: {', '.join(sorted(installed)) or 'none'}"
                )

    def _arranged(self) -> pluggy.PluginManager:
        """Register the active plugins in reverse order of the calls: pluggy calls the last registered plugin first."""
        manager = _pluggy_manager()
        order = sorted(self._active_keys, key=lambda key: (key[0] == ACCELERATORS, key[1]))
        shown = {ACCELERATORS: "{}", FEATURES: FEATURES + ":{}"}
        for group, name in reversed(order):
            plugin = self._plugins[group, name]
            if not manager.is_registered(plugin):  # one module may be in both groups
                manager.register(plugin, name=shown[group].format(name))
        return manager

    @contextmanager
    def _hold(self) -> Iterator[None]:
        """Hold the manager's lock. A plugin that calls the manager during its probe gets an error, not a deadlock."""
        if inside_probe():
            raise PluginError("a plugin asked the plugin manager, which is waiting for its import or its ds_probe")
        if is_lent(self._lock):  # a feature plugin is being imported, and the thread that waits for it holds the lock
            yield
            return
        with self._lock:
            yield

    def _after_fork(self) -> None:
        """Rebuild the hooks in a forked child if another thread held the lock: its changes may be incomplete."""
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
    """Return the manager of this process. It reads and loads nothing before the first query."""
    return _PROCESS_MANAGER
