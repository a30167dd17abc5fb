"""`CPUOpBuilder` is the base of all builders of host kernels: source paths, minimum torch, compiler flags."""

import os
import sys
from typing import ClassVar

from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

cpu_kernel_path, cpu_kernel_include = make_kernel_path("ds_ext_cpu", "csrc")

# The oldest torch with a stable ABI that has the features of the kernels: lists of tensors, TORCH_BOX, parallel_for. A
# library that is built for this torch runs with every later torch.
_MIN_TORCH = "2.10"


class CPUOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_cpu`, through torch's stable ABI.

    A subclass defines `BUILD_VAR`, `NAME`, `sources` (with `cpu_kernel_path`) and `register_fakes`, which runs after
    the library is loaded. If the environment has `DS_CPU_SANITIZE=1`, libraries are built with the address and
    undefined-behavior sanitizers, which must then be preloaded: see the README.
    """

    BUILD_VAR = ""
    NAME = ""
    op_namespace: ClassVar[str | None] = "ds_cpu"
    min_torch: ClassVar[str | None] = _MIN_TORCH
    #: whether the sources use Linux system calls
    needs_linux: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_ext_cpu.op_builder.{self.NAME}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        if self.needs_linux and sys.platform != "linux":
            self.reason = f"it uses system calls of Linux, and this is {sys.platform}"
            return False
        return super().is_compatible(verbose)

    def include_paths(self) -> list[str]:
        return [cpu_kernel_include("csrc")]

    def cxx_args(self) -> list[str]:
        # No contraction: loops use a fused multiply-add only where they say so. So the middle and end of a tensor, and
        # the same formula in two places, give the same numbers.
        args = ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off"]
        return [*args, "-g", "-fno-omit-frame-pointer", *_sanitizers()] if _sanitizers() else args

    def extra_ldflags(self) -> list[str]:
        return _sanitizers()


def _sanitizers() -> list[str]:
    if os.environ.get("DS_CPU_SANITIZE") != "1":
        return []
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
