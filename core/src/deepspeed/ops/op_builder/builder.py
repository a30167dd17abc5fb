"""OpBuilder: the base class of all op builders. It builds and loads an op from sources in any package.

A builder of an extension only needs to name its sources:

    class CPUAdamBuilder(OpBuilder):
        BUILD_VAR, NAME = "DS_BUILD_CPU_ADAM", "cpu_adam"
        op_namespace = "ds_cpu"                       # the library registers torch operators there
        min_torch = "2.10"

        def __init__(self) -> None:
            super().__init__(self.NAME)

        def absolute_name(self) -> str:
            return "ds_ext_cpu.op_builder.cpu_adam_op"

        def sources(self) -> list[str]:
            return [cpu_kernel_path("csrc/adam/cpu_adam.cpp")]

`load()` uses the library of the wheel, else the library in the cache, else compiles the op. Importing this module does
not import torch; `TORCH_MAJOR` and `TORCH_MINOR` are computed when they are read. Read next: `spec.py` (the inputs of a
build), `jit.py`, `compiling.py`.

`DeepSpeedQuestions` has the methods of DeepSpeed's OpBuilder that query the machine and torch, under DeepSpeed's names.
Builders written for DeepSpeed call these methods, or extend them with `super()`. Answers about a device come from
torch: the core has no device-specific code except these names.
"""

import importlib
import platform
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import Version

from deepspeed._absent import absent_members, complete
from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder import compiling, jit, loading
from deepspeed.ops.op_builder.spec import (
    BuildSpec,
    SourcePlaces,
    this_python,
    this_target,
    torch_module,
    torch_version,
    with_torch,
)
from deepspeed.ops.op_builder.toolchain import Toolchain, find_compiler

_PORTABLE = {"x86_64": "-march=x86-64", "amd64": "-march=x86-64", "aarch64": "-march=armv8-a"}


