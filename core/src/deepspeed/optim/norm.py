"""Gradient norms and clipping: one global L2 norm in fp32, and the coefficient that reduces it to a limit.

    norm = sqrt(sum over tensors of |t|^2)         inf or nan in any tensor makes it inf or nan: this detects overflow
    coefficient = min(1, max_norm / (norm + 1e-6))

[Note: a sum that no order changes] `ExactSquares` sums squares so that every order gives the same bits. Let each of N
squares x be at most 2^e, and s = 1.5 * 2^(e + h) with h >= 2. Then s + x lies between 2^(e + h) and 2^(e + h + 1). In
this range, fp64 numbers are multiples of u = 2^(e + h - 52). So fl(s + x) is s + q, where q is x rounded to a multiple
of u. The bits of s + q, read as an integer, are the bits of s plus q / u. Integer sums are exact in every order. They
may wrap at 2^64, but the sum of q / u does not: it is at most 2^(52 - h) N, which is below 2^62 with h >= M - 10 and
2^M > N. The rest x - q is exact and at most u / 2. The next fold processes the rest, with e + h - 53 for e + h. The
rest after the last fold is dropped, element by element. The square of a number in fp32 or less is exact in fp64, so
s + x is rounded once, in one operation or in two. Sources: S. Rump, T. Ogita, S. Oishi, Accurate Floating-Point
Summation Part I, SIAM J. Sci. Comput. 31 (2008), lemma 3.3; J. Demmel, H. D. Nguyen, Fast Reproducible Floating-Point
Summation, ARITH 21 (2013), section IV.

`zero` calls this once per step. The functions at the end have the names of DeepSpeed's `runtime.utils`.

`CheckOverflow` detects infinities and NaNs in the gradients of any rank, for custom training loops. The norm of all
gradients detects them too.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import is_moe_param

# torch sums a long host tensor in a few fp32 lanes: for 30 million elements the result is 0.2% too low. The norm of the
# norms of rows of this length has an error near 1e-7, so that ZeRO stages that shard the same gradients differently
# agree on the norm.
_ROW_NUMEL = 4096
# On the host, converting 16-bit numbers to fp32 in cache-sized pieces is 8 times faster than torch's norm: 3 instead of
# 24 ms for 12.5 million bf16.
_PART_NUMEL = 2**19
_EPS = 1e-6
_FP64_DIGITS = 53
_INT64_DIGITS = 63
_MAX_EXPONENT = 1000
#: binary digits of precision of `ExactSquares`, relative to the largest square
_EXACT_DIGITS = 30
#: numbers that `ExactSquares` squares at once: two fp64 buffers of 2 MiB. 25 M on a core: 57 ms at 2**16, 42 ms here
_PIECE_NUMEL = 2**18
_DEVICE_PIECE_NUMEL = 2**24


def tensor_norm(tensor: Tensor, norm_type: float = 2.0) -> Tensor:
    """Return the norm of a tensor: 0-D, fp32 (fp64 for fp64 and complex128), on its device; 0 for an empty tensor."""
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
    """Return the norm of all `tensors` as one vector: 0-D, fp32 or fp64, on the first tensor's device.

    Shapes, dtypes and devices may differ. Without tensors the norm is 0. `norm_type`: 2, another power, or inf.
    """
    norms = [tensor_norm(tensor, norm_type) for tensor in tensors]
    if not norms:
        return torch.zeros(())
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return tensor_norm(torch.stack([norm.to(norms[0].device, wide) for norm in norms]), norm_type)


class ExactSquares:
    """Computes a sum of squares over several ranks, bit-identical for every order and partition of the numbers.

    The sum is fp64 with a relative error below 2^-30, and inf or nan if a number is. See [Note: a sum that no order
    changes]. fp64 numbers also give the same bits in every order, but their squares are rounded first.

    Args:
        numel: the count of numbers on all ranks, or an upper bound.
    """

    def __init__(self, numel: int) -> None:
        digits = (numel + 2).bit_length()
        self._room = max(2, digits - _INT64_DIGITS + _FP64_DIGITS)
        self._gain = _FP64_DIGITS - self._room
        #: number of partial sums; more numbers need more folds, because each fold then has fewer digits per number
        self.num_folds = -(-(_EXACT_DIGITS + 1 + digits) // self._gain)

    @staticmethod
    def largest(parts: Sequence[Tensor]) -> Tensor:
        """Return the largest |x|: 0-D fp64 on the device of `parts`; nan if a number is nan, 0 without numbers."""
        found = [torch.stack(part.aminmax()).abs().amax() for part in map(_as_real, parts) if part.numel()]
        if not found:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([each.to(found[0].device, torch.float64) for each in found]).amax()

    def folds(self, parts: Sequence[Tensor], largest: Tensor) -> Tensor:
        """Return partial sums of the squares, (2F,) fp64: the high and the low halves of integers. The caller adds the
        partial sums of all ranks, which is exact, and passes the result to `total`.

        Args:
            parts: this rank's numbers, on one device.
            largest: the maximum of `largest` over all ranks, 0-D fp64.
        """
        on_host = largest.device.type == "cpu"
        bits_F = ((self._exponents(largest) + 1023) << 52) + (1 << 51)  # the bits of s in each fold
        offsets_F = bits_F.view(torch.float64)
        offsets = offsets_F.tolist() if on_host else list(offsets_F)
        pieces = [
            piece
            for part in map(_as_real, parts)
            for piece in part.reshape(-1).split(_PIECE_NUMEL if on_host else _DEVICE_PIECE_NUMEL)
        ]
        longest = max((piece.numel() for piece in pieces), default=0)
        room_2N = torch.empty(2, longest, dtype=torch.float64, device=largest.device)
        first, one = offsets_F[0], torch.ones_like(largest)
        counts: list[list[Tensor]] = [[torch.zeros_like(bits_F[0])] for _ in offsets]
        for piece in pieces:
            numbers, rounded = room_2N[:, : piece.numel()]
            numbers.copy_(piece)
            if is_square := piece.dtype == torch.float64:
                numbers.square_()
            factor = one if is_square else numbers
            torch.addcmul(first, numbers, factor, out=rounded)
            counts[0].append(rounded.view(torch.int64).sum())
            if self.num_folds > 1:
                rest = torch.addcmul(rounded.sub_(offsets[0]), numbers, factor, value=-1, out=numbers)  # q - x
            for fold in range(1, self.num_folds):
                is_last = fold + 1 == self.num_folds
                torch.add(rest, offsets[fold], out=rest if is_last else rounded)
                counts[fold].append((rest if is_last else rounded).view(torch.int64).sum())
                if not is_last:
                    rest.sub_(rounded.sub_(offsets[fold]))
        counts_F = torch.stack([torch.stack(each).sum() for each in counts])
        counts_F -= bits_F * sum(piece.numel() for piece in pieces)
        return torch.cat([counts_F >> 32, counts_F & 0xFFFFFFFF]).to(torch.float64)

    def total(self, sums: Tensor, largest: Tensor) -> Tensor:
        """Return the sum of the squares, 0-D fp64, on the device of the arguments.

        Args:
            sums: the results of `folds`, added over all ranks.
            largest: the argument of `folds`.
        """
        high_F, low_F = sums.view(2, -1)
        units_F = ((self._exponents(largest) - 52 + 1023) << 52).view(torch.float64)
        total, *rests = (high_F * 2.0**32 + low_F) * units_F  # one rounding per fold
        for rest in rests:
            total = total - rest
        is_known = torch.frexp(largest.square())[1] + self._room <= _MAX_EXPONENT
        return torch.where(largest.square().isfinite() & is_known, total, largest.square() * math.inf)

    def _exponents(self, largest: Tensor) -> Tensor:
        """Return e + h of each fold."""
        steps_F = torch.arange(self.num_folds, device=largest.device) * -self._gain
        exponents_F = torch.frexp(largest.square())[1] + self._room + steps_F
        return exponents_F.clamp(-_MAX_EXPONENT + 52, _MAX_EXPONENT)


def _as_real(numbers: Tensor) -> Tensor:
    return torch.view_as_real(numbers.detach()) if numbers.is_complex() else numbers.detach()


def clip_coefficient(total_norm: Tensor | float, max_norm: float) -> Tensor:
    """Return the factor for the gradients: min(1, max_norm / (norm + 1e-6)), 0-D; nan for nan, 0 for inf.

    `max_norm` <= 0 means no clipping (factor 1), like the config key `gradient_clipping`.
    """
    norm = torch.as_tensor(total_norm, dtype=torch.get_default_dtype() if isinstance(total_norm, float) else None)
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + _EPS)).clamp(max=1.0)


@torch.no_grad()
def scale_in_place(tensors: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply every tensor by a 0-D `coefficient`, without a copy to the host."""
    for tensor in tensors:
        tensor.mul_(coefficient.to(tensor.device))


