"""What every builder of a GPU kernel shares: nvcc compiles, the C++ compiler links, torch's stable ABI binds.

nvcc is driven here and not by `torch.utils.cpp_extension`, whose torch must be a CUDA build and of the toolkit's
version: libraries made here compile beside any torch, so that a machine without a GPU can check them, and one library
serves every torch from `min_torch` on. They bring their own static CUDA runtime.
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
# The oldest torch whose stable ABI has what the kernels use: lists of tensors, TORCH_BOX, the device guard. A library
# built for it runs with every later one.
_MIN_TORCH = "2.10"
# in a manifest's `target`, before the GPUs that a library is for
_FOR_GPUS = " for "
# what follows goes to the host's compiler as it stands
_FOR_HOST = ("-fPIC", "-fvisibility=hidden")
# variables whose value nvcc adds to its command line
_READ_BY_NVCC = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """(major, minor) of the CUDA toolkit of this machine; `name` is the op that asks.

    Raises:
        OpUnavailable: there is none.
    """
    return find_toolkit().version


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """Whether the toolkit and torch are of one CUDA version. Minor versions may differ: CUDA is compatible in them.

    A torch without CUDA differs from none: it can be compiled beside, and the library is for another torch.
    `DS_SKIP_CUDA_CHECK=1` accepts everything.

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

    A subclass says `BUILD_VAR`, `NAME`, `sources` (by `cuda_kernel_path`) and, once the library is loaded,
    `register_fakes`; it may override `nvcc_args` and `filter_ccs`.
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
        """All flags of the compile command but the GPUs: nvcc's, and behind `-Xcompiler` those of the host's."""
        return [*self.nvcc_args(), *self.version_dependent_macros(), "-Xcompiler", ",".join(_FOR_HOST)]

    def nvcc_args(self) -> list[str]:
        """Flags for nvcc. No fast math and no contraction: sources say where they multiply and add in one rounding."""
        # USE_CUDA: torch's headers then declare the stream
        return ["-O3", "-std=c++20", "-DUSE_CUDA", "--expt-relaxed-constexpr", "--fmad=false"]

    def version_dependent_macros(self) -> list[str]:
        """Macros that tell sources torch's version: DeepSpeed's `VERSION_GE_1_1`, `_1_3` and `_1_5`, true here."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    # ----- for which GPUs --------------------------------------------------------------------------------------------

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """nvcc's flags for the GPUs: those of `TORCH_CUDA_ARCH_LIST`, else of `cross_compile_archs` ("8.0;9.0+PTX").

        Without either, when an op is compiled at its first use: the cards of this machine; otherwise 8.0, 9.0 and 10.0
        with PTX for later ones, as far as the toolkit has them.

        Raises:
            ConfigError: a list cannot be read.
            OpUnavailable: the toolkit does not compile for one of them, or `filter_ccs` left none.
        """
        return [
            flag for one in self._kept(self._for_toolkit(find_toolkit(), cross_compile_archs)) for flag in one.flags
        ]

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        """Of capabilities such as `"9.0"` and `"10.0+PTX"` those that the op runs on, each as `[major, minor]`.

        Called by `compute_capability_args`; an op that needs a certain GPU leaves others out, and says so.
        """
        return [cc.split(".") for cc in ccs]

    def _kept(self, chosen: list[Architecture]) -> list[Architecture]:
        """Those of `chosen` that `filter_ccs` keeps."""
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
        """The cards that a build is for; empty: for those that we promise."""
        native = os.environ.get(architectures.VARIABLE, "").strip() == "native"
        return _capabilities() if self.jit_mode or native else []

    def describe(self) -> BuildSpec:
        """As the base's, and for which GPUs: what was compiled for others is not taken from the cache."""
        try:
            chosen = self._for_toolkit(find_toolkit())
        except OpUnavailable:  # a library that another machine left in the cache may be for the cards here
            cards = self._cards()
            own = frozenset(10 * major + minor for major, minor in cards)
            chosen = self._stated() or architectures.of_devices(cards, own or frozenset(architectures.PROMISED))
        names = ";".join(str(one) for one in self._kept(chosen))
        spec = super().describe()
        return dataclasses.replace(spec, target=f"{spec.target}{_FOR_GPUS}{names}")

    # ----- how it is compiled ----------------------------------------------------------------------------------------

    def toolchain(self) -> Toolchain:
        """nvcc, with the host's compiler behind it. Raises OpUnavailable without either, or for another CUDA."""
        if not assert_no_cuda_mismatch(self.name):
            logger.info("op %r: CUDA of torch and of the toolkit differ in the minor version", self.name)
        toolkit, host = find_toolkit(), find_compiler()
        return Toolchain((toolkit.nvcc,), f"{toolkit.identity}\n{host.identity}", _READ_BY_NVCC)

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        return [
            *toolchain.command,
            *_host_compiler_option(),
            *self.compute_capability_args(),
            *("--threads", "0"),  # the GPUs side by side, as many as there are cores
            *("-Xcompiler", f"-ffile-prefix-map={source.parent}=."),
            *flags,
            *("-c", str(source), "-o", str(object_path)),
        ]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        """By the host's compiler, as `flags` are its.

        The library needs libtorch.so whether it uses a symbol of it or not: that brings libtorch_cuda.so into the
        scope in which its weak symbols (the current stream) are looked up.
        """
        return [
            *find_compiler().command,
            *("-shared", "-o", str(library), *map(str, object_paths)),
            *_before_as_needed(flags, "-Wl,--no-as-needed", "-ltorch"),
            *(f"-L{find_toolkit().libraries}", "-lcudart_static", "-lpthread", "-ldl", "-lrt"),
        ]

    def compile_only(self) -> Path:
        """The finished library, from the cache or compiled now, whether or not the torch of this process could run it.

        For tests and for whoever compiles on a machine without a GPU.

        Raises:
            OpUnavailable: there is no toolkit, or the build failed (`BuildError`).
        """
        self.toolchain()  # says why there is none
        return jit.build(self.describe())

    # ----- whether it can be loaded ----------------------------------------------------------------------------------

    def prepare(self) -> Path:
        """As the base's: what `load` will look for, which is for the cards here."""
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
            self.jit_mode = before  # a wheel is not for the cards of the machine that builds it

    def _load_prebuilt(self) -> Any | None:
        """As the base's, unless the library is for other GPUs: then it is compiled instead."""
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
        """The op as a setuptools Extension, by torch's own means, which need a CUDA build of torch.

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
    """Of the cards that this process sees; empty with a torch without CUDA. Opens the device."""
    torch = torch_module()
    if cuda_of_torch()[0] is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _host_compiler_option() -> list[str]:
    """The compiler that nvcc shall use, where the user chose one by `$CXX`; nvcc's own choice otherwise.

    nvcc starts one program: of `ccache g++ -m64` that is g++, and the flags are handed through.
    """
    if not os.environ.get("CXX"):
        return []
    words = find_compiler().command
    last = max(index for index, word in enumerate(words) if index == 0 or not word.startswith("-"))
    return ["-ccbin", words[last], *(f"-Xcompiler={flag}" for flag in words[last + 1 :])]


def _before_as_needed(flags: Sequence[str], *added: str) -> list[str]:
    """`flags` with `added` where they count: before the first that lets the linker leave libraries out."""
    listed = list(flags)
    at = listed.index("-Wl,--as-needed") if "-Wl,--as-needed" in listed else len(listed)
    return [*listed[:at], *added, *listed[at:]]
