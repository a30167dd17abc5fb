"""Fake implementations of the documented operators: they check the devices and return empty tensors of the right shape.

Operators need them on the meta device and in `torch.compile`, which traces with fake tensors.

`register_fakes` of an extension's builders calls this module once, after the library is loaded. A documented operator
has the same signature on every device (docs/reference/ops.md), so all devices share its fake. May import only torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ON_HOST = "steps"  # step counts of an optimizer: on the host, so that a step reads them without waiting for the device


def register_fakes(namespace: str, *names: str, **own: Callable[..., Any]) -> None:
    """Register fakes for operators of a loaded library.

    Like the kernels, all fakes refuse tensors on another device than the first tensor.

    Args:
        namespace: the namespace of the library's operators, for example `"ds_xyz"`.
        names: names of documented operators.
        own: name -> fake of operators that only this library has; a fake gets the operator's arguments.

    Raises:
        KeyError: one of `names` is not a documented operator.
    """
    for name, fake in {**{name: _FAKES[name] for name in names}, **own}.items():
        torch.library.register_fake(f"{namespace}::{name}", _checked(namespace, name, fake))


def _checked(namespace: str, name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **numbers: Any) -> Any:
        schema = getattr(getattr(torch.ops, namespace), name).default._schema
        given = zip([argument.name for argument in schema.arguments], arguments, strict=False)
        tensors = [named for label, value in given for named in _tensors(label, value)]
        for label, tensor in tensors[1:]:
            first, model = tensors[0]
            is_count = label.startswith(f"{_ON_HOST}[") and model.device.type != "meta"
            wanted = torch.device("cpu") if is_count else model.device
            if tensor.device != wanted:
                why = "where a step reads it without waiting" if is_count else f"as {first} is"
                raise RuntimeError(
                    f"{namespace}::{name}: {label}: found a tensor on {tensor.device}, but it must be on {wanted} {why}"
                )
        return fake(*arguments, **numbers)

    return run


def _tensors(label: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(label, value)]
    if isinstance(value, Sequence):
        return [(f"{label}[{index}]", one) for index, one in enumerate(value) if isinstance(one, Tensor)]
    return []


def _nothing(*lists: Sequence[Tensor] | Tensor, **numbers: Any) -> None:
    """Return None, as in-place operators do."""


def like_first(x: Tensor, *others: Any) -> Tensor:
    """Return a contiguous tensor with the shape and dtype of x."""
    return x.new_empty(x.shape)


def two_like_first(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Return two contiguous tensors with the shape and dtype of x."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


def quantized(x: Tensor, num_groups: int, num_bits: int, symmetric: bool, *others: Any) -> tuple[Tensor, Tensor]:
    """Return int8 [groups, bytes per group] and fp32 [groups, 1] (scales) or [groups, 2] (scales and minima)."""
    group_bytes = (x.numel() // num_groups * num_bits + 7) // 8
    q = x.new_empty((num_groups, group_bytes), dtype=torch.int8)
    return q, x.new_empty((num_groups, 1 if symmetric else 2), dtype=torch.float32)


def _dequantized(q: Tensor, params: Tensor, group_size: int, *numbers: Any) -> Tensor:
    return q.new_empty((q.shape[-2], group_size), dtype=numbers[-1])


def linear_like(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """Return [..., out] for x [..., in] and a weight, or packed data, with `out` rows."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def grouped_linear_like(
    x: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, counts: Sequence[int], *_: int
) -> Tensor:
    """Return [rows of x, out] for packed weights with `out` rows each."""
    return x.new_empty((x.shape[0], data.shape[0] // len(counts)))


_FAKES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("adam_step_", "adagrad_step_", "lion_step_", "lamb_step_"), _nothing),
    **dict.fromkeys(("layer_norm", "rms_norm", "gelu", "bias_gelu", "rotary"), like_first),
    **dict.fromkeys(("gated_activation", "decode_attention", "decoder_layer"), like_first),
    **dict.fromkeys(("linear", "packed_linear"), linear_like),
    "packed_grouped_linear": grouped_linear_like,
    **dict.fromkeys(("layer_norm_residual", "rms_norm_residual"), two_like_first),
    "quantize_groups": quantized,
    "fake_quantize_groups": like_first,
    **dict.fromkeys(("dequantize_groups", "dequantize_reduce"), _dequantized),
}
