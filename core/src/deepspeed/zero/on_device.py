"""`OnDevice`: modules constructed on another device, such as "meta", and in another dtype."""

import contextlib
from typing import Any

import torch

from deepspeed._absent_members import absent_members


@absent_members("utils.init_on_device:OnDevice")
class OnDevice(contextlib.AbstractContextManager["OnDevice"]):
    """Context in which torch constructs tensors on `device`, and floating ones in `dtype` by default.

    Used to construct a model without allocating its weights: `with OnDevice(dtype=torch.bfloat16, device="meta")`.

    Args:
        dtype: floating dtype of tensors whose constructor names none.
        device: a torch device, or its name.
        enabled: False turns the context off.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()
