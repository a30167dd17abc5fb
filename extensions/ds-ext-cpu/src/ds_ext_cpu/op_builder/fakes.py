"""What the operators do with tensors that have no data (meta, and torch.compile's fake ones): the checks alone.

Called by `register_fakes` of the builders of optimizer ops, whose operators write in place and return nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def register_step_fake(name: str) -> None:
    """Register the meta implementation of `ds_cpu::<name>`, an operator over lists of tensors, the parameters first."""

    def fake(params: Sequence[Tensor], *lists: Sequence[Tensor] | Tensor, **numbers: Any) -> None:
        _check_one_device(name, params, lists)

    torch.library.register_fake(f"ds_cpu::{name}", fake)


def _check_one_device(name: str, params: Sequence[Tensor], lists: Sequence[Sequence[Tensor] | Tensor]) -> None:
    schema = getattr(torch.ops.ds_cpu, name).default._schema
    for argument, tensors in zip(schema.arguments[1:], lists, strict=False):
        for index, tensor in enumerate([tensors] if isinstance(tensors, Tensor) else tensors):
            if params and tensor.device != params[0].device:
                raise RuntimeError(
                    f"ds_cpu::{name}: {argument.name}[{index}]: found a tensor on {tensor.device}, but it must be on "
                    f"{params[0].device} as params[0]"
                )
