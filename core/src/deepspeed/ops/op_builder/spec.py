"""BuildSpec: all inputs of one build of an op, and the key of its result in the cache.

    source_digest   the op's own part: sources, headers, flags               (a prebuilt library must have the same)
    content         + torch, Python and machine                              (a machine without compiler looks for it)
    key             + the compiler, its command lines, and the environment   (the name of the cache's folder)
                      variables that it reads

Paths of folders are not part of a key: the same content in another environment has the same key.

[Note: headers] `scan` finds the headers that sources include by reading their `#include` lines. It does not use the
compiler: a warm load must not start one, and some device compilers cannot list the files that they read. Every include
counts, even if an `#if` excludes it, a macro names it by a literal (`#define LOOPS "adam/loops.h"`) or a flag names it
(`-include x.h`). So the set may be too large. If a macro names a header in another way, all files of the project's
folders count.

`make_kernel_path` finds the files of a package's own builders, `SourcePlaces` the files of other builders.

    cpu_kernel_path, cpu_kernel_include = make_kernel_path("ds_ext_cpu")

    def sources(self):
        return [cpu_kernel_path("csrc/adam/cpu_adam.cpp")]
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.toolchain import Toolchain

#: the text after a `#`: an include, or the definition of a macro as a literal name, for an `#include MACRO`
_DIRECTIVE = re.compile(
    rb'[ \t]*(?:(include_next|include|import)\b|define[ \t]+(\w+))[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))'
)
_FORCED = re.compile(r"--?(?:include|imacros)=?(.*)")
_TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
_STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/")


@dataclass(frozen=True)
class Includes:
    """`Includes` holds the headers that a scan found.

    Attributes:
        headers: the project's headers as sorted pairs (name in the directive, path).
        outside: names of headers outside the project: headers of torch and of the system.
    """

    headers: tuple[tuple[str, Path], ...]
    outside: frozenset[str]

    @property
    def uses_torch(self) -> bool:
        """Whether the project directly includes a header of torch or Python."""
        return any(name.startswith(_TORCH) for name in self.outside)

    @property
    def stable_abi(self) -> bool:
        """Whether the project includes only stable-ABI headers of torch: the library then survives a torch upgrade."""
        return self.uses_torch and all(name.startswith(_STABLE) for name in self.outside if name.startswith(_TORCH))


def scan(sources: Sequence[Path], include_paths: Sequence[Path], flags: Sequence[str] = ()) -> Includes:
    """Find every header of the project that `sources` include, directly or through other headers.

    Args:
        sources: existing files.
        include_paths: the project's header folders. A quoted name is first looked up next to the including file.
        flags: flags of the compile command; `-include` flags count.
    """
    headers: dict[tuple[str, Path], None] = {}
    outside: set[str] = set()
    macros: set[str] = set()  # macros in an `#include MACRO`
    literals: set[str] = set()  # macros defined as a literal name
    forced = "".join(f'#include "{name}"\n' for name in _forced(flags)).encode()
    waiting = [(Path("/"), forced), *((source.parent, source.read_bytes()) for source in sources)]
    seen = set(sources)
    while waiting:
        folder, text = waiting.pop()
        for include, defined, quoted, angled, word in _directives(text):
            if word:
                macros |= {word} if include else set()
                continue
            literals.add(defined)
            name = quoted or angled
            found = _look_up(name, [folder, *include_paths] if quoted else include_paths)
            if found is None:
                outside |= {name} if include else set()
                continue
            headers[name, found] = None
            if found not in seen:
                seen.add(found)
                waiting.append((found.parent, found.read_bytes()))
    if macros - literals:
        headers.update(dict.fromkeys(_all_below({*include_paths, *(source.parent for source in sources)})))
    return Includes(tuple(sorted(headers)), frozenset(outside))


def _directives(text: bytes) -> Iterator[list[str]]:
    """Yield [include, defined, quoted, angled, word] of each directive that may name a header; missing parts are "".

    The text is split at `#` first, because this is fast.
    """
    for before, after in itertools.pairwise(text.split(b"#")):
        if before.rstrip(b" \t")[-1:] in (b"", b"\n"):  # the `#` is the first character of its line
            match = _DIRECTIVE.match(after)
            if match is not None:
                yield [(group or b"").decode(errors="replace") for group in match.groups()]


def _look_up(name: str, folders: Iterable[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _all_below(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    found = ((str(path.relative_to(folder)), path) for folder in folders for path in folder.rglob("*"))
    return [(name, path) for name, path in found if path.is_file()]


def _forced(flags: Sequence[str]) -> list[str]:
    """Return the files of `-include x.h`, `-includex.h` and `--include=x.h`."""
    pairs = itertools.zip_longest(flags, flags[1:], fillvalue="")
    found = [(match[1] or following) for flag, following in pairs if (match := _FORCED.fullmatch(flag))]
    return [name for name in found if name]


#: increased when our command lines change in a way that the flags do not show
_FORMAT = 1
#: also matches inside another flag: `-Xcompiler=-march=native`, `-DCMAKE_CXX_FLAGS=-O2 -march=native`
_OF_THIS_CPU = re.compile(r"-m(?:arch|cpu|tune)=native|-x(?:Host|HOST)\b")
#: the lines of /proc/cpuinfo with the features of a CPU, on x86, ARM, POWER and RISC-V
_CPU_LINES = ("model name", "flags", "Features", "CPU part", "CPU implementer", "CPU variant", "cpu", "isa")

#: (toolchain, source, object file, flags) -> argument list
CompileCommand = Callable[[Toolchain, Path, Path, Sequence[str]], list[str]]
#: (toolchain, object files, library, flags) -> argument list
LinkCommand = Callable[[Toolchain, Sequence[Path], Path, Sequence[str]], list[str]]


@dataclass(frozen=True)
class BuildSpec:
    """The inputs of one build. `OpBuilder.describe` creates it; `jit.build` and `aot` use it.

    Attributes:
        name: the op's short name: letters, digits and `_` only, because file names begin with it.
        sources: absolute paths of existing files.
        include_paths: the project's header folders; their files are part of the key.
        system_include_paths: headers of torch, Python and the system; not part of the key, but their versions are.
        compile_flags, link_flags: flags of the command lines.
        library_paths: folders of torch's libraries; not part of the key.
        toolchain: None on a machine without compiler. Such a spec can be looked up, but not built.
        environment: variables that the compiler reads, as `NAME=value`.
        torch: version and ABI of the torch that the library requires.
        python: tag of the Python that a module requires; empty for a library of operators, which fits every Python.
        target: machine, system and C library.
        op_namespace: namespace of the torch operators that the library registers; None for a Python module.
        stable_abi: the library includes only stable-ABI headers of torch.
        min_torch: oldest torch for a library of the stable ABI.
        cmake_dir: a CMake project to build instead of `sources`; all of its files are part of the key.
    """

    name: str
    sources: tuple[Path, ...]
    include_paths: tuple[Path, ...] = ()
    system_include_paths: tuple[Path, ...] = ()
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    library_paths: tuple[Path, ...] = ()
    toolchain: Toolchain | None = None
    environment: tuple[str, ...] = ()
    torch: str = ""
    python: str = ""
    target: str = ""
    op_namespace: str | None = None
    stable_abi: bool = False
    min_torch: str | None = None
    cmake_dir: Path | None = None
    compile_command: CompileCommand | None = field(default=None, compare=False)
    link_command: LinkCommand | None = field(default=None, compare=False)

    @cached_property
    def includes(self) -> Includes:
        """The headers that the sources include, directly or through other headers."""
        return scan(self.sources, self.include_paths, self.compile_flags)

    @cached_property
    def source_digest(self) -> str:
        """The digest covers the op's own part: sources, the project's headers, flags, and its name or namespace."""
        headers = {(name, _digest_of(path)) for name, path in self.includes.headers}
        return _digest(
            {
                "format": _FORMAT,
                "name": "" if self.op_namespace else self.name,  # a module's name is compiled into the library
                "namespace": self.op_namespace,
                "sources": [(path.name, _digest_of(path)) for path in self.sources],
                "headers": sorted(headers),
                "project": [] if self.cmake_dir is None else _digests_below(self.cmake_dir),
                "compile": self.compile_flags,
                "link": self.link_flags,
            }
        )

    @cached_property
    def cpu(self) -> str:
        """Digest of this machine's CPU if a flag such as `-march=native` requires it; empty for a portable library."""
        words = [*self.compile_flags, *self.link_flags, *self.environment]
        if self.toolchain is not None:
            words += [*self.toolchain.flags, *(word for line in self._command_lines(self.toolchain) for word in line)]
        return this_cpu_digest() if any(_OF_THIS_CPU.search(word) for word in words) else ""

    @cached_property
    def content(self) -> str:
        """The digest covers `source_digest`, and the torch, Python and machine that the library requires."""
        return _digest([self.source_digest, self.torch, self.python, self.target])

    @cached_property
    def key(self) -> str:
        """The digest covers `content`, compiler, command lines, environment and CPU. It names the cache's folder."""
        if self.toolchain is None:
            return self.content
        compiler = [self.toolchain.identity, self.toolchain.flags, self._command_lines(self.toolchain)]
        return _digest([self.content, self.cpu, compiler, self.environment])

    @property
    def entry(self) -> str:
        """The name of the cache's folder, and of a Python module: `<label>_<key>`."""
        return f"{self.label}_{self.key[:20]}"

    @property
    def label(self) -> str:
        """The prefix of file names: a module's name, or the first source's name for operators, which ops may share."""
        shared = self.op_namespace is not None and self.sources
        return re.sub(r"\W", "_", self.sources[0].stem if shared else self.name)

    @property
    def load_key(self) -> str:
        """The key by which a process loads a library only once: `content` for operators, `key` for a Python module."""
        return self.content if self.op_namespace else self.key

    def _command_lines(self, toolchain: Toolchain) -> list[list[str]]:
        """Return the commands with file names instead of paths, and without the compiler's path."""
        lines = []
        if self.compile_command is not None:
            lines += [
                self.compile_command(toolchain, Path(source.name), Path("object.o"), self.compile_flags)
                for source in self.sources
            ]
        if self.link_command is not None:
            lines.append(self.link_command(toolchain, [Path("object.o")], Path("library.so"), self.link_flags))
        return [line[len(toolchain.command) :] if _starts(line, toolchain) else line for line in lines]


