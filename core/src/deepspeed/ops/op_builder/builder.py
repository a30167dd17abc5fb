"""OpBuilder: what every op builder of every extension derives from; from sources in any package to a loaded op.

A builder of an extension names its sources and is done:

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

`load()` takes the library that came in the wheel, else the one in the cache, else compiles it. Importing this module
loads no torch; `TORCH_MAJOR` and `TORCH_MINOR` are worked out when they are first asked for. Read next: `spec.py` (what
a build is made of), `jit.py`, `compiling.py`.

`DeepSpeedQuestions` has what DeepSpeed's OpBuilder answers about the machine and its torch, under DeepSpeed's names.
Builders written for DeepSpeed call these methods, or extend them by `super()`. What they say of a device is torch's
answer: the core has no code for any, and the names are all that it knows of one.
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

from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
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
    """The part of `OpBuilder` that only builders call."""

    name: str
    reason: str | None
    error_log: str | None

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program, or one of several, is on PATH.

        Args:
            cmd: a name, several of them with `|` between (`"c++|g++"`), or a list.
        """
        names = [name.strip() for name in cmd.split("|")] if isinstance(cmd, str) else list(cmd)
        found = any(shutil.which(name) for name in names)
        if not found:
            self.warning(f"{self.name} needs the command {' or '.join(names)}, which is not on PATH")
        return found

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Whether a program that calls C function `funcname` links with `libraries`. False without a compiler."""
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
        """`args` without empty strings and None."""
        return [entry for entry in args if entry is not None and len(str(entry)) > 0]

    def cpu_arch(self) -> str:
        """The compiler flag for the CPU: the oldest of this architecture, so that the library runs on every one.

        DeepSpeed answers `-march=native` here. A kernel that wants more compiles its loops several times and chooses
        when it runs.
        """
        return _PORTABLE.get(platform.machine().lower(), "-fPIC")

    def simd_width(self) -> str:
        """The macro for the vector width that `cpu_arch` allows: `-D__SCALAR__`."""
        return "-D__SCALAR__"

    def warning(self, msg: str) -> None:
        """Log why something of this op is not there, and keep it as the reason."""
        self.error_log = self.reason = msg
        logger.warning("op %r: %s", self.name, msg)

    # ----- the installed torch ----------------------------------------------------------------------------------------

    def nvcc_args(self) -> list[str]:
        """Flags for a device's compiler: none in the base. `compile_command` of a device's builder says what counts."""
        return []

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this torch was built with that toolkit."""
        return getattr(torch_module().version, "hip", None) is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(major, minor) of the toolkit that this torch was built with; (0, 0) for any other torch."""
        stated = getattr(torch_module().version, "hip", None)
        release = Version(stated.partition("-")[0]).release if stated else ()
        return (release[0], release[1]) if len(release) > 1 else (0, 0)

    def hipify_extension(self) -> None:
        """Called before sources are compiled; a builder that translates its sources overrides it."""

    @staticmethod
    def validate_torch_version(torch_info: dict[str, Any]) -> None:
        """Refuse an op that was built with another torch.

        Args:
            torch_info: of the build, as `deepspeed.git_version_info.torch_info`.

        Raises:
            OpUnavailable: major or minor version differ.
        """
        built, found = str(torch_info["version"]), ".".join(map(str, torch_version().release[:2]))
        if built != found:
            raise OpUnavailable(f"the op was built with torch {built}, and this is torch {found}; build it again")

    validate_torch_op_version = validate_torch_version


#: for a compile whose flags do not choose; portable: one library for every machine of an architecture
_DEFAULT_FLAGS = {"-O": "-O3", "-std": "-std=c++20"}


def __getattr__(name: str) -> int:
    if name not in ("TORCH_MAJOR", "TORCH_MINOR"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    release = torch_version().release
    return release[0] if name == "TORCH_MAJOR" else release[1]


def _defaults_for(flags: Sequence[str]) -> list[str]:
    """Return the flags of `_DEFAULT_FLAGS` that `flags` do not choose themselves."""
    stated = [flag.replace("--std", "-std", 1) for flag in flags]
    return [default for start, default in _DEFAULT_FLAGS.items() if not any(flag.startswith(start) for flag in stated)]


@absent_members("ops.op_builder.builder:OpBuilder")
class OpBuilder(SourcePlaces, DeepSpeedQuestions, ABC):
    """One op: its name, its sources, and the loaded result. Made by `get_accelerator().create_op_builder(...)`.

    Args:
        name: the op's short name, for example `"fused_adam"`.

    Attributes:
        BUILD_VAR: the environment variable that builds this op into a wheel, `DS_BUILD_<OP>`.
        NAME: the op's short name, on the class.
        op_namespace: of the torch operators that the library registers; None: the library is a Python module.
        min_torch: the smallest torch, for example `"2.10"`; None: any.
        cmake_dir: a folder with a CMakeLists.txt that is built instead of `sources()`, named as sources are.
        reason: why `is_compatible()` was False or `load()` raised, in one line; None before.
    """

    BUILD_VAR: ClassVar[str] = ""
    NAME: ClassVar[str] = ""
    op_namespace: ClassVar[str | None] = None
    min_torch: ClassVar[str | None] = None
    cmake_dir: ClassVar[str | None] = None
    #: written by builders that bring their own `jit_load`, as DeepSpeed's do; never read, since it is keyed by name
    _loaded_ops: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason: str | None = None
        self.error_log: str | None = None
        self.jit_mode = False
        self.build_for_cpu = False
        self.enable_bf16 = False

    # ----- what a builder says of its op -----------------------------------------------------------------------------

    @abstractmethod
    def absolute_name(self) -> str:
        """The import path under which an op built beforehand is found, `<package>.<name>_op`."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The source files: absolute paths, or relative ones (see `deepspeed_src_path`). Empty ones do not count."""

    def include_paths(self) -> list[str]:
        """Folders of headers, named as sources are. torch's need not be given."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags for the compiler, none in the base. Where they name no level or no standard, `_DEFAULT_FLAGS` do."""
        return []

    def cmake_args(self) -> list[str]:
        """Arguments for configuring the project in `cmake_dir`, for example `["-DWITH_X=ON"]`."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Flags for the link."""
        return []

    def libraries_args(self) -> list[str]:
        """Names of libraries to link against, without `-l`."""
        return []

    def python_requirements(self) -> list[str]:
        """Python distributions that the op needs at run time, as `pip install` takes them. For reports."""
        return []

    def remark(self) -> str:
        """Return what `ds_report` adds to the op's row, such as a choice that depends on the machine; "": nothing.

        Compiles nothing.
        """
        return ""

    def register_fakes(self) -> None:
        """Register meta implementations; called once, after the library was loaded.

        `deepspeed.ops.fakes.register_fakes` has those of the documented operators.
        """

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        """The command for one source file. A base builder of another compiler overrides it, and `toolchain`."""
        return [
            *toolchain.command,
            "-fPIC",
            f"-ffile-prefix-map={source.parent}=.",  # messages of a library do not say where it was built
            *_defaults_for(flags),
            *flags,
            *("-c", str(source), "-o", str(object_path)),
        ]

    def link_command(
        self, toolchain: Toolchain, object_paths: Sequence[Path], library: Path, flags: Sequence[str]
    ) -> list[str]:
        """The command that links `library`."""
        return [*toolchain.command, "-shared", "-o", str(library), *map(str, object_paths), *flags]

    def toolchain(self) -> Toolchain:
        """The compiler.

        Raises:
            OpUnavailable: there is none.
        """
        return find_compiler()

    # ----- what becomes of it ----------------------------------------------------------------------------------------

    def describe(self) -> BuildSpec:
        """Everything that the build is made of. Called by `load`, by the wheel build, and by who caches a loaded op.

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
        """True when `load` can be expected to give the op on this machine; otherwise `reason` says why not."""
        reason = self._obstacle()
        if reason is not None:
            self.reason = reason
            if verbose:
                self.warning(reason)
        return reason is None

    def load(self, verbose: bool = False) -> Any:
        """The loaded op: `torch.ops.<op_namespace>`, or a Python module. Prebuilt, else from the cache, else compiled.

        Raises:
            OpUnavailable: with the reason; it is also in `reason`.
        """
        try:
            found = self._load_prebuilt()
            return self.jit_load(verbose) if found is None else found
        except OpUnavailable as error:
            self.reason = str(error)
            raise

    def jit_load(self, verbose: bool = True) -> Any:
        """The loaded op from the cache, compiled into it when it is not there yet. Called by `load`.

        Raises:
            OpUnavailable: `is_compatible()` is False, or the build failed (`BuildError`).
        """
        self._check_compatible()
        self.jit_mode = True
        spec = self.describe()
        return loading.load_once(spec.load_key, lambda: self._loaded_from(jit.build(spec)))

    def prepare(self) -> Path:
        """The finished library, prebuilt or from the cache or compiled now, without loading it. Called by `ds_build`.

        Raises:
            OpUnavailable: as `load`.
        """
        self._check_compatible()
        spec = self.describe()
        return loading.find(self.absolute_name(), spec)[0] or jit.build(spec)

    def builder(self) -> Any:
        """The op as a setuptools Extension, for a `setup.py` that wants one (`aot.py` needs none).

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
        if not self.is_compatible():  # maybe a vendor's own, which sets no reason, or takes no argument
            reason = self.reason or self.error_log or f"{type(self).__name__}.is_compatible() is False"
            raise OpUnavailable(f"op {self.name!r} cannot be built here: {reason}")

    def _obstacle(self) -> str | None:
        """Return why this op cannot be loaded here, found without trying; None: nothing is known to prevent it."""
        if self.min_torch is not None and torch_version() < Version(self.min_torch):
            return f"it needs torch {self.min_torch} or newer, and this is {torch_version()}"
        if type(self).jit_load is not OpBuilder.jit_load:
            return None  # a builder that compiles by means of its own knows what it needs
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
        torch_module()  # its libraries must be in the process first
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
        """The op of a finished library. A module was built under its file's name; `package` is where it is at home."""
        if self.op_namespace is None:
            return loading.load_module(library, f"{package}.{library.stem}" if package else library.stem)
        op = loading.load_operators(library, self.op_namespace)
        self.register_fakes()
        return op


@absent_members("ops.op_builder.builder:TorchCPUOpBuilder")
class TorchCPUOpBuilder(OpBuilder):
    """DeepSpeed's base for kernels of the host: OpenMP, and a macro for the vector width.

    The flags are portable (`cpu_arch`, `simd_width`); DeepSpeed's are those of the machine that compiles.
    """

    def cxx_args(self) -> list[str]:
        """DeepSpeed's flags of the host's kernels; a builder extends them."""
        return [self.cpu_arch(), "-fopenmp", self.simd_width()]

    def extra_ldflags(self) -> list[str]:
        """OpenMP's runtime."""
        return ["-fopenmp"]


complete(__name__)
