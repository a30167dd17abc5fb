"""What the optimizer operators do with tensors that have no data (meta, and torch.compile's fake ones): checks alone.

Called by `register_fakes` of their builders; the operators write in place and return nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ON_HOST = "steps"  # counts of updates, which a step reads without waiting for the device


def register_step_fake(name: str) -> None:
    """Register the meta implementation of `ds_cuda::<name>`, an operator over lists of tensors, the parameters first.

    A compiled graph sees that parameters, states and copies change, and nothing else of the call.
    """

    def fake(params: Sequence[Tensor], *lists: Sequence[Tensor] | Tensor, **numbers: Any) -> None:
        _check_devices(name, params, lists)

    torch.library.register_fake(f"ds_cuda::{name}", fake)


def _check_devices(name: str, params: Sequence[Tensor], lists: Sequence[Sequence[Tensor] | Tensor]) -> None:
    schema = getattr(torch.ops.ds_cuda, name).default._schema
    for argument, tensors in zip(schema.arguments[1:], lists, strict=False):
        for index, tensor in enumerate([tensors] if isinstance(tensors, Tensor) else tensors):
            wanted = params[0].device if params else tensor.device
            if argument.name == _ON_HOST and wanted.type != "meta":
                wanted = torch.device("cpu")
            if tensor.device != wanted:
                raise RuntimeError(
                    f"ds_cuda::{name}: {argument.name}[{index}]: found a tensor on {tensor.device}, but it must be on "
                    f"{wanted}"
                )
