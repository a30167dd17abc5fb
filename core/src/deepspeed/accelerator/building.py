"""BuildingFace: where the device's op builders are, what its ranks need in their environment, who compiles."""

import importlib
import importlib.util
from typing import Any

import torch

from deepspeed.accelerator.torch_module import TorchModule
from deepspeed.errors import ConfigError

_CORE_BUILDERS = "deepspeed.ops.op_builder"


class BuildingFace(TorchModule):
    """Op builders, environment variables, compiler."""

    # ----- op builders -----------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """The import path of the package that holds this accelerator's op builders.

        Default: the folder `op_builder` beside the module of the accelerator's class, and the core's own
        `deepspeed.ops.op_builder` when there is none. Importing that package compiles nothing.
        """
        package = type(self).__module__.rpartition(".")[0]
        beside = f"{package}.op_builder"
        return beside if package and _exists(beside) else _CORE_BUILDERS

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of the builder called `class_name`, for example `"FusedAdamBuilder"`; None when there is none.

        None means that the device has no kernel of its own for the op; the core then looks further.
        """
        builder_class = self.get_op_builder(class_name)
        return None if builder_class is None else builder_class()

    def get_op_builder(self, class_name: str) -> Any:
        """The builder class called `class_name`, or None when this accelerator has none."""
        package = importlib.import_module(self.op_builder_dir())
        found = getattr(package, class_name, None)
        return found if isinstance(found, type) else None

    def build_extension(self) -> Any:
        """The setuptools command that compiles this device's extensions in a wheel build."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # ----- environment -----------------------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that the launcher carries to other hosts, for example `["XYZCCL"]`."""
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


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # a parent package is missing, as for a class defined in a script
        return False
