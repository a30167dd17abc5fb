"""`SYCLOpBuilder`, the base class of all SYCL builders: source paths, required torch and compiler options."""

import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path
from deepspeed.ops.op_builder.toolchain import Toolchain

from ds_ext_xpu.op_builder.sycl_compiler import check_fits_torch, find_icpx

sycl_kernel_path, sycl_kernel_include = make_kernel_path("ds_ext_xpu", "csrc")

#: GPUs to compile for in advance, by torch's names: "pvc,bmg". If unset, the GPU driver compiles at the first use.
ARCHITECTURES = "TORCH_XPU_ARCH_LIST"

# The oldest torch whose stable ABI has lists of tensors and TORCH_BOX, which the kernels use. A library built for it
# runs with every later torch.
_MIN_TORCH = "2.10"


class SYCLOpBuilder(OpBuilder):
    """Builds a library of torch operators in the namespace `ds_xpu` with `icpx -fsycl`, over torch's stable ABI.

    A subclass defines `BUILD_VAR`, `NAME`, `sources` (with `sycl_kernel_path`) and `register_fakes`, which runs after
    the library is loaded.
    """

    BUILD_VAR = ""
    NAME = ""
    op_namespace = "ds_xpu"
    min_torch = _MIN_TORCH

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_ext_xpu.op_builder.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        return [sycl_kernel_include("csrc")]

    def cxx_args(self) -> list[str]:
        return [
            *("-O3", "-std=c++20", "-fvisibility=hidden"),
            # icpx defaults to -ffast-math, but the kernels test for NaN and must round like the formulas
            *("-fp-model=precise", "-foffload-fp32-prec-div", "-foffload-fp32-prec-sqrt"),
            *_targets(),
            "-fno-sycl-id-queries-fit-in-int",  # a tensor may have more than 2^31 elements
        ]

    def extra_ldflags(self) -> list[str]:
        chosen = os.environ.get(ARCHITECTURES, "").strip()
        return [*_targets(), *(["-Xsycl-target-backend=spir64_gen", f"-device {chosen}"] if chosen else [])]

    def libraries_args(self) -> list[str]:
        return ["torch_xpu"]  # for the current stream

    def toolchain(self) -> Toolchain:
        """Return icpx.

        Raises:
            OpUnavailable: icpx is missing, or its SYCL runtime differs from torch's.
        """
        compiler = find_icpx()
        check_fits_torch(compiler)
        return compiler

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        prefix = f"-ffile-prefix-map={source.parent}=."
        return [*toolchain.command, "-fPIC", prefix, *flags, "-c", str(source), "-o", str(object_path)]


def _targets() -> list[str]:
    """Return the flags that compile for the GPUs in `ARCHITECTURES`, and to SPIR-V for all other GPUs."""
    named = os.environ.get(ARCHITECTURES, "").strip()
    return ["-fsycl", "-fsycl-targets=spir64_gen,spir64" if named else "-fsycl-targets=spir64"]
