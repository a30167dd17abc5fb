"""Finds the C++ compiler (`$CXX`, else c++, g++, clang++ on PATH) and its identity, for the key of a build."""

import functools
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from deepspeed.errors import OpUnavailable

_NAMES = ("c++", "g++", "clang++")
#: environment variables that GCC, Clang and the linker read
_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "CCC_OVERRIDE_OPTIONS", "SOURCE_DATE_EPOCH", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET"),
)
#: environment variables that CMake reads: `CXXFLAGS`, `LDFLAGS`, `CC`, `CMAKE_PREFIX_PATH`
_CMAKE_VARIABLE = re.compile(r"CMAKE_\w+|\w*FLAGS|CC|\w+(?:CC|CXX)")


@dataclass(frozen=True)
class Toolchain:
    """An installed compiler.

    Attributes:
        command: the command that starts it, for example `("g++",)` or `("ccache", "g++")`.
        identity: the output of `--version`. Compilers with equal identity count as the same, whatever their paths.
        variables: names of environment variables that this compiler reads in addition to the common ones.
    """

    command: tuple[str, ...]
    identity: str
    variables: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The words of the command from the first flag on, such as `-march=native` in `$CXX`."""
        first = next((at for at, word in enumerate(self.command) if word[:1] in ("-", "@") or "=" in word), None)
        return () if first is None else self.command[first:]

    def environment(self, for_cmake: bool = False) -> tuple[str, ...]:
        """Return `NAME=value` of each variable that affects a build, sorted.

        Args:
            for_cmake: CMake starts the compiler, so variables that CMake reads count too.
        """
        names = {*_VARIABLES, *self.variables}
        return tuple(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if value and (name in names or (for_cmake and _CMAKE_VARIABLE.fullmatch(name)))
        )

    @property
    def summary(self) -> str:
        """The command and the first line of the identity."""
        return f"{' '.join(self.command)}: {self.identity.partition(chr(10))[0]}"


def find_compiler() -> Toolchain:
    """Return the C++ compiler. Called for every build; the compiler's identity is cached per process.

    Raises:
        OpUnavailable: `$CXX` cannot be run (no other compiler replaces it), or no compiler is on PATH.
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
    """Return the compiler of a command. Extensions use this for a device compiler.

    Raises:
        OpUnavailable: the compiler does not start, or `--version` fails.
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
    # GCC's output begins with the name in the command, and one GCC may have several names
    return Toolchain(command, version if name in _NAMES else done.stdout.strip())
