"""The C++ compiler of this machine: `$CXX`, else c++, g++, clang++ on PATH; and who it is, for the key of a build."""

import functools
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from deepspeed.errors import OpUnavailable

_NAMES = ("c++", "g++", "clang++")
#: what GCC, Clang and the linker read besides their arguments
_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "CCC_OVERRIDE_OPTIONS", "SOURCE_DATE_EPOCH", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET"),
)
#: what CMake takes its first values from: `CXXFLAGS`, `LDFLAGS`, `CC`, `CMAKE_PREFIX_PATH`
_CMAKE_VARIABLE = re.compile(r"CMAKE_\w+|\w*FLAGS|CC|\w+(?:CC|CXX)")


@dataclass(frozen=True)
class Toolchain:
    """A compiler that is there.

    Attributes:
        command: how to start it, for example `("g++",)` or `("ccache", "g++")`.
        identity: what it says of itself. Two compilers of equal identity are taken for the same, wherever they lie.
        variables: names of environment variables that it reads, besides those that every compiler here does.
    """

    command: tuple[str, ...]
    identity: str
    variables: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the command, which are its words from the first flag on: `-march=native` in `$CXX`."""
        first = next((at for at, word in enumerate(self.command) if word[:1] in ("-", "@") or "=" in word), None)
        return () if first is None else self.command[first:]

    def environment(self, for_cmake: bool = False) -> tuple[str, ...]:
        """`NAME=value` of each variable that changes what it builds, sorted.

        Args:
            for_cmake: it is started by CMake, which reads some of its own.
        """
        names = {*_VARIABLES, *self.variables}
        return tuple(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if value and (name in names or (for_cmake and _CMAKE_VARIABLE.fullmatch(name)))
        )

    @property
    def summary(self) -> str:
        """The summary has the command that starts the compiler, and the first line of its identity."""
        return f"{' '.join(self.command)}: {self.identity.partition(chr(10))[0]}"


def find_compiler() -> Toolchain:
    """The C++ compiler. Called for every build; it is asked for its identity once per process.

    Raises:
        OpUnavailable: `$CXX` names nothing that runs (another compiler is not taken in its place), or none is on PATH.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> Toolchain:
    if chosen:
        command = shlex.split(chosen)
        if not command or shutil.which(command[0], path=path) is None:
            raise OpUnavailable(f"no C++ compiler: CXX is {chosen!r}, which is not on PATH and no file that runs")
        return identify(tuple(command))
    for name in _NAMES:
        if shutil.which(name, path=path):
            return identify((name,))
    raise OpUnavailable(f"no C++ compiler: none of {', '.join(_NAMES)} is on PATH and CXX is not set")


@functools.lru_cache(maxsize=32)
def identify(command: tuple[str, ...]) -> Toolchain:
    """A compiler by its command; also for an extension's own one (a device compiler).

    Raises:
        OpUnavailable: it does not start, or `--version` fails.
    """
    try:
        done = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpUnavailable(f"compiler {' '.join(command)!r} does not run: {error}") from error
    if done.returncode != 0:
        found = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise OpUnavailable(f"compiler {' '.join(command)!r} does not run: {found.splitlines()[0]}")
    name, _, version = done.stdout.strip().partition(" ")
    # GCC begins with the name it was called by, and one GCC has several
    return Toolchain(command, version if name in _NAMES else done.stdout.strip())
