"""Finding plugins: entry points by name, one at a time, each failure kept where it happened.

Entry points are read with the `importlib_metadata` package. Nothing is imported until a name is asked for; a plugin
that cannot be imported, was made for another API, or fails in its probe becomes an `Offer` with a reason, or a
`PluginError` when somebody asked for it by name.

Two sets of hooks are kept apart: *candidates* (everything that was loaded, so that it can be probed) and *active*
plugins (the chosen accelerator's and the feature plugins), the only ones whose other hooks are called.
"""

import dataclasses
import difflib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import importlib_metadata
import pluggy

from deepspeed.errors import PluginError
from deepspeed.log import logger
from deepspeed.plugins import hookspecs
from deepspeed.plugins.offer import Offer

ACCELERATORS = "deepspeed.accelerators"
FEATURES = "deepspeed.plugins"
BLOCK_VARIABLE = "DS_PLUGINS_BLOCK"

_KINDS = {ACCELERATORS: "accelerator", FEATURES: "plugin"}


def read_entry_points(group: str) -> list[Any]:
    """The entry points of `group` in this environment, by name; no plugin is imported. Called once per group."""
    return sorted(importlib_metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


class PluginManager:
    """Loads, probes and calls plugins. One per process, from `plugin_manager()`; tests build their own.

    Args:
        entry_points: group -> its entry points; replaced in tests.
    """

    def __init__(self, entry_points: Callable[[str], Iterable[Any]] = read_entry_points) -> None:
        self._read = entry_points
        self._entries: dict[str, list[Any]] = {}
        self._plugins: dict[tuple[str, str], object] = {}
        self._failures: dict[tuple[str, str], PluginError] = {}
        self._offers: dict[str, Offer] = {}
        self._candidates = _pluggy_manager()
        self._active = _pluggy_manager()
        self._features_loaded = False
        # Re-entrant: building an accelerator may load another plugin.
        self._lock = threading.RLock()

    # ----- what is there ---------------------------------------------------------------------------------------------

    def names(self, group: str = ACCELERATORS) -> list[str]:
        """Names of installed and registered plugins, sorted, also of blocked and broken ones. Imports none."""
        registered = {name for (where, name) in self._plugins if where == group}
        return sorted(registered | {entry.name for entry in self._group(group)})

    def failure(self, name: str, group: str = ACCELERATORS) -> PluginError | None:
        """The error that loading `name` ended with, its `__cause__` the plugin's own; for reports."""
        return self._failures.get((group, name))

    def providers(self, hook_name: str) -> list[str]:
        """Names of the active plugins that implement `hook_name`, in the order in which they are asked."""
        caller = getattr(self._active.hook, hook_name)
        return [impl.plugin_name for impl in reversed(caller.get_hookimpls())]

    # ----- loading ---------------------------------------------------------------------------------------------------

    def register(self, plugin: object, name: str, group: str = ACCELERATORS) -> None:
        """Add `plugin` in this process, as if a package had announced it; wins over an installed one of that name.

        Raises:
            PluginError: its hooks do not fit, or it was made for another API.
        """
        with self._lock:
            self.unregister(name, group)
            self._admit(plugin, name, group)
            self._plugins[group, name] = plugin

    def unregister(self, name: str, group: str = ACCELERATORS) -> None:
        """Forget what was registered or loaded as `name`. No error when there is none."""
        with self._lock:
            plugin = self._plugins.pop((group, name), None)
            self._failures.pop((group, name), None)
            if group == ACCELERATORS:
                self._offers.pop(name, None)
            still_named = any(other is plugin for other in self._plugins.values())
            for manager in (self._candidates, self._active):
                if plugin is not None and not still_named and manager.is_registered(plugin):
                    manager.unregister(plugin)

    def load(self, name: str, group: str = ACCELERATORS) -> object:
        """Import the plugin called `name`, and no other. The second call is a lookup, also of the failure.

        Raises:
            PluginError: it is not installed, blocked, announced twice, cannot be imported, or does not fit this core.
        """
        with self._lock:
            if name in _blocked():
                raise PluginError(f"{_KINDS[group]} {name!r} is blocked by {BLOCK_VARIABLE}; take it out to use it")
            if (group, name) in self._failures:
                raise self._failures[group, name]
            if (group, name) not in self._plugins:
                try:
                    plugin = self._import(name, group)
                    self._admit(plugin, name, group)
                except PluginError as error:
                    self._failures[group, name] = error
                    raise
                self._plugins[group, name] = plugin
            return self._plugins[group, name]

    def activate(self, name: str, group: str = ACCELERATORS) -> None:
        """From now on call the hooks of `name`, which is loaded if need be."""
        with self._lock:
            plugin = self.load(name, group)
            if not self._active.is_registered(plugin):
                self._active.register(plugin, name=name if group == ACCELERATORS else f"{group}:{name}")

    def deactivate(self, name: str, group: str = ACCELERATORS) -> None:
        """Call the hooks of `name` no longer. No error when they were not called before."""
        with self._lock:
            plugin = self._plugins.get((group, name))
            if plugin is not None and self._active.is_registered(plugin):
                self._active.unregister(plugin)

    # ----- calling ---------------------------------------------------------------------------------------------------

    @property
    def hook(self) -> Any:
        """The hooks of all active plugins, as functions: `plugin_manager().hook.ds_optimizer(name=..., ...)`.

        The first use loads the feature plugins; a broken one is warned about and left out.
        """
        if not self._features_loaded:
            self._load_features()
        return self._active.hook

    def probe(self, name: str) -> Offer:
        """Ask the accelerator plugin `name` once whether its device is here. Never raises for the plugin's faults."""
        with self._lock:
            if name in _blocked():
                return Offer(name, available=False, reason=f"blocked by {BLOCK_VARIABLE}")
            if name not in self._offers:
                try:
                    self._offers[name] = self._probe(name)
                except PluginError as error:
                    self._offers[name] = Offer(name, available=False, reason=f"broken: {error}")
            return self._offers[name]

    def offers(self) -> list[Offer]:
        """The offer of every accelerator, the likeliest first: available, then by priority, then by name."""
        found = [self.probe(name) for name in self.names()]
        return sorted(found, key=lambda offer: (not offer.available, -offer.priority, offer.name))

    def withdraw(self, name: str, reason: str) -> None:
        """Make the offer of `name` unavailable for this process: its device was there, but it could not be built."""
        with self._lock:
            self._offers[name] = dataclasses.replace(self.probe(name), available=False, reason=reason)

    def build_accelerator(self, name: str) -> Any:
        """What `ds_accelerator` of the plugin `name` returns.

        Raises:
            PluginError: the plugin cannot be loaded, has no such hook, or failed in it.
        """
        built = self._call(name, "ds_accelerator")
        if built is None:
            raise PluginError(f"accelerator {name!r}: its ds_accelerator returned None, not an accelerator")
        return built

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
                f"{_KINDS[group]} {name!r}: its ds_op_builders returned {answer!r}, not builder name -> class"
            ) from error
        for builder_name, builder_class in builders.items():
            if not isinstance(builder_class, type):
                raise PluginError(
                    f"{_KINDS[group]} {name!r}: its ds_op_builders gives {builder_class!r} as {builder_name!r}; "
                    "a class that derives from OpBuilder is meant"
                )
        return builders

    # ----- inside ----------------------------------------------------------------------------------------------------

    def _group(self, group: str) -> list[Any]:
        if group not in self._entries:
            self._entries[group] = list(self._read(group))
        return self._entries[group]

    def _import(self, name: str, group: str) -> object:
        entries = {entry.value: entry for entry in self._group(group) if entry.name == name}
        if not entries:
            raise PluginError(self._missing(name, group))
        if len(entries) > 1:
            where = ", ".join(f"{entry.value} ({_distribution(entry)})" for entry in entries.values())
            raise PluginError(f"{_KINDS[group]} {name!r} is announced by {len(entries)} packages: {where}; keep one")
        (entry,) = entries.values()
        try:
            return entry.load()
        except Exception as error:
            raise PluginError(
                f"{_KINDS[group]} {name!r} of {_distribution(entry)} cannot be imported from {entry.value}: "
                f"{_one_line(error)}"
            ) from error

    def _missing(self, name: str, group: str) -> str:
        names = self.names(group)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? Otherwise: " if close else ""
        return (
            f"no {_KINDS[group]} named {name!r} is installed; installed: {', '.join(names) or 'none'}; "
            f"{hint}install the package that announces it (entry-point group {group!r}; this project calls its own "
            "ds-ext-<device>)"
        )

    def _admit(self, plugin: object, name: str, group: str) -> None:
        """Check API range and hooks of `plugin`, then make it a candidate."""
        label = f"{_KINDS[group]} {name!r}"
        if plugin is None or type(plugin).__hash__ is None:  # pluggy keeps plugins in sets
            raise PluginError(f"{label} is {plugin!r}; a module, or a hashable object with hooks, is meant")
        _check_api(plugin, label)
        if self._candidates.is_registered(plugin):  # one module may stand under two names or in both groups
            return
        try:
            self._candidates.register(plugin, name=f"{group}:{name}")
        except pluggy.PluginValidationError as error:
            if self._candidates.is_registered(plugin):  # pluggy before 1.7 leaves it half registered
                self._candidates.unregister(plugin)
            raise PluginError(f"{label}: {_one_line(error)}") from error
        unknown = [
            caller.name
            for caller in self._candidates.get_hookcallers(plugin) or []
            if not caller.has_spec() and not _optional(caller, plugin)
        ]
        if unknown:
            self._candidates.unregister(plugin)
            known = [hook.__name__ for _, hooks in hookspecs.GROUPS.values() for hook in hooks]
            raise PluginError(f"{label} implements {', '.join(unknown)}, which is no hook; known: {', '.join(known)}")

    def _implements(self, plugin: object, hook_name: str) -> bool:
        return any(impl.plugin is plugin for impl in getattr(self._candidates.hook, hook_name).get_hookimpls())

    def _call(self, name: str, hook_name: str, group: str = ACCELERATORS) -> Any:
        """Call an argument-free start hook of one plugin; what goes wrong inside becomes a `PluginError`."""
        plugin = self.load(name, group)
        if not self._implements(plugin, hook_name):
            raise PluginError(f"{_KINDS[group]} {name!r} has no {hook_name} hook; see deepspeed.plugins.hookspecs")
        others = [other for other in self._candidates.get_plugins() if other is not plugin]
        try:
            (answer,) = self._candidates.subset_hook_caller(hook_name, others)() or (None,)
        except Exception as error:
            raise PluginError(f"{_KINDS[group]} {name!r} failed in {hook_name}: {_one_line(error)}") from error
        return answer

    def _probe(self, name: str) -> Offer:
        offer = self._call(name, "ds_probe")
        if not isinstance(offer, Offer):
            raise PluginError(f"ds_probe returned {offer!r}, not an Offer")
        if offer.name != name:
            raise PluginError(f"ds_probe offers {offer.name!r} under the entry point {name!r}; make them the same")
        return offer

    def _load_features(self) -> None:
        with self._lock:
            if self._features_loaded:
                return
            for name in self.names(FEATURES):
                if name in _blocked():
                    continue
                try:
                    self.activate(name, FEATURES)
                except PluginError as error:
                    logger.warning(f"{error}; going on without it")
            self._features_loaded = True


def _pluggy_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _blocked() -> set[str]:
    return {name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(",") if name.strip()}


def _check_api(plugin: object, label: str) -> None:
    stated = getattr(plugin, "DS_PLUGIN_API", None)
    if stated is None:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # late: most plugins state no range

    try:
        wanted = SpecifierSet(stated)
    except (InvalidSpecifier, TypeError, AttributeError) as error:
        message = f"{label} states DS_PLUGIN_API = {stated!r}; a version range such as '>=1,<2' is meant"
        raise PluginError(message) from error
    if hookspecs.PLUGIN_API not in wanted:
        raise PluginError(
            f"{label} was made for plugin API {stated!r}, and this ds-core speaks {hookspecs.PLUGIN_API}; "
            "upgrade the older of the two with pip install --upgrade"
        )


def _optional(caller: Any, plugin: object) -> bool:
    return all(impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin)


def _distribution(entry: Any) -> str:
    dist = getattr(entry, "dist", None)
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "an unnamed distribution"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_PROCESS_MANAGER = PluginManager()


def plugin_manager() -> PluginManager:
    """The manager of this process. Nothing is read or loaded before it is asked."""
    return _PROCESS_MANAGER
