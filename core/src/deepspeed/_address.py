"""Addresses as text, "package.module:name", and what is there. May import nothing of the project."""

import importlib
from typing import Any


def resolve(address: str) -> Any:
    """The object at "package.module:name", or the module at "package.module"."""
    module_name, _, attribute = address.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module
