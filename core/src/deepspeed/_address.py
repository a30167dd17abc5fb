"""Addresses as text, "package.module:name", and what is there.

A file of its own, since `_forward` and `_absent`, which use it, would import each other. May import nothing of the
project.
"""

import importlib
from typing import Any


def resolve(address: str) -> Any:
    """The object at "package.module:name", or the module at "package.module"."""
    module_name, _, attribute = address.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module
