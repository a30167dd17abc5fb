"""The CUDA toolkit of this machine: where nvcc is, which version, for which GPUs it compiles.

`$CUDA_HOME`, else `$CUDA_PATH`, else nvcc on PATH, else /usr/local/cuda. What belongs to an nvcc is asked from nvcc
itself, as it may be a link or a script that lies elsewhere.
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
# torch's headers want C++20
_MIN_VERSION = (12, 0)
# where it lies when nvcc does not tell, below the toolkit's home
_LIBRARY_FOLDERS = ("lib64", "lib", "lib/*-linux-gnu")
_RUNTIME = "libcudart_static.a"


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit.

    Attributes:
        nvcc: how it is started.
        identity: what `nvcc --version` says.
        version: for example `(13, 0)`.
        codes: the GPUs that it makes code for, by their number: 80, 90, 100.
        libraries: the folder of the static CUDA runtime.
    """

    nvcc: str
    identity: str
    version: tuple[int, int]
    codes: frozenset[int]
    libraries: Path

    @property
    def version_name(self) -> str:
        """For example `13.0`."""
        return ".".join(map(str, self.version))


def find_toolkit() -> Toolkit:
    """The toolkit. Called for every build; nvcc is asked once per process.

    Raises:
        OpUnavailable: there is none; `$CUDA_HOME` names one without nvcc (another is not taken in its place); it is too
            old; or it has no static runtime.
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
    """Where the static runtime of this nvcc lies: in a folder that it gives the linker, or near it."""
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
    """What nvcc prints; `--dryrun` prints to stderr."""
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
