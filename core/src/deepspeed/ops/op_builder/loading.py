"""Finds prebuilt libraries of a wheel, and loads libraries as `torch.ops.<namespace>` or as a Python module.

<package>/cpu_adam_op.so      for absolute_name() "<package>.cpu_adam_op"
<package>/cpu_adam_op.json    its manifest, which says whether it fits this process; `aot.py` writes both

A vendor's own `setup.py` may build a Python module of this name instead, as with DeepSpeed. Such a module has no
manifest, and is imported without a check.
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
    """Return the path of a prebuilt library with this import name, which may not exist; None without the package."""
    package, _, name = absolute_name.rpartition(".")
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / f"{name}.so" if places else None


def find(absolute_name: str, spec: BuildSpec) -> tuple[Path | None, str]:
    """Return (prebuilt library, ""), or (None, reason); the reason is "" if there is no prebuilt library."""
    library = library_beside_package(absolute_name)
    if library is None or not library.is_file():
        return None, ""
    manifest = Manifest.read(library.with_suffix(".json"))
    if manifest is None:
        return None, f"{library} has no manifest beside it"
    reason = misfit(manifest, spec) or manifest.flaw(library.parent)
    return (None, reason) if reason else (library, "")


def is_there(absolute_name: str) -> bool:
    """Return whether there is a prebuilt library or module of this import name, even if it does not fit."""
    library = library_beside_package(absolute_name)
    return (library is not None and library.is_file()) or module_of_setuptools(absolute_name) is not None


def module_of_setuptools(absolute_name: str) -> str | None:
    """Return the file of a Python module that a vendor's `setup.py` built (by `OpBuilder.builder()`), or None."""
    try:
        spec = importlib.util.find_spec(absolute_name)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return origin if origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES)) else None


def misfit(manifest: Manifest, spec: BuildSpec) -> str | None:
    """Return why a library with this manifest does not fit `spec`; None if it fits.

    A library of the stable ABI fits every torch since its `min_torch`. Any other library fits only the torch version
    that it was built with.
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
    """Return machine and system without the C library: loading fails if the C library is too old."""
    return "-".join(target.split("-")[:2])


#: load key -> op; not by name, because two packages may have an op of the same name
_loaded: dict[str, Any] = {}
_guard = threading.RLock()


def load_once(key: str, load: Callable[[], Any]) -> Any:
    """Return the cached result for `key`. Call `load` only for the first request of `key` in this process."""
    with _guard:
        if key not in _loaded:
            _loaded[key] = load()
        return _loaded[key]


def load_operators(library: Path, namespace: str) -> Any:
    """Load the library, which registers its operators, and return `torch.ops.<namespace>`.

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
    """Load the Python module in `library`, which was built as `name` (`PyInit_<last part>`).

    Raises:
        OpUnavailable: the library cannot be loaded, or is not a Python module.
    """
    import torch  # noqa: F401  torch's libraries must be loaded before a library that is linked against them

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
    """Return the reason in one line: the cause, which names the missing symbol, or torch's message."""
    return first_line(error.__cause__ or error)
