"""Gradient norms and clipping: one global L2 norm in fp32, and the coefficient that brings it down to a limit.

    norm = sqrt(sum over tensors of |t|^2)         inf and nan anywhere make it inf or nan: an overflow shows here
    coefficient = min(1, max_norm / (norm + 1e-6))

Called by `zero` once per step. The names at the end are those that DeepSpeed has in `runtime.utils`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ConfigError

# torch adds up a long host tensor in few fp32 lanes: 30 million elements come out 0.2% low. Rows of this length,
# and then the norm of their norms, keep the error near 1e-7, so that stages which cut the same gradients differently
# agree on the norm.
_ROW_NUMEL = 4096
# torch's norm of 16-bit numbers on the host is 8 times slower than widening them piece by piece within the cache:
# 24 against 3 ms for 12.5 million bf16.
_PART_NUMEL = 2**19
_EPS = 1e-6


def tensor_norm(tensor: Tensor, norm_type: float = 2.0) -> Tensor:
    """The norm of one tensor: 0-D, fp32 (fp64 for fp64 and complex128), on its device; 0 for an empty tensor."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1) if norm_type == 2.0 else flat.abs()
    if flat.numel() == 0:
        return torch.zeros((), dtype=wide, device=tensor.device)
    if flat.itemsize < 4 and flat.device.type == "cpu" and flat.numel() > _ROW_NUMEL:
        return _norm_of_narrow(flat, norm_type)
    if flat.numel() <= _ROW_NUMEL:
        return torch.linalg.vector_norm(flat, norm_type, dtype=wide)
    cut = flat.numel() // _ROW_NUMEL * _ROW_NUMEL
    row_norms = torch.linalg.vector_norm(flat[:cut].view(-1, _ROW_NUMEL), norm_type, dim=1, dtype=wide)
    rest_norm = torch.linalg.vector_norm(flat[cut:], norm_type, dtype=wide) if cut < flat.numel() else row_norms[:0]
    return tensor_norm(torch.cat([row_norms, rest_norm.reshape(-1)]), norm_type)


def _norm_of_narrow(flat: Tensor, norm_type: float) -> Tensor:
    wide = torch.empty(min(_PART_NUMEL, flat.numel()), dtype=torch.float32)
    norms = [tensor_norm(wide[: part.numel()].copy_(part), norm_type) for part in flat.split(_PART_NUMEL)]
    return tensor_norm(torch.stack(norms), norm_type)


def global_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all `tensors` as if they were one vector: 0-D fp32 on the first tensor's device.

    Of any shapes, dtypes and devices; of no tensors it is 0. `norm_type`: 2, another power, or inf.
    """
    norms = [tensor_norm(tensor, norm_type) for tensor in tensors]
    if not norms:
        return torch.zeros(())
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return tensor_norm(torch.stack([norm.to(norms[0].device, wide) for norm in norms]), norm_type)


def clip_coefficient(total_norm: Tensor | float, max_norm: float) -> Tensor:
    """Return the factor for the gradients: min(1, max_norm / (norm + 1e-6)), 0-D; nan for nan, 0 for inf.

    `max_norm` <= 0 means no clipping (1), as the config key `gradient_clipping` has it.
    """
    norm = torch.as_tensor(total_norm, dtype=torch.get_default_dtype() if isinstance(total_norm, float) else None)
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + _EPS)).clamp(max=1.0)


@torch.no_grad()
def scale_in_place(tensors: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply every tensor by a 0-D `coefficient`, with no copy to the host."""
    for tensor in tensors:
        tensor.mul_(coefficient.to(tensor.device))


# ---- DeepSpeed's names ------------------------------------------------------------------------------------------


def get_global_norm(norm_list: Sequence[Tensor | float]) -> Tensor | float:
    """sqrt(sum of squares) of norms that are already known, for example one per param group."""
    if any(isinstance(norm, Tensor) for norm in norm_list):
        return global_norm([torch.as_tensor(norm) for norm in norm_list])
    return math.sqrt(sum(norm * norm for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, use_graph: bool = False, **_: Any
) -> Tensor:
    """`global_norm` under DeepSpeed's name; `use_graph` changes nothing here."""
    _check_no_model_parallel(mpu)
    return global_norm(input_tensors, float(norm_type))


def get_grad_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Norm of the gradients of `parameters`; those without a gradient are skipped."""
    _check_no_model_parallel(mpu)
    return global_norm(_grads(parameters), float(norm_type))


def get_weight_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Norm of the `parameters` themselves."""
    _check_no_model_parallel(mpu)
    return global_norm([parameters] if isinstance(parameters, Tensor) else parameters, float(norm_type))


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients of `parameters` in place to a global norm of at most `max_norm`; returns the norm before."""
    _check_no_model_parallel(mpu)
    grads = _grads(parameters)
    norm = global_norm(grads, float(norm_type))
    scale_in_place(grads, clip_coefficient(norm, float(max_norm)))
    return norm


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | float | None = None,
    mpu: Any = None,
    eps: float = _EPS,
    use_graph: bool = False,
) -> Tensor | float:
    """Scale `input_tensors` in place to a global norm of at most `max_norm`; returns the norm before.

    `global_norm`: the norm if it is already known. `use_graph` changes nothing here.
    """
    _check_no_model_parallel(mpu)
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors)
    coefficient = (max_norm / (torch.as_tensor(global_norm) + eps)).clamp(max=1.0)
    scale_in_place(input_tensors, coefficient)
    return global_norm


def _grads(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return [param.grad for param in parameters if param.grad is not None]


def _check_no_model_parallel(mpu: Any) -> None:
    size = 1 if mpu is None else mpu.get_model_parallel_world_size()
    if size > 1:
        raise ConfigError(
            f"mpu: found a model-parallel world size of {size}, but norms across model-parallel ranks are not in this "
            "version; take `global_norm` of the local tensors and reduce it over your group"
        )
