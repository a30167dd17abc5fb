"""`CUDAOpBuilder` is the base of all builders of GPU kernels: nvcc compiles, the C++ compiler links.

The builder calls nvcc itself, since `torch.utils.cpp_extension` needs a CUDA build of torch with the toolkit's version.
Libraries from this builder use torch's stable ABI and compile with any torch, so a machine without a GPU can check
them. One library serves every torch from `min_torch` on. Libraries contain their own static CUDA runtime.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder import OpBuilder, jit, loading
from deepspeed.ops.op_builder.cache import Manifest
from deepspeed.ops.op_builder.spec import BuildSpec, make_kernel_path, torch_module
from deepspeed.ops.op_builder.toolchain import Toolchain, find_compiler

from ds_ext_cuda.installed_torch import cuda_of_torch
from ds_ext_cuda.op_builder import architectures
from ds_ext_cuda.op_builder.architectures import Architecture
from ds_ext_cuda.op_builder.toolkit import Toolkit, find_toolkit

cuda_kernel_path, cuda_kernel_include = make_kernel_path("ds_ext_cuda", "csrc")

SKIP_CHECK = "DS_SKIP_CUDA_CHECK"
# The oldest torch with a stable ABI that has the features of the kernels: lists of tensors, TORCH_BOX, the device
# guard. A library that is built for this torch runs with every later torch.
_MIN_TORCH = "2.10"
# separates the names of the target GPUs in a manifest's `target`
_FOR_GPUS = " for "
# flags that nvcc passes to the host compiler
_FOR_HOST = ("-fPIC", "-fvisibility=hidden")
# environment variables that nvcc adds to its command line
_READ_BY_NVCC = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Return (major, minor) of the CUDA toolkit of this machine. `name` is ignored; DeepSpeed has it.

    Raises:
        OpUnavailable: there is no toolkit.
    """
    return find_toolkit().version


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """Return whether the toolkit and torch have the same CUDA version. False if only the minor versions differ, which
    CUDA permits. True for a torch without CUDA, since the library is then for another torch, and True with
    `DS_SKIP_CUDA_CHECK=1`.

    Raises:
        OpUnavailable: the major versions differ; the message has both.
    """
    toolkit = find_toolkit()
    cuda, torch = cuda_of_torch()
    if cuda is None or os.environ.get(SKIP_CHECK) == "1":
        return True
    if int(cuda.partition(".")[0]) == toolkit.version[0]:
        return cuda.split(".")[:2] == toolkit.version_name.split(".")
    raise OpUnavailable(
        f"{toolkit.nvcc} is of CUDA {toolkit.version_name}, and {torch} is built with CUDA {cuda}; set CUDA_HOME to a "
        f"toolkit {cuda.partition('.')[0]}.x, or {SKIP_CHECK}=1 to try all the same"
    )


class CUDAOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_cuda`, through torch's stable ABI.

    A subclass defines `BUILD_VAR`, `NAME`, `sources` (with `cuda_kernel_path`) and `register_fakes`, which runs after
    the library is loaded. It may override `nvcc_args` and `filter_ccs`.
    """

    BUILD_VAR = ""
    NAME = ""
    op_namespace = "ds_cuda"
    min_torch = _MIN_TORCH

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"ds_ext_cuda.op_builder.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        return [cuda_kernel_include("csrc")]

    def cxx_args(self) -> list[str]:
        """Return all compile flags except the target GPUs: nvcc's, and after `-Xcompiler` the host compiler's."""
        return [*self.nvcc_args(), *self.version_dependent_macros(), "-Xcompiler", ",".join(_FOR_HOST)]

    def nvcc_args(self) -> list[str]:
        """Return flags for nvcc. No fast math, no contraction: sources say where they use a fused multiply-add."""
        # USE_CUDA makes torch's headers declare the stream
        return ["-O3", "-std=c++20", "-DUSE_CUDA", "--expt-relaxed-constexpr", "--fmad=false"]

    def version_dependent_macros(self) -> list[str]:
        """Return DeepSpeed's macros for torch's version: `VERSION_GE_1_1`, `_1_3` and `_1_5`, all defined here."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    # ----- for which GPUs --------------------------------------------------------------------------------------------

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """Return nvcc's flags for the GPUs in `TORCH_CUDA_ARCH_LIST`, else in `cross_compile_archs` ("8.0;9.0+PTX").

        Without either list, an op that is compiled at its first use targets the GPUs of this machine. Other builds
        target 8.0, 9.0 and 10.0, with PTX for later GPUs, as far as the toolkit supports them.

        Raises:
            ConfigError: a list is invalid.
            OpUnavailable: the toolkit does not compile for a listed GPU, or `filter_ccs` returned no GPU.
        """
        return [
            flag for one in self._kept(self._for_toolkit(find_toolkit(), cross_compile_archs)) for flag in one.flags
        ]

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        """Return those `ccs`, such as `"9.0"` and `"10.0+PTX"`, that the op runs on, each as `[major, minor]`.

        Called by `compute_capability_args` and `describe`. An op with special requirements leaves other GPUs out.
        """
        return [cc.split(".") for cc in ccs]

    def _kept(self, chosen: list[Architecture]) -> list[Architecture]:
        """Return the architectures of `chosen` that `filter_ccs` keeps."""
        kept = self.filter_ccs([str(one) for one in chosen])
        if not kept:
            raise OpUnavailable(f"op {self.name!r} runs on none of {', '.join(one.capability for one in chosen)}")
        return architectures.parse(";".join(".".join(parts) for parts in kept), f"{type(self).__name__}.filter_ccs")

    def _for_toolkit(self, toolkit: Toolkit, cross_compile_archs: str | None = None) -> list[Architecture]:
        stated = self._stated(cross_compile_archs)
        if stated is not None:
            return architectures.compilable(stated, toolkit.codes, f"{toolkit.nvcc} (CUDA {toolkit.version_name})")
        return architectures.of_devices(self._cards(), toolkit.codes)

    def _stated(self, cross_compile_archs: str | None = None) -> list[Architecture] | None:
        stated = os.environ.get(architectures.VARIABLE, "").strip()
        if stated and stated != "native":
            return architectures.parse(stated)
        return architectures.parse(cross_compile_archs, "cross_compile_archs") if cross_compile_archs else None

    def _cards(self) -> list[tuple[int, int]]:
        """Return the capabilities of the GPUs to build for; empty means `PROMISED`."""
        native = os.environ.get(architectures.VARIABLE, "").strip() == "native"
        return _capabilities() if self.jit_mode or native else []

    def describe(self) -> BuildSpec:
        """Extend the base's spec by the target GPUs, so a library for other GPUs is not taken from the cache."""
        try:
            chosen = self._for_toolkit(find_toolkit())
        except OpUnavailable:  # another machine may have put a library for these GPUs into the cache
            cards = self._cards()
            own = frozenset(10 * major + minor for major, minor in cards)
            chosen = self._stated() or architectures.of_devices(cards, own or frozenset(architectures.PROMISED))
        names = ";".join(str(one) for one in self._kept(chosen))
        spec = super().describe()
        return dataclasses.replace(spec, target=f"{spec.target}{_FOR_GPUS}{names}")

    # ----- how it is compiled ----------------------------------------------------------------------------------------

    def toolchain(self) -> Toolchain:
        """Return nvcc with the host compiler. Raises OpUnavailable if one is missing, or CUDA major versions differ."""
        if not assert_no_cuda_mismatch(self.name):
            logger.info("op %r: CUDA of torch and of the toolkit differ in the minor version", self.name)
        toolkit, host = find_toolkit(), find_compiler()
        return Toolchain((toolkit.nvcc,), f"{toolkit.identity}\n{host.identity}", _READ_BY_NVCC)

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        return [
            *toolchain.command,
            *_host_compiler_option(),
            *self.compute_capability_args(),
            *("--threads", "0"),  # compiles for several GPUs in parallel, on all cores
            *("-Xcompiler", f"-ffile-prefix-map={source.parent}=."),
            *flags,
            *("-c", str(source), "-o", str(object_path)),
        ]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        """Return the link command of the host compiler, since `flags` are flags of the host compiler.

        The library must depend on libtorch.so even if it uses none of its symbols: libtorch.so loads libtorch_cuda.so
        into the scope in which the library's weak symbols (the current stream) are looked up.
        """
        return [
            *find_compiler().command,
            *("-shared", "-o", str(library), *map(str, object_paths)),
            *_before_as_needed(flags, "-Wl,--no-as-needed", "-ltorch"),
            *(f"-L{find_toolkit().libraries}", "-lcudart_static", "-lpthread", "-ldl", "-lrt"),
        ]

    def compile_only(self) -> Path:
        """Return the library, cached or compiled now, even if the torch of this process cannot run it.

        For tests, and for builds on a machine without a GPU.

        Raises:
            OpUnavailable: there is no toolkit, or the build failed (`BuildError`).
        """
        self.toolchain()  # raises if there is none
        return jit.build(self.describe())

    # ----- whether it can be loaded ----------------------------------------------------------------------------------

    def prepare(self) -> Path:
        """Return the same as the base, but build for the GPUs of this machine, as `load` does."""
        self.jit_mode = True
        return super().prepare()

    def _obstacle(self) -> str | None:
        cuda, torch = cuda_of_torch()
        if cuda is None:
            return torch
        before, self.jit_mode = self.jit_mode, True
        try:
            return super()._obstacle()
        finally:
            self.jit_mode = before  # a wheel is not built for the GPUs of this machine

    def _load_prebuilt(self) -> Any | None:
        """Load the prebuilt library like the base; return None if it is for other GPUs, so the op is compiled."""
        library = loading.library_beside_package(self.absolute_name())
        manifest = None if library is None else Manifest.read(library.with_suffix(".json"))
        names = "" if manifest is None else manifest.target.partition(_FOR_GPUS)[2]
        if names:
            has = architectures.parse(names, "manifest")
            missing = [card for card in _capabilities() if not any(one.runs_on(card) for one in has)]
            if missing:
                cards = ", ".join(f"{major}.{minor}" for major, minor in missing)
                logger.info(
                    "op %r: the prebuilt one is for %s, and here is %s; it is compiled", self.name, names, cards
                )
                return None
        return super()._load_prebuilt()

    def builder(self) -> Any:
        """Return the op as a setuptools Extension, created by torch, which must be a CUDA build.

        Raises:
            OpUnavailable: a source is missing.
        """
        from torch.utils.cpp_extension import CUDAExtension

        spec = self.describe()
        return CUDAExtension(
            name=self.absolute_name(),
            sources=[str(path) for path in spec.sources],
            include_dirs=[str(path) for path in spec.include_paths],
            extra_compile_args={"nvcc": [*self.nvcc_args(), *self.compute_capability_args()]},
            extra_link_args=list(self.extra_ldflags()),
        )


def _capabilities() -> list[tuple[int, int]]:
    """Return the capabilities of the GPUs that this process sees; empty if torch has no CUDA. Opens the devices."""
    torch = torch_module()
    if cuda_of_torch()[0] is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _host_compiler_option() -> list[str]:
    """Return nvcc's options for the host compiler in `$CXX`; without `$CXX`, nvcc chooses.

    nvcc starts a single program. For `ccache g++ -m64` this is g++, and the flags are passed on.
    """
    if not os.environ.get("CXX"):
        return []
    words = find_compiler().command
    last = max(index for index, word in enumerate(words) if index == 0 or not word.startswith("-"))
    return ["-ccbin", words[last], *(f"-Xcompiler={flag}" for flag in words[last + 1 :])]


def _before_as_needed(flags: Sequence[str], *added: str) -> list[str]:
    """Insert `added` into `flags` before `--as-needed`, so the linker does not drop the added libraries."""
    listed = list(flags)
    at = listed.index("-Wl,--as-needed") if "-Wl,--as-needed" in listed else len(listed)
    return [*listed[:at], *added, *listed[at:]]
