"""A finished library, found in a wheel or just built, is loaded: it becomes `torch.ops.<namespace>` or a Python module.

<package>/cpu_adam_op.so      for absolute_name() "<package>.cpu_adam_op"
<package>/cpu_adam_op.json    its manifest, which says whether it fits this process; `aot.py` makes both

A vendor's own `setup.py` may have left a Python module under that name instead, as for DeepSpeed; it has no manifest,
and is taken as it is.
"""

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable, first_line
from deepspeed.ops.op_builder.cache import Manifest
from deepspeed.ops.op_builder.spec import BuildSpec, this_cpu_digest


def library_beside_package(absolute_name: str) -> Path | None:
    """Return where a prebuilt library of that import name would lie; None without such a package."""
    package, _, name = absolute_name.rpartition(".")
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / f"{name}.so" if places else None


def find(absolute_name: str, spec: BuildSpec) -> tuple[Path | None, str]:
    """The prebuilt library that fits, or None and why not (empty when there simply is none)."""
    library = library_beside_package(absolute_name)
    if library is None or not library.is_file():
        return None, ""
    manifest = Manifest.read(library.with_suffix(".json"))
    if manifest is None:
        return None, f"{library} has no manifest beside it"
    reason = misfit(manifest, spec) or manifest.flaw(library.parent)
    return (None, reason) if reason else (library, "")


def is_there(absolute_name: str) -> bool:
    """Whether a library or module of that import name was built beforehand, whether it fits this process or not."""
    library = library_beside_package(absolute_name)
    return (library is not None and library.is_file()) or module_of_setuptools(absolute_name) is not None


def module_of_setuptools(absolute_name: str) -> str | None:
    """The file of a Python module of that import name that a vendor's `setup.py` built (by `OpBuilder.builder()`)."""
    try:
        spec = importlib.util.find_spec(absolute_name)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return origin if origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES)) else None


def misfit(manifest: Manifest, spec: BuildSpec) -> str | None:
    """Return why a library with this manifest is not for `spec`; None when it is.

    A library of the stable ABI fits every torch from its `min_torch` on; any other library fits the very torch that it
    was built with.
    """
    if manifest.source_digest != spec.source_digest:
        return f"the prebuilt {manifest.name} was built from other sources or with other flags"
    if _machine(manifest.target) != _machine(spec.target):
        return f"the prebuilt {manifest.name} is for {manifest.target}, and this is {spec.target}"
    if manifest.cpu not in ("", this_cpu_digest()):
        return f"the prebuilt {manifest.name} is for the CPU of the machine that built it (-march=native)"
    if manifest.python != spec.python:
        return f"the prebuilt {manifest.name} is for {manifest.python}, and this is {spec.python}"
    if manifest.torch != spec.torch and not (manifest.stable_abi and manifest.min_torch):
        return f"the prebuilt {manifest.name} is for torch {manifest.torch}, and this is {spec.torch}"
    return None


def _machine(target: str) -> str:
    """Machine and system; a C library that is too old shows when the library is loaded."""
    return "-".join(target.split("-")[:2])


#: by content, never by name: two packages may have an op of one name
_loaded: dict[str, Any] = {}
_guard = threading.RLock()


def load_once(key: str, load: Callable[[], Any]) -> Any:
    """Return the result of `load`, which is called only the first time that `key` is asked for in this process."""
    with _guard:
        if key not in _loaded:
            _loaded[key] = load()
        return _loaded[key]


def load_operators(library: Path, namespace: str) -> Any:
    """`torch.ops.<namespace>` after the library has registered its operators.

    Raises:
        OpUnavailable: the library cannot be loaded: a symbol is missing, or its operators are already registered.
    """
    import torch

    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        raise OpUnavailable(f"{library} cannot be loaded: {_reason(error)}") from error
    return getattr(torch.ops, namespace)


def load_module(library: Path, name: str) -> Any:
    """The Python module in `library`, built as `name` (`PyInit_<last part>`).

    Raises:
        OpUnavailable: it cannot be loaded, or is no Python module.
    """
    import torch  # noqa: F401  its libraries must be in the process before one that is linked against them

    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        hint = "; a library of torch operators says so by op_namespace" if "PyInit_" in str(error) else ""
        raise OpUnavailable(f"{library} cannot be loaded: {_reason(error)}{hint}") from error
    sys.modules[name] = module  # so that objects of its classes can be pickled
    return module


def _reason(error: BaseException) -> str:
    """Return the reason in one line: the cause, which names the missing symbol, or what torch says of the library."""
    return first_line(error.__cause__ or error)
