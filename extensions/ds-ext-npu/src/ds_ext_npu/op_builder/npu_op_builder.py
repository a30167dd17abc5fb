"""NPUOpBuilder: the base of builders whose C++ calls CANN's operators (`aclnn...`), in this package or in another.

CANN is where `ASCEND_HOME_PATH` says, else `ASCEND_TOOLKIT_HOME`, as its `set_env.sh` sets them. The headers of torch
and torch_npu give a tensor's memory and the current stream; `libopapi` has the operators.
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
    """One library of C++ that is linked with CANN and torch_npu, compiled by the machine's C++ compiler.

    A subclass says `BUILD_VAR`, `NAME`, `absolute_name` and `sources`, these by `ascend_kernel_path` or by the pair
    that `make_kernel_path` gives for its own package. Kernels in Ascend C need the vendor's compiler: override
    `compile_command` for them.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def include_paths(self) -> list[str]:
        """CANN's headers and torch_npu's, which has a copy of ACL's own."""
        npu = torch_npu_folder()
        return [str(path) for path in (cann_home() / "include", npu / "include", npu / "include/third_party/acl/inc")]

    def extra_ldflags(self) -> list[str]:
        folders = [str(cann_home() / "lib64"), str(torch_npu_folder() / "lib")]
        return [*(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)]

    def libraries_args(self) -> list[str]:
        return ["opapi", "ascendcl", "torch_npu"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether CANN and torch_npu are there to compile against, besides a compiler."""
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
    """The folder of CANN, with `include` and `lib64` in it.

    Raises:
        OpUnavailable: no variable names it, or what it names has no headers.
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
    """Where `torch_npu` is installed, found without importing it.

    Raises:
        OpUnavailable: it is not.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise OpUnavailable("torch_npu is not installed; pip install torch-npu in the version of your torch")
    return Path(spec.origin).parent