# ---- DeepSpeed's names ------------------------------------------------------------------------------------------


def get_global_norm(norm_list: Sequence[Tensor | float]) -> Tensor | float:
    """Return sqrt(sum of squares) of known norms, for example one per param group."""
    if any(isinstance(norm, Tensor) for norm in norm_list):
        return global_norm([torch.as_tensor(norm) for norm in norm_list])
    return math.sqrt(sum(norm * norm for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, use_graph: bool = False, **_: Any
) -> Tensor:
    """Call `global_norm` under DeepSpeed's name. `use_graph` has no effect."""
    _check_no_model_parallel(mpu)
    return global_norm(input_tensors, float(norm_type))


def get_grad_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Return the norm of the gradients of `parameters`. Parameters without a gradient are skipped."""
    _check_no_model_parallel(mpu)
    return global_norm(_grads(parameters), float(norm_type))


def get_weight_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Return the norm of the `parameters` themselves."""
    _check_no_model_parallel(mpu)
    return global_norm([parameters] if isinstance(parameters, Tensor) else parameters, float(norm_type))


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients of `parameters` in place to a global norm of at most `max_norm`. Return the original norm."""
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
    """Scale `input_tensors` in place to a global norm of at most `max_norm`. Return the original norm.

    `global_norm` is the norm if already known. `use_graph` has no effect.
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


def has_inf_or_nan(tensor: Tensor) -> bool:
    """Return whether an element of `tensor` is infinite or NaN. Synchronizes the host with the device."""
    return not bool(torch.isfinite(tensor).all())


class CheckOverflow:
    """Detects infinities and NaNs in gradients, and combines the results of the ranks that step together.

    Args:
        param_groups: lists of parameters for `check`.
        mpu: Megatron's mpu; the results of its model-parallel ranks are combined.
        zero_reduce_scatter: gradients are sharded across ranks, so the results of all ranks are combined.
        deepspeed: an engine; with pipeline parallelism the results of all ranks are combined.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params: list[Tensor] | None = None
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.has_moe_params = False
        if param_groups:
            self._take(param_groups)

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Return whether a gradient of `param_groups` (default: the constructor's) has overflowed. A collective."""
        if param_groups is not None:
            self._take(param_groups)
        return self.has_overflow(self.params or [], has_moe_params=self.has_moe_params)

    def has_overflow(self, params: Sequence[Tensor], has_moe_params: bool | None = None) -> bool:
        """Return whether a gradient of `params` has overflowed on this rank or a rank combined with it. A collective.

        Args:
            has_moe_params: `params` include experts, so the results of all ranks are combined. None: as in the
                parameters of the constructor or the last `check`.
        """
        has_experts = self.has_moe_params if has_moe_params is None else has_moe_params
        return self._any(self.has_overflow_serial(params), has_experts=has_experts)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of `params` has overflowed on this rank."""
        return any(param.grad is not None and has_inf_or_nan(param.grad) for param in params)

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Return whether a norm is -1, DeepSpeed's mark of an overflow. A collective if `reduce_overflow`."""
        mine = any(norm == -1 for norm in norm_group)
        return self._any(mine, has_experts=self.has_moe_params) if reduce_overflow else mine

    def _take(self, param_groups: Iterable[Iterable[Tensor]]) -> None:
        self.params = [param for group in param_groups for param in group]
        self.has_moe_params = any(map(is_moe_param, self.params))

    def _any(self, mine: bool, *, has_experts: bool) -> bool:
        """Return whether `mine` is True on this rank or a rank whose result is combined with it."""
        in_pipeline = self.deepspeed is not None and getattr(self.deepspeed, "pipeline_parallelism", False)
        group: ProcessGroup | None = None  # all ranks
        if not (has_experts or self.zero_reduce_scatter or in_pipeline):
            if self.mpu is None:
                return mine
            group = self.mpu.get_model_parallel_group()
        flag = torch.tensor([float(mine)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
