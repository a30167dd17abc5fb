"""What the operators give when tensors have no memory (meta, and torch.compile's fake ones): checks, shapes and dtypes.

Called by `register_fakes` of the builders, once, after the library was loaded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def register_adam_fake() -> None:
    """Of `adam_step_`, which writes in place and returns nothing."""
    _register(adam_step_=_adam_step)


def register_quantizer_fakes() -> None:
    """Of the quantizer's operators."""
    _register(
        quantize_groups=_quantize,
        fake_quantize_groups=_like_first,
        dequantize_groups=_dequantize,
        dequantize_reduce=_dequantize,
    )


def register_inference_fakes() -> None:
    """Of the transformer's building blocks."""
    _register(
        layer_norm=_like_first,
        layer_norm_residual=_two_like_first,
        rms_norm=_like_first,
        rms_norm_residual=_two_like_first,
        gelu=_like_first,
        bias_gelu=_like_first,
        rotary=_like_first,
    )


def _register(**fakes: Callable[..., Any]) -> None:
    for name, fake in fakes.items():
        torch.library.register_fake(f"ds_xpu::{name}", _checked(name, fake))


def _checked(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, once all tensors were found on the device of the first; `steps` of an optimizer lies on the host."""

    def run(*arguments: Any, **numbers: Any) -> Any:
        named = getattr(torch.ops.ds_xpu, name).default._schema.arguments
        given = [(one.name, value) for one, value in zip(named, arguments, strict=False) if one.name != "steps"]
        tensors = [(label, tensor) for argument, value in given for label, tensor in _tensors(argument, value)]
        for label, tensor in tensors[1:]:
            first, model = tensors[0]
            if tensor.device != model.device:
                raise RuntimeError(
                    f"ds_xpu::{name}: {label}: found a tensor on {tensor.device}, but it must be on {model.device} as "
                    f"{first} is"
                )
        return fake(*arguments, **numbers)

    return run


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Sequence):
        return [(f"{name}[{index}]", one) for index, one in enumerate(value) if isinstance(one, Tensor)]
    return []


def _adam_step(*lists: Sequence[Tensor], **numbers: Any) -> None:
    return None


def _like_first(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _two_like_first(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _quantize(x: Tensor, num_groups: int, num_bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    group_bytes = (x.numel() // num_groups * num_bits + 7) // 8
    q = x.new_empty((num_groups, group_bytes), dtype=torch.int8)
    return q, x.new_empty((num_groups, 1 if symmetric else 2), dtype=torch.float32)


def _dequantize(q: Tensor, params: Tensor, group_size: int, *numbers: Any) -> Tensor:
    return q.new_empty((q.shape[-2], group_size), dtype=numbers[-1])
