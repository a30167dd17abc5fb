"""The vendor's operators by their documented formulas and limits, in the tensors' dtype or fp32.

What the vendor's pages do not allow raises here; `calls` counts, so that a test can tell who computed.
"""

import collections
import json
from pathlib import Path

import torch
import torch.nn.functional as F

API = json.loads((Path(__file__).parents[2] / "vendor_api.json").read_text())
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

calls = collections.Counter()
_kept = []  # torch forgets the operators of a Library that nobody holds


def define():
    """Register every operator of the file; their names."""
    library = torch.library.Library("npu", "DEF")
    for overload, schema in API["operators"].items():
        library.define(schema)
        library.impl(overload, _counted(overload.split(".")[0], globals()[overload.replace(".", "_")]), "PrivateUse1")
    _kept.append(library)
    return {overload.split(".")[0] for overload in API["operators"]}


def _counted(name, compute):
    def run(*args, **kwargs):
        calls[name] += 1
        return compute(*args, **kwargs)

    return run


def _same(*tensors, shapes=True):
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.dtype not in FLOATS or (shapes and tensor.shape != first.shape):
            raise RuntimeError(f"ERR: one dtype is wanted, and one shape: {[(t.dtype, t.shape) for t in tensors]}")
    if not 1 <= first.dim() <= 8 or first.numel() == 0:
        raise RuntimeError(f"ERR: 1 to 8 dimensions are wanted, and elements: {first.shape}")


def npu_apply_adam_w(
    beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize
):
    raise RuntimeError("npu_apply_adam_w is not implemented for Tensor")


def npu_apply_adam_w_out(
    beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize, *, out
):
    var, m, v = out
    _same(var, m, v, grad)
    assert max_grad_norm is None
    assert not amsgrad
    numbers = (beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon)
    p1, p2, lr, weight_decay, b1, b2, epsilon = (torch.tensor(number, dtype=var.dtype) for number in numbers)
    grad = -grad if maximize else grad
    m.copy_(m * b1 + (1 - b1) * grad)
    v.copy_(v * b2 + (1 - b2) * grad * grad)
    denominator = (v / (1 - p2 * b2)).sqrt() + epsilon
    var.copy_(var - lr * (m / (1 - p1 * b1)) / denominator - lr * weight_decay * var)
    return var, m, v


def npu_layer_norm_eval(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    _same(input, *(one for one in (weight, bias) if one is not None), shapes=False)
    wide = [None if one is None else one.float() for one in (weight, bias)]
    return F.layer_norm(input.float(), normalized_shape, *wide, eps).to(input.dtype)


def npu_rms_norm(input, gamma, epsilon=1e-6):
    _same(input, gamma, shapes=False)
    if input.dim() < 2:
        raise RuntimeError(f"ERR: 2 dimensions are wanted: {input.shape}")
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    _same(x1, x2)
    total = x1 + x2
    normed, rstd = npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def npu_gelu(input, *, approximate="none"):
    _same(input)
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)


def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    _same(input, r1, r2, shapes=False)
    _check_rotary(input, r1, r2, rotary_mode)
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return r1 * input + r2 * turned


def _check_rotary(x, r1, r2, mode):
    batch, size = x.shape[0], x.shape[-1]
    heads_dim = 2 if r1.shape[2] == 1 and r1.shape[1] == x.shape[1] else 1  # BSND or BNSD, as the tables tell
    heads, positions = x.shape[heads_dim], x.shape[3 - heads_dim]
    tables = [(1, positions), (batch, positions)] if mode == "half" else [(1, positions)]
    allowed = [(b, s, 1, size) if heads_dim == 2 else (b, 1, s, size) for b, s in tables]
    few = batch < 1000 and heads < 1000 if mode == "half" else batch * heads < 1000
    if r1.shape != r2.shape or tuple(r1.shape) not in allowed or size >= 896 or size % 2 or not few:
        raise RuntimeError(
            f"ERR: npu_rotary_mul {mode}: {tuple(x.shape)} with tables {tuple(r1.shape)} are not allowed"
        )
