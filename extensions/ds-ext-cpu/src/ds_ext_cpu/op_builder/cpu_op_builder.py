"""What every builder of a host kernel shares: where the sources are, which torch they need, how they are compiled."""

import os
from pathlib import Path

from deepspeed.ops.op_builder import OpBuilder

_CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The oldest torch whose stable ABI has what the kernels use (lists of tensors, parallel_for). A library that is built
# for it runs with every later one.
_MIN_TORCH = "2.10"
_TORCH_TARGET_VERSION = "0x020a000000000000"


def cpu_kernel_path(path: str) -> str:
    """A source of this package, `"adam/cpu_adam.cpp"`, as an absolute path. FileNotFoundError names a missing one."""
    found = _CSRC / path
    if not found.is_file():
        raise FileNotFoundError(f"{found}: the host kernels of ds-ext-cpu have no such source")
    return str(found)


def cpu_kernel_include(path: str = "") -> str:
    """A folder of headers of this package, as an absolute path. FileNotFoundError names a missing one."""
    found = _CSRC / path
    if not found.is_dir():
        raise FileNotFoundError(f"{found}: the host kernels of ds-ext-cpu have no such folder")
    return str(found)


class CPUOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_cpu`, through torch's stable ABI.

    A subclass says `BUILD_VAR`, `NAME`, `sources` (by `cpu_kernel_path`) and, once the library is loaded,
    `register_fakes`. With `DS_CPU_SANITIZE=1` in the environment libraries are built with the address and
    undefined-behaviour sanitizers, which then have to be preloaded: see the README.
    """

    BUILD_VAR = ""
    NAME = ""
    op_namespace = "ds_cpu"
    min_torch = _MIN_TORCH

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_ext_cpu.ops.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        return [cpu_kernel_include()]

    def cxx_args(self) -> list[str]:
        args = ["-O3", "-std=c++20", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET_VERSION}"]
        return [*args, "-g", "-fno-omit-frame-pointer", *_sanitizers()] if _sanitizers() else args

    def extra_ldflags(self) -> list[str]:
        return _sanitizers()


def _sanitizers() -> list[str]:
    if os.environ.get("DS_CPU_SANITIZE") != "1":
        return []
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
