"""A finished shared library is loaded and becomes the op: `torch.ops.<namespace>`, or a Python module of its name."""

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable, first_line

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