def with_torch(spec: BuildSpec, system_include_paths: Sequence[Path]) -> BuildSpec:
    """Return `spec` with the version, headers, libraries and flags of the torch of this process."""
    torch = torch_module()
    root = Path(torch.__file__).absolute().parent
    abi = int(torch.compiled_with_cxx11_abi())
    headers = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    libraries = ["-Wl,--as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    flags: list[str] = []
    stable = spec.op_namespace is not None and spec.includes.stable_abi
    named = any("TORCH_TARGET_VERSION" in flag for flag in spec.compile_flags)
    if stable and spec.min_torch is not None and not named:  # torch's headers then hide newer functions
        major, minor = Version(spec.min_torch).release[:2]
        flags.append(f"-DTORCH_TARGET_VERSION=0x{(major << 56) | (minor << 48):016x}")
    if not stable:
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    if spec.op_namespace is None:
        headers.append(Path(sysconfig.get_path("include")))
        libraries.append("-ltorch_python")
        flags.append("-DTORCH_API_INCLUDE_EXTENSION_H")
    if spec.cmake_dir is not None:
        flags, libraries = [], []
    made = dataclasses.replace(
        spec,
        torch=f"{torch.__version__} abi{abi}",
        stable_abi=stable,
        compile_flags=(*spec.compile_flags, *flags),
        link_flags=(*spec.link_flags, *libraries),
        library_paths=(root / "lib",),
        system_include_paths=(*system_include_paths, *headers),
    )
    vars(made)["includes"] = spec.includes  # keep the cached scan: the sources are the same
    return made


def torch_module() -> Any:
    """Import torch and return it.

    Raises:
        OpUnavailable: torch cannot be imported.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise OpUnavailable(f"ops are built for a torch, and none can be imported: {error}") from error


def torch_version() -> Version:
    """Return torch's version without the part after `+`."""
    return Version(Version(str(torch_module().__version__)).public)


def this_target() -> str:
    """Return machine, system and C library of this process, for example `x86_64-linux-glibc 2.36`."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    return f"{platform.machine().lower()}-{sys.platform}-{libc or 'libc'}"


def this_python() -> str:
    """Return the tag of this Python's extension modules, for example `cpython-311-x86_64-linux-gnu`."""
    return str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag)


