"""`torch.compile` for code that must also run without it. This is `deepspeed.runtime.compiler`."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from packaging.version import Version

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compile_supported() -> bool:
    """Whether this torch has `torch.compile`: always, from the oldest torch that this package supports."""
    return hasattr(torch, "compiler") and hasattr(torch.nn.Module, "compile")


def is_compiling() -> bool:
    """Whether the calling code is being traced by `torch.compile` now."""
    return bool(torch.compiler.is_compiling())


def disable(func: Function) -> Function:
    """Decorator: `torch.compile` leaves the function out of its graphs and calls it as it is."""
    disabled: Function = torch.compiler.disable(func)
    return disabled


def enable(min_version: str | None = None) -> Callable[[Function], Function]:
    """Decorator factory: compile the function, or leave it as it is with a torch older than `min_version`.

    Args:
        min_version: oldest torch to compile with, such as "2.6.0"; None: any.
    """
    if min_version is not None and Version(torch.__version__.split("+", maxsplit=1)[0]) < Version(min_version):
        return dummy_decorator
    return _compiled


def _compiled(func: Function) -> Function:
    return cast(Function, torch.compile(func))


def dummy_decorator(func: Function) -> Function:
    """Return the function as it is."""
    return func
