"""What all builders of this device share: two compilers, the device's for its files and the host's for the rest."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path
from deepspeed.ops.op_builder.toolchain import Toolchain, find_compiler, identify

{{ cookiecutter.device_name }}_kernel_path, {{ cookiecutter.device_name }}_kernel_include = make_kernel_path("{{ cookiecutter.__package }}")

_COMPILER = "{{ cookiecutter.compiler }}"
_SUFFIX = ".{{ cookiecutter.device_name }}"


class DeviceOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_{{ cookiecutter.device_name }}`, through torch's stable ABI.

    `toolchain`, `compile_command` and `link_command` are all that the core asks of a compiler.
    """

    op_namespace = "ds_{{ cookiecutter.device_name }}"
    min_torch = "2.10"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"{{ cookiecutter.__package }}.op_builder.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        return [{{ cookiecutter.device_name }}_kernel_include("csrc")]

    def cxx_args(self) -> list[str]:
        # no contraction: the same formula gives the same bits here and in torch
        return ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off"]

    def toolchain(self) -> Toolchain:
        """The host's compiler; what the device's says of itself is part of the identity, so that a new one rebuilds."""
        if shutil.which(_COMPILER) is None:
            raise OpUnavailable(f"no device compiler: {_COMPILER} is not on PATH; install it to compile kernels")
        host, device = find_compiler(), identify((_COMPILER,))
        return Toolchain(host.command, f"{host.identity}\n{_COMPILER}: {device.identity}")

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        if source.suffix != _SUFFIX:
            return super().compile_command(toolchain, source, object_path, flags)
        # kernels include no header of torch; give flags of your own where the compiler knows others
        places = [f"-I{path}" for path in self.include_paths()]
        return [_COMPILER, "-fPIC", *self.cxx_args(), *places, "-c", str(source), "-o", str(object_path)]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        # the host's linker will do as long as the objects need none of the device compiler's own
        return super().link_command(toolchain, object_paths, library, flags)