@lru_cache(maxsize=1)
def this_cpu() -> str:
    """Return model and features of this machine's CPU, for builds with a flag such as `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in _CPU_LINES)


def this_cpu_digest() -> str:
    """Return the digest of `this_cpu()` for a manifest."""
    return _digest(this_cpu())[:16]


def _starts(line: list[str], toolchain: Toolchain) -> bool:
    return tuple(line[: len(toolchain.command)]) == toolchain.command


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digests_below(folder: Path) -> list[tuple[str, str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), _digest_of(path)) for path in files]


_OPS_FOLDER = Path(__file__).absolute().parents[1]  # DeepSpeed's sources are relative to it
_SYSTEM_FOLDERS = (Path("/usr"), Path("/opt"))


def make_kernel_path(package: str | Path, folder: str = "csrc") -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return the two path functions of a package. An extension's `op_builder` calls this at import.

    Args:
        package: the package's import name, its folder, or a file in its folder (`__file__`).
        folder: the folder of the sources in the package. Paths may include this folder or not: `"csrc/adam/x.cpp"` and
            `"adam/x.cpp"` are the same file.

    Returns:
        `kernel_path(code_path)` for a source file and `kernel_include(code_path)` for a header folder. Each returns an
        absolute path, or raises OpUnavailable if it does not exist. An empty or absolute `code_path` is returned
        unchanged.

    >>> kernel_path, _ = make_kernel_path("deepspeed", folder="ops")
    >>> kernel_path("registry.py") == kernel_path("ops/registry.py")
    True
    """
    inside = Path(folder).parts

    def locate(code_path: str, what: str, kind: str, is_there: Callable[[Path], bool]) -> str:
        if not code_path or os.path.isabs(code_path):
            return code_path
        has_folder = Path(code_path).parts[: len(inside)] == inside
        path = _root(package) / ("" if has_folder else folder) / code_path
        if not is_there(path):
            raise OpUnavailable(
                f"kernel {what} {code_path!r}: there is no {kind} {path}; is {package} installed whole?"
            )
        return str(path)

    def kernel_path(code_path: str) -> str:
        return locate(code_path, "source", "file", Path.is_file)

    def kernel_include(code_path: str) -> str:
        return locate(code_path, "headers", "folder", Path.is_dir)

    return kernel_path, kernel_include


