"""Find Intel's SYCL compiler and check that its runtime fits torch's. `SYCLOpBuilder` calls this for every build."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.toolchain import Toolchain, identify

from ds_ext_xpu.installed_torch import xpu_of_torch

_NAME = "icpx"
# the default folder of a oneAPI installation
_DEFAULT_FOLDER = Path("/opt/intel/oneapi/compiler/latest/bin")


def find_icpx(environment: Mapping[str, str] = os.environ, default: Path = _DEFAULT_FOLDER) -> Toolchain:
    """Return `icpx` from PATH, else from `CMPLR_ROOT` (set by oneAPI's setvars.sh), else from oneAPI's default folder.

    Raises:
        OpUnavailable: `icpx` is missing or does not run.
    """
    found = shutil.which(_NAME, path=environment.get("PATH", ""))
    if found is not None:
        return identify((found,))
    root = environment.get("CMPLR_ROOT", "")
    for folder in [*([Path(root) / "bin"] if root else []), default]:
        found = shutil.which(_NAME, path=str(folder))
        if found is not None:
            return identify((found,))
    raise OpUnavailable(
        f"no SYCL compiler: {_NAME} is not on PATH, not in CMPLR_ROOT ({root or 'not set'}) and not in {default}; "
        "install Intel oneAPI DPC++ and source its setvars.sh"
    )


def check_fits_torch(compiler: Toolchain) -> None:
    """Check that torch was built with the same year's compiler: a process can load only one year's SYCL runtime.

    Raises:
        OpUnavailable: torch has no XPU, or was built with another year's compiler.
    """
    xpu, torch = xpu_of_torch()
    if xpu is None:
        raise OpUnavailable(torch)
    version = re.search(r"\b(\d{4})\.\d+", compiler.identity)
    if version is not None and version[1] != xpu[:4]:
        raise OpUnavailable(
            f"{compiler.command[0]} is of {version[0]}, and {torch} was built with SYCL of {xpu[:4]}: their runtimes "
            f"do not work in one process; install oneAPI DPC++ {xpu[:4]}"
        )
