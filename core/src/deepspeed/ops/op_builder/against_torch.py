"""What a build takes from the torch of this process: identity, headers, libraries, and the flags that go with them."""

import dataclasses
import importlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.spec import BuildSpec


def with_torch(spec: BuildSpec, system_include_paths: Sequence[Path]) -> BuildSpec:
    """`spec` for the torch of this process: its identity, headers, libraries, and the flags that go with them."""
    torch = torch_module()
    root = Path(torch.__file__).absolute().parent
    abi = int(torch.compiled_with_cxx11_abi())
    headers = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    libraries = ["-Wl,--as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    flags: list[str] = []
    stable = spec.op_namespace is not None and spec.includes.stable_abi
    named = any("TORCH_TARGET_VERSION" in flag for flag in spec.compile_flags)
    if stable and spec.min_torch is not None and not named:  # torch's headers then offer what it has
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
    vars(made)["includes"] = spec.includes  # of the same sources: they are read once
    return made


def torch_module() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise OpUnavailable(f"ops are built for a torch, and none can be imported: {error}") from error


def torch_version() -> Version:
    """torch's version without what follows the `+`."""
    return Version(Version(str(torch_module().__version__)).public)
