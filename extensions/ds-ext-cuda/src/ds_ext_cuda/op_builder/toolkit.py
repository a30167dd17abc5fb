"""`find_toolkit` finds the CUDA toolkit of this machine: the path of nvcc, its version, and the GPUs it supports.

The toolkit is in `$CUDA_HOME`, else `$CUDA_PATH`, else nvcc is on PATH, else in /usr/local/cuda. nvcc reports its own
folders, since the program may be a link or a script in another folder.
"""

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.toolchain import identify

_DEFAULT_HOME = "/usr/local/cuda"
# torch's headers need C++20
_MIN_VERSION = (12, 0)
# folders of `_RUNTIME` below the toolkit's home, if nvcc does not report one
_LIBRARY_FOLDERS = ("lib64", "lib", "lib/*-linux-gnu")
_RUNTIME = "libcudart_static.a"


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit.

    Attributes:
        nvcc: the command that starts nvcc.
        identity: the output of `nvcc --version`.
        version: for example `(13, 0)`.
        codes: the GPUs that nvcc compiles for, as numbers such as 80, 90, 100.
        libraries: the folder of the static CUDA runtime.
    """

    nvcc: str
    identity: str
    version: tuple[int, int]
    codes: frozenset[int]
    libraries: Path

    @property
    def version_name(self) -> str:
        """The version as text, for example `13.0`."""
        return ".".join(map(str, self.version))


def find_toolkit() -> Toolkit:
    """Return the toolkit. Called for every build; nvcc is queried once per process.

    Raises:
        OpUnavailable: there is no toolkit; `$CUDA_HOME` or `$CUDA_PATH` has no nvcc (no other toolkit is used then);
            the toolkit is too old, or has no static runtime.
    """
    return _toolkit(_find_nvcc())


def _find_nvcc() -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            stated = Path(home, "bin", "nvcc")
            if not os.access(stated, os.X_OK):
                raise OpUnavailable(f"no CUDA toolkit: {variable} is {home!r}, and there is no program {stated}")
            return str(stated)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{_DEFAULT_HOME}/bin")
    if nvcc is None:
        raise OpUnavailable(
            f"no CUDA toolkit: nvcc is neither on PATH nor in {_DEFAULT_HOME}/bin, and CUDA_HOME is not set"
        )
    return nvcc


@functools.lru_cache(maxsize=8)
def _toolkit(nvcc: str) -> Toolkit:
    identity = identify((nvcc,)).identity
    release = re.search(r"release (\d+)\.(\d+)", identity)
    if release is None:
        raise OpUnavailable(f"{nvcc} --version names no release: {identity.splitlines()[:1]}")
    version = (int(release[1]), int(release[2]))
    if version < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise OpUnavailable(f"{nvcc} is of CUDA {release[1]}.{release[2]}, and torch's headers need {wanted} or newer")
    codes = frozenset(int(number) for number in re.findall(r"sm_(\d+)", _ask(nvcc, "--list-gpu-code")))
    return Toolkit(nvcc, identity, version, codes, _library_folder(nvcc))


def _library_folder(nvcc: str) -> Path:
    """Find the folder of the static runtime: one that nvcc passes to the linker, or one of the toolkit."""
    told = _ask(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    home = Path(os.path.realpath(top[1] if top else Path(nvcc).parent.parent))
    folders = [Path(os.path.realpath(path)) for path in re.findall(r'"-L([^"\n]+)"', told)]
    folders += [folder for pattern in _LIBRARY_FOLDERS for folder in sorted(home.glob(pattern))]
    for folder in folders:
        if (folder / _RUNTIME).is_file():
            return folder
    raise OpUnavailable(f"the CUDA toolkit in {home} has no {_RUNTIME}; install its runtime development package")


def _ask(nvcc: str, *arguments: str) -> str:
    """Return the output of nvcc. Includes stderr, where `--dryrun` prints."""
    try:
        done = subprocess.run(
            [nvcc, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OpUnavailable(f"{nvcc} does not run: {error}") from error
    if done.returncode != 0:
        said = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise OpUnavailable(f"{nvcc} {' '.join(arguments)} failed: {said}")
    return done.stdout
