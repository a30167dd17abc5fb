"""What `engine.backward` is given: tensors and the gradients to begin with, checked before autograd sees them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deepspeed.errors import counted


def backward_roots(
    loss: Tensor | Sequence[Tensor], gradient: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors at which a backward begins, and the gradient of each; None: it is a scalar, whose gradient is 1.

    Args:
        loss: a tensor or several; each requires a gradient.
        gradient: of `loss`, and like it one or several, of the same shapes. A tensor of one element needs none.

    Raises:
        ValueError: says what was found.
    """
    tensors = [loss] if isinstance(loss, Tensor) or not isinstance(loss, Sequence) else list(loss)
    gradients = list(gradient) if isinstance(gradient, Sequence) else [gradient] * len(tensors)
    if not tensors or len(gradients) != len(tensors) or (isinstance(gradient, Tensor) and len(tensors) > 1):
        raise ValueError(
            f"backward: found {counted(len(tensors), 'tensor')} and {counted(_count(gradient), 'gradient')}; pass one "
            "or more tensors and a list with a gradient (or None) for each"
        )
    for tensor, grad in zip(tensors, gradients, strict=True):
        _check(tensor, grad)
    return tensors, gradients


def _check(tensor: Any, grad: Any) -> None:
    if not isinstance(tensor, Tensor) or not tensor.requires_grad or (grad is None and tensor.numel() != 1):
        raise ValueError(
            "backward: asked for the gradients of one loss, found "
            + (f"a tensor of shape {tuple(tensor.shape)}, requires_grad={tensor.requires_grad}"
               if isinstance(tensor, Tensor) else type(tensor).__name__)
            + "; pass a scalar loss that was computed from the engine's output, or gradient= for another tensor"
        )  # fmt: skip
    if grad is not None and (not isinstance(grad, Tensor) or grad.shape != tensor.shape):
        found = f"one of shape {tuple(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
        raise ValueError(f"backward: wanted a gradient of its tensor's shape {tuple(tensor.shape)}, found {found}")


def _count(gradient: Any) -> int:
    return len(gradient) if isinstance(gradient, Sequence) else int(gradient is not None)
