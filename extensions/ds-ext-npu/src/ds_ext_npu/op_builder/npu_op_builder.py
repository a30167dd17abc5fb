"""`NPUOpBuilder`: the base class of builders whose C++ calls CANN's operators (`aclnn...`), in any package.

`ASCEND_HOME_PATH`, or else `ASCEND_TOOLKIT_HOME`, names the folder of CANN; CANN's `set_env.sh` sets them. The headers
of torch and torch_npu provide a tensor's memory and the current stream. `libopapi` contains the operators.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

ascend_kernel_path, ascend_kernel_include = make_kernel_path("ds_ext_npu", "csrc")

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


class NPUOpBuilder(OpBuilder):
    """Builds a C++ library with the machine's C++ compiler, and links it with CANN and torch_npu.

    A subclass defines `BUILD_VAR`, `NAME`, `absolute_name` and `sources`. Paths of sources come from
    `ascend_kernel_path`, or from `make_kernel_path` for another package. Kernels in Ascend C need the vendor's
    compiler: override `compile_command`.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def include_paths(self) -> list[str]:
        """Return the header folders of CANN and torch_npu, with torch_npu's copy of the ACL headers."""
        npu = torch_npu_folder()
        return [str(path) for path in (cann_home() / "include", npu / "include", npu / "include/third_party/acl/inc")]

    def extra_ldflags(self) -> list[str]:
        folders = [str(cann_home() / "lib64"), str(torch_npu_folder() / "lib")]
        return [*(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)]

    def libraries_args(self) -> list[str]:
        return ["opapi", "ascendcl", "torch_npu"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether CANN, torch_npu and a compiler are installed."""
        try:
            cann_home()
            torch_npu_folder()
        except OpUnavailable as error:
            self.reason = str(error)
            if verbose:
                self.warning(self.reason)
            return False
        return super().is_compatible(verbose)


def cann_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of CANN, which contains `include` and `lib64`.

    Raises:
        OpUnavailable: no variable is set, or the named folder has no headers.
    """
    for variable in _HOMES:
        named = environment.get(variable, "")
        if named:
            home = Path(named)
            if not (home / "include").is_dir():
                raise OpUnavailable(f"{variable}={named} has no folder include; is the CANN toolkit installed there?")
            return home
    raise OpUnavailable(f"CANN is not known here: neither {' nor '.join(_HOMES)} is set; source CANN's set_env.sh")


def torch_npu_folder() -> Path:
    """Return the folder of the installed `torch_npu` without importing it.

    Raises:
        OpUnavailable: `torch_npu` is not installed.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise OpUnavailable("torch_npu is not installed; pip install torch-npu in the version of your torch")
    return Path(spec.origin).parent
