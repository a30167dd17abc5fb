"""`adam_step_` with the vendor's fused operator `torch_npu.npu_apply_adam_w`: one call per tensor.

The operator gets P1 = beta1^(t-1) and P2 = beta2^(t-1) as arguments, and computes in the tensors' dtype:

    m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
    p <- p - lr wd p - lr (m / (1 - P1 beta1)) / (sqrt(v / (1 - P2 beta2)) + eps)

Rounding beta to fp32 gives b. For beta = 0.999, 1 - b has a relative error of 5e-5, and so has 1 - P2 beta2 in each
step. The moments use b. To make the step exact anyway, the host computes the correction for b in double precision:

    c = 1 - b^t                         (1 - b^t) / (1 - beta^t) without bias correction
    lr' = lr sqrt(c2) / c1              eps' = eps sqrt(c2)              wd' = wd lr / lr'

The device corrects nothing (P1 = P2 = 0), because m / c1 / (sqrt(v / c2) + eps) = sqrt(c2) / c1 m / (sqrt(v) + eps').

L2 (`adam_w_mode=False`) adds wd p to the gradient first. Core's reference: `deepspeed.ops.adam.adam`.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: float,
) -> None:
    """Update every parameter in place. Core's Adam optimizers call it with lists of equal length.

    Args:
        params, grads: contiguous fp32, bf16 or fp16 tensors on the device; the step is computed in fp32.
        exp_avgs, exp_avg_sqs: fp32.
        steps: 0-D fp32 tensors on the host; each is incremented by one.
        copies: empty, or tensors that receive the new parameters, converted to their own dtype.
        grad_scale: a factor for the gradients.
    """
    for index, param in enumerate(params):
        steps[index].add_(1)
        if param.numel() == 0:
            continue
        master = _flat(param).float()  # a view of the parameter if it is fp32
        grad = _gradient(grads[index], grad_scale, maximize)
        if weight_decay and not adam_w_mode:
            grad = grad.add(master, alpha=weight_decay)
        corrections = tuple(_correction(beta, float(steps[index]), bias_correction) for beta in (beta1, beta2))
        moments = _flat(exp_avgs[index]), _flat(exp_avg_sqs[index])
        _apply(master, grad, moments, lr, weight_decay if adam_w_mode else 0.0, (beta1, beta2), eps, corrections)
        if param.dtype != torch.float32:
            _flat(param).copy_(master)
        if copies:
            _flat(copies[index]).copy_(master)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)  # the vendor takes 1 to 8 dimensions


def _correction(beta: float, t: float, bias_correction: bool) -> float:
    (as_fp32,) = struct.unpack("f", struct.pack("f", beta))
    return float(1 - as_fp32**t) / (1.0 if bias_correction else 1 - beta**t)


def _gradient(grad: Tensor, scale: float, maximize: bool) -> Tensor:
    factor = -scale if maximize else scale
    wide = _flat(grad).float()
    return wide if factor == 1.0 else wide * factor


def _apply(
    master: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[float, ...],
) -> None:
    import torch_npu

    (beta1, beta2), (c1, c2) = betas, corrections
    step_size = lr * math.sqrt(c2) / c1
    torch_npu.npu_apply_adam_w(
        0.0,  # beta1_power, beta2_power: no correction on the device
        0.0,
        step_size,
        decay * lr / step_size if step_size else 0.0,
        beta1,
        beta2,
        eps * math.sqrt(c2),
        grad,
        None,  # max_grad_norm
        False,  # amsgrad
        False,  # maximize: the gradient is negated already
        out=(master, *moments),
    )
