"""What to do about inputs whose dtype is not the model's: torch's own error does not say who chose the model's."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def add_dtype_hint(error: Exception, model_dtype: torch.dtype | None, args: Any, kwargs: Any) -> None:
    """Append a hint to the message of `error` if a forward failed over the dtype of its floating inputs.

    Called by the engine with what the module's forward raised; the error keeps its type and traceback.

    Args:
        model_dtype: the dtype that the configuration gave the parameters; None: their own.
        args, kwargs: what the forward was called with.
    """
    if model_dtype is None or "type" not in str(error):
        return
    floating = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    others = sorted({_name(leaf.dtype) for leaf in floating if leaf.dtype != model_dtype})
    if not others:
        return
    key = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(model_dtype, "dtype")
    auto_cast = ', or set "fp16": {"auto_cast": true}' if key == "fp16" else ""
    hint = (
        f"the config's {key} made the model's parameters {_name(model_dtype)}, and this forward got inputs of "
        f"{', '.join(others)}; cast them before the call (x.to({model_dtype})){auto_cast}"
    )
    error.args = (f"{error}; {hint}", *error.args[1:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
