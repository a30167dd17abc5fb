"""Resolve addresses of the form "package.module:name".

This is a separate file because its users `_forward` and `_absent` would otherwise import each other. May import nothing
of the project.
"""

import importlib
from typing import Any


def resolve(address: str) -> Any:
    """Return the object at "package.module:name", or the module at "package.module"."""
    module_name, _, attribute = address.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module
