"""BuildingMixin: the device's op builders, the environment variables of its ranks, and its compiler."""

import importlib.machinery
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from deepspeed.accelerator.device import TorchModule
from deepspeed.errors import ConfigError, PluginError
from deepspeed.log import warn_once
from deepspeed.plugins import plugin_manager
from deepspeed.plugins.admission import import_with_limit

_CORE_BUILDERS = "deepspeed.ops.op_builder"


class BuildingMixin(TorchModule):
    """Op builders, environment variables, compiler."""

    _plugin: str | None = None
    """The plugin that this accelerator came from, while it is the current one. Written by `current.py`."""

    # ----- op builders -----------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Return the import path of the package that holds this accelerator's op builders.

        Default: the package `op_builder` beside the module of the accelerator's class or of one of its base classes. If
        there is none, the core's own `deepspeed.ops.op_builder`. Importing the package compiles nothing.
        """
        return builders_beside(type(self))

    def create_op_builder(self, class_name: str) -> Any:
        """Return an instance of the builder `class_name`, for example `"FusedAdamBuilder"`, or None.

        None means that the device has no kernel for the op. `deepspeed.ops.registry` then tries the host extension, the
        feature plugins, and the torch reference, in this order.
        """
        builder_class = self.get_op_builder(class_name)
        return None if builder_class is None else builder_class()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder class `class_name`, or None when this accelerator has none.

        Default: the class that the accelerator's plugin returns from the hook `ds_op_builders`, else the class of this
        name in the package `op_builder_dir()` (its `__init__` or one of its modules). Nothing is cached: each call
        looks up both, so the result does not depend on the accelerator that was current at some import.

        Raises:
            PluginError: the plugin failed in its hook, or the package cannot be imported.
        """
        stated = self._stated_builders().get(class_name)
        if stated is not None or self.op_builder_dir() == _CORE_BUILDERS:
            return stated
        return _find_class(_import_builders(self), class_name)

    def build_extension(self) -> Any:
        """Return the setuptools command class that compiles this device's extensions in a wheel build.

        The `setup.py` of an extension uses it: `cmdclass={"build_ext": ...}`. Default: torch's `BuildExtension`.
        """
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def _stated_builders(self) -> dict[str, type]:
        """Return builder name -> class from the `ds_op_builders` hook of this accelerator's plugin."""
        return {} if self._plugin is None else plugin_manager().op_builders(self._plugin)

    def _builder_names(self) -> list[str]:
        """Return the names of all builder classes in the plugin's hook and in the package `op_builder_dir()`."""
        names = set(self._stated_builders())
        if self.op_builder_dir() != _CORE_BUILDERS:
            names.update(name for module in _modules(_import_builders(self)) for name in _classes(module))
        return sorted(names)

    # ----- environment -----------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Return prefixes of the environment variables to export to ranks on other hosts, for example `["XYZCCL"]`.

        Launchers that start ranks on other hosts (hook `ds_launcher`) use them. Local ranks inherit the environment.
        """
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the names of the environment variables that limit the devices a process sees. May be empty."""
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Set these variables in `current_env`: a rank must see only `local_accelerator_ids`. The launcher calls it."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(str(index) for index in local_accelerator_ids)

    # ----- compiler --------------------------------------------------------------------------------------------------

    def get_compile_backend(self) -> str:
        """Return the `torch.compile` backend. `engine.compile` calls this when the user names no backend."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Use `backend` from now on.

        Raises:
            ConfigError: torch has no such backend; the message lists those it has.
        """
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"compile backend {backend!r} is unknown to torch; it has {', '.join(sorted(known))}")
        self._compile_backend = backend


def builders_beside(accelerator_class: type) -> str:
    """Return the package `op_builder` beside the module of the class or of a base class, else the core's package."""
    for kind in accelerator_class.__mro__:
        package = kind.__module__.rpartition(".")[0]
        if package and package.split(".")[0] != "deepspeed" and _exists(f"{package}.op_builder"):
            return f"{package}.op_builder"
    return _CORE_BUILDERS


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # a parent package is missing, as for a class defined in a script
        return False


def _import_builders(accelerator: BuildingMixin) -> ModuleType:
    """Import the package `op_builder_dir()`.

    Raises:
        PluginError: the import failed with any exception.
    """
    where = accelerator.op_builder_dir()
    try:
        return import_with_limit(where)
    except Exception as error:
        raise PluginError(
            f"{type(accelerator).__name__}: its op builders are in {where}, which cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def _find_class(package: ModuleType, name: str) -> type | None:
    for module in _modules(package):
        found = getattr(module, name, None)
        if isinstance(found, type):
            return found
    return None


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    """Yield `package`, then its modules: a vendor may keep one builder per file under an empty `__init__`.

    A module that cannot be imported is skipped with a warning. Compiled modules are skipped: they are ops from a wheel,
    and a search for builders must not load ops.
    """
    yield package
    for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
        spec = importlib.util.find_spec(f"{package.__name__}.{info.name}")
        if spec is None or isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            continue
        module_name = f"{package.__name__}.{info.name}"
        try:
            module = import_with_limit(module_name)
        except Exception as error:  # noqa: BLE001 - a vendor's file, whatever it raises
            warn_once(f"op builders in {module_name} are left out: {type(error).__name__}: {error}")
        else:
            yield module


def _classes(module: ModuleType) -> list[str]:
    """Return the names of the builder classes in `module`: `...Builder`, but not `...OpBuilder` (a base class)."""
    names = [name for name in dir(module) if name.endswith("Builder") and not name.endswith("OpBuilder")]
    return [name for name in names if isinstance(getattr(module, name, None), type)]
