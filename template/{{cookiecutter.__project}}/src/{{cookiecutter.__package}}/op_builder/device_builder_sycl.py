"""What all builders of this device share: icpx, which compiles SYCL, and which tensors its kernels read."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path
from deepspeed.ops.op_builder.toolchain import Toolchain, identify

{{ cookiecutter.device_name }}_kernel_path, {{ cookiecutter.device_name }}_kernel_include = make_kernel_path("{{ cookiecutter.__package }}")


class DeviceOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_{{ cookiecutter.device_name }}`, through torch's stable ABI.

    The kernels are spir64, compiled for the device when they are first run there. `CMPLR_ROOT` counts; take icpx of the
    year that torch's XPU build was made with, since a process holds one SYCL runtime.
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
        # precise, no contraction: the same formula gives the same bits here and in torch
        return ["-O3", "-std=c++20", "-fsycl", "-fvisibility=hidden", "-ffp-model=precise", "-ffp-contract=off"]
{%- if cookiecutter.torch_device != 'xpu' %}

    def is_compatible(self, verbose: bool = False) -> bool:
        """False, with the reason. Goes when the kernels take this device's tensors: see the key in `fused_lion.cpp`."""
        if super().is_compatible(verbose):
            self.reason = "its kernels read tensors of torch.device('xpu'), not of '{{ cookiecutter.torch_device }}'"
        return False
{%- endif %}

    def toolchain(self) -> Toolchain:
        """icpx, of `CMPLR_ROOT` or on PATH.

        Raises:
            OpUnavailable: there is none.
        """
        root = os.environ.get("CMPLR_ROOT", "")
        for place in [f"{root}/bin/icpx"] if root else ["icpx", "/opt/intel/oneapi/compiler/latest/bin/icpx"]:
            if shutil.which(place):
                return identify((place,))
        where = f"CMPLR_ROOT is {root!r}" if root else "it is not on PATH; source setvars.sh of oneAPI"
        raise OpUnavailable(f"no SYCL compiler: icpx was not found: {where}")

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        # the device's code is put into the library at the link
        return [*toolchain.command, "-fsycl", "-shared", "-o", str(library), *map(str, object_paths), *flags]