class DeepSpeedQuestions:
    """The part of `OpBuilder` that only builders call: queries about the machine and torch."""

    name: str
    reason: str | None
    error_log: str | None

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Return whether a program, or one of several, is on PATH.

        Args:
            cmd: a name, several names separated by `|` (`"c++|g++"`), or a list of names.
        """
        names = [name.strip() for name in cmd.split("|")] if isinstance(cmd, str) else list(cmd)
        found = any(shutil.which(name) for name in names)
        if not found:
            self.warning(f"{self.name} needs the command {' or '.join(names)}, which is not on PATH")
        return found

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Return whether a program that calls the C function `funcname` links. False without a compiler."""
        program = f'extern "C" char {funcname}();\nint main() {{ return {funcname}(); }}\n'
        with tempfile.TemporaryDirectory(prefix="ds_has_function_") as name:
            folder = Path(name)
            (folder / "asked.cpp").write_text(program)
            try:
                toolchain = find_compiler()
                command = [
                    *(*toolchain.command, "asked.cpp", "-o", "asked"),
                    *(f"-L{path}" for path in library_dirs or ()),
                    *(f"-l{library}" for library in libraries),
                ]
                compiling.run_commands(self.name, folder, [command])
            except OpUnavailable as error:
                if verbose:
                    logger.warning("%s", error)
                return False
        return True

    def strip_empty_entries(self, args: Sequence[Any]) -> list[Any]:
        """Return `args` without empty strings and None."""
        return [entry for entry in args if entry is not None and len(str(entry)) > 0]

    def cpu_arch(self) -> str:
        """Return the compiler flag for the oldest CPU of this architecture, so that the library is portable.

        DeepSpeed returns `-march=native`. A kernel that needs newer instructions compiles its loops several times and
        selects one at run time.
        """
        return _PORTABLE.get(platform.machine().lower(), "-fPIC")

    def simd_width(self) -> str:
        """Return the macro for the vector width of `cpu_arch`: `-D__SCALAR__`."""
        return "-D__SCALAR__"

    def warning(self, msg: str) -> None:
        """Log why the op is not available, and store it as the reason."""
        self.error_log = self.reason = msg
        logger.warning("op %r: %s", self.name, msg)

    # ----- the installed torch ----------------------------------------------------------------------------------------

    def nvcc_args(self) -> list[str]:
        """Return flags for a device's compiler: none here. A device's builder uses them in `compile_command`."""
        return []

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return whether this torch was built with the toolkit in this method's name."""
        return getattr(torch_module().version, "hip", None) is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return (major, minor) of the toolkit that this torch was built with; (0, 0) for any other torch."""
        stated = getattr(torch_module().version, "hip", None)
        release = Version(stated.partition("-")[0]).release if stated else ()
        return (release[0], release[1]) if len(release) > 1 else (0, 0)

    def hipify_extension(self) -> None:
        """Do nothing. A builder that translates its sources before they are compiled overrides this."""

    @staticmethod
    def validate_torch_version(torch_info: dict[str, Any]) -> None:
        """Refuse an op that was built with another torch.

        Args:
            torch_info: the torch of the build, in the format of `deepspeed.git_version_info.torch_info`.

        Raises:
            OpUnavailable: the major or minor version differs.
        """
        built, found = str(torch_info["version"]), ".".join(map(str, torch_version().release[:2]))
        if built != found:
            raise OpUnavailable(f"the op was built with torch {built}, and this is torch {found}; build it again")

    validate_torch_op_version = validate_torch_version


#: defaults for flags that a builder does not set; portable within an architecture
_DEFAULT_FLAGS = {"-O": "-O3", "-std": "-std=c++20"}


def __getattr__(name: str) -> int:
    if name not in ("TORCH_MAJOR", "TORCH_MINOR"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    release = torch_version().release
    return release[0] if name == "TORCH_MAJOR" else release[1]


def _defaults_for(flags: Sequence[str]) -> list[str]:
    """Return the flags of `_DEFAULT_FLAGS` that `flags` do not set."""
    stated = [flag.replace("--std", "-std", 1) for flag in flags]
    return [default for start, default in _DEFAULT_FLAGS.items() if not any(flag.startswith(start) for flag in stated)]


@absent_members("ops.op_builder.builder:OpBuilder")
class OpBuilder(SourcePlaces, DeepSpeedQuestions, ABC):
    """Describes, builds and loads one op. `get_accelerator().create_op_builder(...)` creates it.

    Args:
        name: the op's short name, for example `"fused_adam"`.

    Attributes:
        BUILD_VAR: the environment variable that builds this op into a wheel, `DS_BUILD_<OP>`.
        NAME: the op's short name, on the class.
        op_namespace: the namespace of the torch operators that the library registers; None for a Python module.
        min_torch: the oldest supported torch, for example `"2.10"`; None: any.
        cmake_dir: a folder with a CMakeLists.txt to build instead of `sources()`; its path has the same rules.
        reason: why `is_compatible()` was False or `load()` raised, in one line; initially None.
    """

    BUILD_VAR: ClassVar[str] = ""
    NAME: ClassVar[str] = ""
    op_namespace: ClassVar[str | None] = None
    min_torch: ClassVar[str | None] = None
    cmake_dir: ClassVar[str | None] = None
    #: builders with their own `jit_load`, like DeepSpeed's, write it; never read here, because its keys are names
    _loaded_ops: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason: str | None = None
        self.error_log: str | None = None
        self.jit_mode = False
        self.build_for_cpu = False
        self.enable_bf16 = False

    # ----- the description of an op, which a builder overrides -------------------------------------------------------

    @abstractmethod
    def absolute_name(self) -> str:
        """Return the import path of a prebuilt op, `<package>.<name>_op`."""

    @abstractmethod
    def sources(self) -> list[str]:
        """Return the source files: absolute or relative paths (see `deepspeed_src_path`). Empty ones are ignored."""

    def include_paths(self) -> list[str]:
        """Return header folders, with the same rules as `sources`. torch's folders are added automatically."""
        return []

    def cxx_args(self) -> list[str]:
        """Return compiler flags, none here. `_DEFAULT_FLAGS` sets the optimization level and standard if missing."""
        return []

    def cmake_args(self) -> list[str]:
        """Return arguments to configure the project in `cmake_dir`, for example `["-DWITH_X=ON"]`."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Return linker flags."""
        return []

    def libraries_args(self) -> list[str]:
        """Return names of libraries to link against, without `-l`."""
        return []

    def python_requirements(self) -> list[str]:
        """Return Python requirements of the op at run time, in the format of `pip install`. For reports."""
        return []

    def remark(self) -> str:
        """Return a remark for the op's row in `ds_report`, such as a choice that depends on the machine, or "".

        Must not compile.
        """
        return ""

    def register_fakes(self) -> None:
        """Register meta implementations. Called once, after the library is loaded.

        `deepspeed.ops.fakes.register_fakes` has the fakes of the documented operators.
        """

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        """Return the command for one source file. A base class for another compiler overrides it and `toolchain`."""
        return [
            *toolchain.command,
            "-fPIC",
            f"-ffile-prefix-map={source.parent}=.",  # keep build paths out of the library's messages
            *_defaults_for(flags),
            *flags,
            *("-c", str(source), "-o", str(object_path)),
        ]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        """Return the command that links `library`."""
        return [*toolchain.command, "-shared", "-o", str(library), *map(str, object_paths), *flags]

    def toolchain(self) -> Toolchain:
        """Return the compiler.

        Raises:
            OpUnavailable: there is none.
        """
        return find_compiler()

    # ----- building and loading --------------------------------------------------------------------------------------

    def describe(self) -> BuildSpec:
        """Return all inputs of the build. `load`, the wheel build, and callers that cache a loaded op use it.

        Raises:
            OpUnavailable: a source is missing, or torch cannot be imported.
        """
        sources = tuple(Path(self.deepspeed_src_path(path)) for path in self.strip_empty_entries(self.sources()))
        for source in sources:
            if not source.is_file():
                raise OpUnavailable(f"op {self.name!r}: source file {source} does not exist")
        if not sources and self.cmake_dir is None:
            raise OpUnavailable(f"op {self.name!r}: {type(self).__name__}.sources() names no file")
        try:
            toolchain: Toolchain | None = self.toolchain()
        except OpUnavailable:
            toolchain = None
        ours, others = self._sort_include_paths(self.strip_empty_entries(self.include_paths()), sources)
        flags = self.cxx_args() if self.cmake_dir is None else self.cmake_args()
        spec = BuildSpec(
            name=self.name,
            sources=sources,
            include_paths=ours,
            compile_flags=tuple(self.strip_empty_entries(flags)),
            link_flags=(
                *self.strip_empty_entries(self.extra_ldflags()),
                *(f"-l{name}" for name in self.strip_empty_entries(self.libraries_args())),
            ),
            toolchain=toolchain,
            environment=() if toolchain is None else toolchain.environment(for_cmake=self.cmake_dir is not None),
            target=this_target(),
            python="" if self.op_namespace else this_python(),
            op_namespace=self.op_namespace,
            min_torch=self.min_torch,
            cmake_dir=None if self.cmake_dir is None else self._project_folder(self.cmake_dir),
            compile_command=self.compile_command,
            link_command=self.link_command,
        )
        return with_torch(spec, others)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if `load` is expected to work on this machine; else set `reason` and return False."""
        reason = self._obstacle()
        if reason is not None:
            self.reason = reason
            if verbose:
                self.warning(reason)
        return reason is None

    def load(self, verbose: bool = False) -> Any:
        """Load the op (prebuilt, else cached, else compiled): `torch.ops.<op_namespace>`, or a Python module.

        Raises:
            OpUnavailable: the op cannot be loaded; `reason` has the same text.
        """
        try:
            found = self._load_prebuilt()
            return self.jit_load(verbose) if found is None else found
        except OpUnavailable as error:
            self.reason = str(error)
            raise

    def jit_load(self, verbose: bool = True) -> Any:
        """Load the op from the cache, and compile it first if necessary. Called by `load`.

        Raises:
            OpUnavailable: `is_compatible()` is False, or the build failed (`BuildError`).
        """
        self._check_compatible()
        self.jit_mode = True
        spec = self.describe()
        return loading.load_once(spec.load_key, lambda: self._loaded_from(jit.build(spec)))

    def prepare(self) -> Path:
        """Return the library (prebuilt, cached or compiled now) without loading it. `ds_build` calls this.

        Raises:
            OpUnavailable: see `load`.
        """
        self._check_compatible()
        spec = self.describe()
        return loading.find(self.absolute_name(), spec)[0] or jit.build(spec)

    def builder(self) -> Any:
        """Return the op as a setuptools Extension, for a `setup.py` that does not use `aot.py`.

        Raises:
            OpUnavailable: a source is missing.
        """
        from torch.utils.cpp_extension import CppExtension

        spec = self.describe()
        return CppExtension(
            name=self.absolute_name(),
            sources=[str(path) for path in spec.sources],
            include_dirs=[str(path) for path in spec.include_paths],
            extra_compile_args={"cxx": [*_defaults_for(spec.compile_flags), *spec.compile_flags]},
            extra_link_args=list(spec.link_flags),
        )

    def _project_folder(self, cmake_dir: str) -> Path:
        folder = Path(self.deepspeed_src_path(cmake_dir))
        if not (folder / "CMakeLists.txt").is_file():
            raise OpUnavailable(f"op {self.name!r}: {folder} has no CMakeLists.txt")
        return folder

    def _check_compatible(self) -> None:
        if not self.is_compatible():  # a vendor's override may set no reason, or take no argument
            reason = self.reason or self.error_log or f"{type(self).__name__}.is_compatible() is False"
            raise OpUnavailable(f"op {self.name!r} cannot be built here: {reason}")

    def _obstacle(self) -> str | None:
        """Return why this op cannot be loaded here, as far as is known without trying; None if no reason is known."""
        if self.min_torch is not None and torch_version() < Version(self.min_torch):
            return f"it needs torch {self.min_torch} or newer, and this is {torch_version()}"
        if type(self).jit_load is not OpBuilder.jit_load:
            return None  # a builder with its own `jit_load` checks its own requirements
        if self.cmake_dir is not None and shutil.which("cmake") is None:
            missing: str | None = "it is a CMake project, and there is no cmake on PATH"
        else:
            try:
                self.toolchain()
            except OpUnavailable as error:
                missing = str(error)
            else:
                return None
        try:
            if self.op_namespace is None and loading.module_of_setuptools(self.absolute_name()):
                return None
            spec = self.describe()
            found = loading.find(self.absolute_name(), spec)[0] or jit.find(spec)
        except OpUnavailable:
            found = None
        return missing if found is None else None

    def _load_prebuilt(self) -> Any | None:
        library = loading.library_beside_package(self.absolute_name())
        if self._too_old():
            return None
        if library is None or not library.is_file():
            return self._module_of_setuptools()
        spec = self.describe()
        fitting, reason = loading.find(self.absolute_name(), spec)
        if fitting is None:
            logger.info("op %r: %s; it is compiled instead", self.name, reason)
            return None
        try:
            package = self.absolute_name().rpartition(".")[0]
            return loading.load_once(spec.load_key, lambda: self._loaded_from(fitting, package))
        except OpUnavailable as error:
            logger.info("op %r: the prebuilt %s; it is compiled instead", self.name, error)
            return None

    def _module_of_setuptools(self) -> Any | None:
        if self.op_namespace is not None or loading.module_of_setuptools(self.absolute_name()) is None:
            return None
        torch_module()  # torch's libraries must be loaded first
        try:
            return importlib.import_module(self.absolute_name())
        except ImportError as error:
            logger.info(
                "op %r: %s cannot be imported: %s; it is compiled instead", self.name, self.absolute_name(), error
            )
            return None

    def _too_old(self) -> bool:
        return self.min_torch is not None and torch_version() < Version(self.min_torch)

    def _loaded_from(self, library: Path, package: str = "") -> Any:
        """Load the op of a finished library. A module has the name of its file, in `package` if it is prebuilt."""
        if self.op_namespace is None:
            return loading.load_module(library, f"{package}.{library.stem}" if package else library.stem)
        op = loading.load_operators(library, self.op_namespace)
        self.register_fakes()
        return op


@absent_members("ops.op_builder.builder:TorchCPUOpBuilder")
class TorchCPUOpBuilder(OpBuilder):
    """DeepSpeed's base class for host kernels: OpenMP, and a macro for the vector width.

    The flags are portable (`cpu_arch`, `simd_width`). DeepSpeed's flags are for the CPU of the build machine.
    """

    def cxx_args(self) -> list[str]:
        """Return the flags of host kernels; a builder extends them."""
        return [self.cpu_arch(), "-fopenmp", self.simd_width()]

    def extra_ldflags(self) -> list[str]:
        """Return the flag for OpenMP's runtime."""
        return ["-fopenmp"]


complete(__name__)
