"""The C++ compiler of this machine: `$CXX`, else c++, g++, clang++ on PATH; and who it is, for the key of a build."""

import functools
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from deepspeed.errors import OpUnavailable

_NAMES = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Toolchain:
    """A compiler that is there.

    Attributes:
        command: how to start it, for example `("g++",)` or `("ccache", "g++")`.
        identity: what it says of itself. Two compilers of equal identity are taken for the same, wherever they lie.
    """

    command: tuple[str, ...]
    identity: str

    @property
    def summary(self) -> str:
        """How it is started and the first line of the identity."""
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
