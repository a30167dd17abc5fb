"""What all builders of this device share: nvcc, for which cards it compiles, and which torch its libraries fit."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path
from deepspeed.ops.op_builder.toolchain import Toolchain, identify

{{ cookiecutter.device_name }}_kernel_path, {{ cookiecutter.device_name }}_kernel_include = make_kernel_path("{{ cookiecutter.__package }}")

# Compute capabilities, as TORCH_CUDA_ARCH_LIST has them; "+PTX" is compiled for later cards when it is loaded there.
_ARCHITECTURES = "8.0;9.0+PTX"


class DeviceOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_{{ cookiecutter.device_name }}`, through torch's stable ABI.

    nvcc drives the whole build; no CUDA build of torch is needed for it. `CUDA_HOME` and `TORCH_CUDA_ARCH_LIST` count.
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
        flags = ["-O3", "-std=c++20", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"]
        return [*flags, *_architecture_flags()]
{%- if cookiecutter.torch_device != 'cuda' %}

    def is_compatible(self, verbose: bool = False) -> bool:
        """False, with the reason. Goes when the kernels take this device's tensors: see the key in `fused_lion.cpp`."""
        if super().is_compatible(verbose):
            self.reason = "its kernels read tensors of torch.device('cuda'), not of '{{ cookiecutter.torch_device }}'"
        return False
{%- endif %}

    def toolchain(self) -> Toolchain:
        """nvcc, when it is of the CUDA major version that torch was built for.

        Raises:
            OpUnavailable: there is none, or of another one.
        """
        return _check_major(identify((_find_nvcc(),)))

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        return [*toolchain.command, *flags, "-c", str(source), "-o", str(object_path)]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        passed = [f"-Xlinker={flag.removeprefix('-Wl,')}" if flag.startswith("-Wl,") else flag for flag in flags]
        return [*toolchain.command, "-shared", "-o", str(library), *map(str, object_paths), *passed]


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "")
    for place in [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        if shutil.which(place):
            return place
    where = f"CUDA_HOME is {home!r}" if home else "it is not on PATH, not in /usr/local/cuda, and CUDA_HOME is not set"
    raise OpUnavailable(f"no CUDA compiler: nvcc was not found: {where}")


def _check_major(nvcc: Toolchain) -> Toolchain:
    import torch

    found = re.search(r"release (\d+)\.(\d+)", nvcc.identity)
    if torch.version.cuda is not None and found and found[1] != torch.version.cuda.partition(".")[0]:
        versions = f"nvcc is of CUDA {found[1]}.{found[2]} and torch of CUDA {torch.version.cuda}"
        raise OpUnavailable(f"{versions}; their major versions must agree")
    return nvcc


def _architecture_flags() -> list[str]:
    """`-gencode` for each of `TORCH_CUDA_ARCH_LIST`, for example "8.0;9.0+PTX"."""
    stated = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or _ARCHITECTURES
    flags = []
    for name in re.split(r"[;\s]+", stated):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if match is None:
            raise OpUnavailable(f"TORCH_CUDA_ARCH_LIST={stated!r}: {name!r} is not like '9.0' or '9.0+PTX'")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags
