"""BuildingMixin: where the device's op builders are, what its ranks need in their environment, who compiles."""

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
        """The import path of the package that holds this accelerator's op builders.

        Default: the folder `op_builder` beside the module of the accelerator's class, or beside a class that it derives
        from; the core's own `deepspeed.ops.op_builder` when there is none. Importing that package compiles nothing.
        """
        return builders_beside(type(self))

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of the builder called `class_name`, for example `"FusedAdamBuilder"`; None when there is none.

        None means that the device has no kernel of its own for the op. `deepspeed.ops.registry` then looks further: the
        host extension, the feature plugins, the torch reference.
        """
        builder_class = self.get_op_builder(class_name)
        return None if builder_class is None else builder_class()

    def get_op_builder(self, class_name: str) -> Any:
        """The builder class called `class_name`, or None when this accelerator has none.

        Default: what the accelerator's plugin names in the hook `ds_op_builders`, then the class of that name in the
        package `op_builder_dir()`, in its `__init__` or in one of its modules. Both are asked at each call, so that a
        name means this accelerator, whichever was current when something was imported.

        Raises:
            PluginError: the plugin failed in its hook, or the package cannot be imported.
        """
        stated = self._stated_builders().get(class_name)
        if stated is not None or self.op_builder_dir() == _CORE_BUILDERS:
            return stated
        return _find_class(_import_builders(self), class_name)

    def build_extension(self) -> Any:
        """The setuptools command class that compiles this device's extensions in a wheel build.

        Default: torch's `BuildExtension`. Called by `setup.py` of an extension as `cmdclass={"build_ext": ...}`.
        """
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def _stated_builders(self) -> dict[str, type]:
        """Builder name -> class, as the plugin that this accelerator came from states them."""
        return {} if self._plugin is None else plugin_manager().op_builders(self._plugin)

    def _builder_names(self) -> list[str]:
        """The names under which builder classes can be found here: stated by the plugin, or in its package."""
        names = set(self._stated_builders())
        if self.op_builder_dir() != _CORE_BUILDERS:
            names.update(name for module in _modules(_import_builders(self)) for name in _classes(module))
        return sorted(names)

    # ----- environment -----------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that ranks on other hosts need too, for example `["XYZCCL"]`.

        For launchers that start ranks there (hook `ds_launcher`); ranks on this machine inherit the environment.
        """
        return []

    def visible_devices_envs(self) -> list[str]:
        """Names of the variables that limit which devices a process sees; empty when the device has none."""
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write into `current_env` that a rank shall see only `local_accelerator_ids`. Called by the launcher."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(str(index) for index in local_accelerator_ids)

    # ----- compiler --------------------------------------------------------------------------------------------------

    def get_compile_backend(self) -> str:
        """The `torch.compile` backend for this device. Asked by `engine.compile` when the user names none."""
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
    """The package `op_builder` beside the module of `accelerator_class` or of a parent of it, else the core's own."""
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
    """The package `op_builder_dir()`.

    Raises:
        PluginError: it cannot be imported, whatever a vendor's package raises.
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
    """`package`, then its modules, as a vendor may keep one builder per file under an empty `__init__`.

    A module that cannot be imported is warned about and left out: the other builders still count. Compiled ones are
    passed over: they are ops that a wheel brought, and looking for builders must not load those.
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
    """Names of builder classes in `module` by DeepSpeed's convention: `...Builder`, but not a base `...OpBuilder`."""
    names = [name for name in dir(module) if name.endswith("Builder") and not name.endswith("OpBuilder")]
    return [name for name in names if isinstance(getattr(module, name, None), type)]