def _root(package: str | Path) -> Path:
    """Return the folder of the package."""
    if isinstance(package, str) and os.sep not in package:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise OpUnavailable(f"kernel sources: {package!r} is no package that can be imported")
        return Path(places[0]).absolute()
    path = Path(package).absolute()
    return path.parent if path.is_file() else path


class SourcePlaces:
    """The part of `OpBuilder` that finds files by absolute path, or by a relative path as in DeepSpeed."""

    name: str

    def deepspeed_src_path(self, code_path: str | Path) -> str:
        """Return the absolute path of a source file or a header folder.

        An absolute or empty path is returned unchanged. A relative path is searched in the builder's package, from its
        top folder down to the folder of the builder's module, and last in `deepspeed/ops`, where DeepSpeed's own
        sources are.

        Raises:
            OpUnavailable: a file is in none of these folders; the message names them. A folder may be missing.
        """
        if not str(code_path) or os.path.isabs(code_path):
            return str(code_path)
        places = [*self._own_folders(), _OPS_FOLDER]
        found = next((place / code_path for place in places if (place / code_path).exists()), None)
        if found is None and Path(code_path).suffix:
            looked_at = ", ".join(str(place) for place in places)
            raise OpUnavailable(f"op {self.name!r}: source {str(code_path)!r} is in none of {looked_at}")
        return str(found or places[0] / code_path)

    def _own_folders(self) -> list[Path]:
        """Return the folders from the top package of this builder's class down to its module."""
        module = sys.modules.get(type(self).__module__)
        file = getattr(module, "__file__", None)
        if file is None:
            return []
        is_package = Path(file).name == "__init__.py"
        depth = type(self).__module__.count(".") + is_package
        folder = Path(file).absolute().parent
        return [folder, *folder.parents][: max(depth, 1)][::-1]

    def _sort_include_paths(
        self, paths: Sequence[str], sources: Sequence[Path]
    ) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Divide header folders into the project's, whose files are part of the key, and folders of an installed SDK.

        A folder belongs to the project if it is below the builder's package or below the sources' folders or their
        parents, or if it is not below `/usr` or `/opt`.
        """
        near = [
            folder for source in sources for folder in (source.parent, source.parent.parent) if len(folder.parts) > 2
        ]
        roots = [*self._own_folders()[:1], *near]
        found = [Path(self.deepspeed_src_path(text)) for text in paths]
        others = [path for path in found if _is_below(path, _SYSTEM_FOLDERS) and not _is_below(path, roots)]
        return tuple(path for path in found if path not in others), tuple(others)


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
