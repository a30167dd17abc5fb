"""Intel's oneCCL bindings for torch, with the backend "ccl". From 2.8 on, torch has its own backend "xccl"."""

import importlib
import importlib.metadata
import importlib.util

NAME = "ccl"
_MODULE, _DISTRIBUTION = "oneccl_bindings_for_pytorch", "oneccl-bind-pt"


def is_installed() -> bool:
    """Return whether the bindings are installed, without importing them."""
    return importlib.util.find_spec(_MODULE) is not None


def version() -> str:
    """Return the version of the installed bindings."""
    return importlib.metadata.version(_DISTRIBUTION)


def register() -> None:
    """Import the bindings, which registers the backend with torch."""
    importlib.import_module(_MODULE)
