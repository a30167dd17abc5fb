"""What to do about inputs whose dtype is not the model's: torch's own error does not say who chose the model's."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepspeed.config.precision import dtype_name


def add_dtype_hint(
    error: Exception, configured: torch.dtype | None, params: Iterable[Tensor], args: Any, kwargs: Any
) -> None:
    """Append a hint to the message of `error` if a forward failed over the dtype of its floating inputs.

    Called by the engine with what the module's forward raised; the error keeps its type and traceback.

    Args:
        configured: the dtype that the configuration gave the parameters; None: their own.
        params: the module's parameters.
        args, kwargs: what the forward was called with.
    """
    dtype = configured or _dtype_of(params)
    if dtype is None or "type" not in str(error):
        return
    floating = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    others = sorted({dtype_name(leaf.dtype) for leaf in floating if leaf.dtype != dtype})
    if not others:
        return
    hint = (
        f"{_origin(configured, dtype)}, and this forward got inputs of {', '.join(others)}; "
        f"cast them before the call (x.to({dtype}))"
    )
    auto_cast = ', or set "fp16": {"auto_cast": true}' if configured is torch.float16 else ""
    error.args = (f"{error}; {hint}{auto_cast}", *error.args[1:])


def _dtype_of(params: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype of all floating `params`; None if they differ or there are none."""
    dtypes = {param.dtype for param in params if param.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _origin(configured: torch.dtype | None, dtype: torch.dtype) -> str:
    if configured is None:
        return f"the model's parameters are {dtype_name(dtype)}"
    key = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "dtype")
    return f"the config's {key} made the model's parameters {dtype_name(dtype)}"
