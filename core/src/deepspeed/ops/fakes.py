"""The fakes here check the tensors of the documented operators and give results of the right shapes, without data.

Tensors have no data on the meta device and in `torch.compile`, which traces with fake ones.

Called by `register_fakes` of an extension's builders, once, after the library was loaded. The operators that fronts
call have one signature on every device (docs/reference/ops.md), and so have their fakes. May import torch alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ON_HOST = "steps"  # counts of an optimizer's updates, which a step reads without waiting for the device


def register_fakes(namespace: str, *names: str, **own: Callable[..., Any]) -> None:
    """Register fakes for operators of a loaded library.

    All of them refuse tensors that do not lie beside the first, as the kernels do.

    Args:
        namespace: of the library's operators, for example `"ds_xyz"`.
        names: documented operators.
        own: fakes of operators that only this library has, by name; called with what the operator is called with.

    Raises:
        KeyError: one of `names` is not documented.
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
    """Return nothing, as operators that write in place do."""


def like_first(x: Tensor, *others: Any) -> Tensor:
    """A contiguous tensor of x's shape and dtype."""
    return x.new_empty(x.shape)


def two_like_first(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Two of them."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


def quantized(x: Tensor, num_groups: int, num_bits: int, symmetric: bool, *others: Any) -> tuple[Tensor, Tensor]:
    """int8 [groups, bytes of a group], fp32 [groups, 1] (scales) or [groups, 2] (with minima)."""
    group_bytes = (x.numel() // num_groups * num_bits + 7) // 8
    q = x.new_empty((num_groups, group_bytes), dtype=torch.int8)
    return q, x.new_empty((num_groups, 1 if symmetric else 2), dtype=torch.float32)


def _dequantized(q: Tensor, params: Tensor, group_size: int, *numbers: Any) -> Tensor:
    return q.new_empty((q.shape[-2], group_size), dtype=numbers[-1])


def linear_like(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """x's rows, with as many elements as the weight has rows; weight or packed data."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def grouped_linear_like(
    x: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, counts: Sequence[int], *_: int
) -> Tensor:
    """x's rows, with as many elements as one of the packed weights has rows."""
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
