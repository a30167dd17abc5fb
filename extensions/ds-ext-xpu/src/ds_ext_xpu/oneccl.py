"""Intel's oneCCL bindings for torch, whose backend is called "ccl"; torch has one of its own, "xccl", from 2.8 on."""

import importlib
import importlib.metadata
import importlib.util

NAME = "ccl"
_MODULE, _DISTRIBUTION = "oneccl_bindings_for_pytorch", "oneccl-bind-pt"


def is_installed() -> bool:
    """Looked up, not imported."""
    return importlib.util.find_spec(_MODULE) is not None


def version() -> str:
    """Of the bindings, which are installed."""
    return importlib.metadata.version(_DISTRIBUTION)


def register() -> None:
    """Register the backend with torch, which the bindings do as they are imported."""
    importlib.import_module(_MODULE)
