"""`FP_Quantize`: DeepSpeed's quantizer of tensors to floating-point numbers of 8, 6 or 12 bits.

`matmul_fp8` multiplies by a matrix that `FP_Quantize` has quantized to 8 bits.
"""

import abc
from typing import Any

import torch
from torch import Tensor

from deepspeed._absent import absent_members, complete
from deepspeed.errors import ConfigError, StateError, counted
from deepspeed.ops.quantizer.floats import E3M2, E4M3, E5M2, E7M4, FloatFormat, dequantize_floats, quantize_floats

_SCALE_BYTES = 4


def format_of(q_bits: int, mantissa_bits: int = 3) -> FloatFormat:
    """Return the format for `q_bits` and `q_mantisa_bits`. The mantissa bits are used only with 8 bits.

    Raises:
        ConfigError: there is no such format.
    """
    formats = {(8, 3): E4M3, (8, 2): E5M2}
    found = {6: E3M2, 12: E7M4}.get(q_bits) or formats.get((q_bits, mantissa_bits))
    if found is None:
        raise ConfigError(
            f"q_bits: found {q_bits}, and {mantissa_bits} bits of mantissa; give 8 (mantissa 3 or 2), 6 or 12, or use "
            "deepspeed.ops.quantizer for integers of 8 or 4 bits"
        )
    return found


class Quantizer(abc.ABC):
    """The interface of objects that quantize and dequantize tensors.

    Args:
        group_size: number of elements that share a scale.
    """

    def __init__(self, group_size: int = 512) -> None:
        self.group_size = group_size

    @abc.abstractmethod
    def quantize(
        self,
        input: Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Any:
        """Quantize `input`."""

    @abc.abstractmethod
    def dequantize(
        self,
        input_q: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Dequantize `input_q`, a result of `quantize`."""


@absent_members("ops.fp_quantizer.quantize:FP_Quantize")
class FP_Quantize(Quantizer):
    """Quantizes tensors to 8, 6 or 12 bits with an fp32 scale per group of `group_size` elements, and dequantizes them.

    `ops/quantizer/floats.py` has the formats and their errors. A quantizer stores shape, dtype and scales of the last
    quantized tensor. To dequantize another tensor, pass `fp_out`, or set `orig_shape` and `orig_dtype`.

    Args:
        quantization_config: `deepspeed.linear.QuantizationConfig`.

    >>> from types import SimpleNamespace
    >>> quantizer = FP_Quantize(SimpleNamespace(group_size=4))
    >>> stored = quantizer.quantize(torch.tensor([[28.0, 1.0, -5.2, 0.0]], dtype=torch.bfloat16), q_bits=6)
    >>> stored.dtype, stored.shape  # 3 bytes, and 4 of the scale
    (torch.uint8, torch.Size([1, 7]))
    >>> quantizer.dequantize(stored, q_bits=6)
    tensor([[28.,  1., -5.,  0.]], dtype=torch.bfloat16)
    """

    def __init__(self, quantization_config: Any) -> None:
        super().__init__(quantization_config.group_size)
        self.q_config = quantization_config
        self.orig_shape: torch.Size | None = None
        self.orig_dtype: torch.dtype | None = None
        self.num_groups: int | None = None
        self.scale: Tensor | None = None

    def quantize(
        self,
        input: Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Any:
        """Quantize `input`. The result has no gradient.

        Args:
            input: a floating-point tensor of any shape, read in row-major order.
            q_bits: 8, 6 or 12.
            q_mantisa_bits: with 8 bits, 3 (e4m3) or 2 (e5m2).
            stochastic_mode: round up with the probability of the fraction.
            return_meta_tensor: return data and scales separately.

        Returns:
            uint8 (groups, group_size * q_bits / 8 + 4), with the scale after each group; or (data, scales). Then data
            has the input's shape with the last dimension times q_bits / 8 if this is an integer, else (groups, bytes);
            scales are fp32 (groups, 1).

        Raises:
            ConfigError: there is no format with these bits, or groups do not fit the tensor.
            TypeError: `input` is not a floating-point tensor.
        """
        form = format_of(q_bits, q_mantisa_bits)
        if not isinstance(input, Tensor) or not input.is_floating_point():
            found = str(input.dtype) if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(f"input: found {found}; give a floating tensor")
        if self.group_size < 1 or input.numel() % self.group_size or not input.numel():
            raise ConfigError(
                f"group_size: found {self.group_size}, but it must divide the {counted(input.numel(), 'element')} of "
                f"input, of shape {tuple(input.shape)}; give QuantizationConfig another"
            )
        num_groups = input.numel() // self.group_size
        data, scales = quantize_floats(input, num_groups, form, stochastic_mode)
        self.orig_shape, self.orig_dtype = input.shape, input.dtype
        self.num_groups, self.scale = num_groups, scales
        if not return_meta_tensor:
            return torch.cat((data, scales.view(torch.uint8)), 1)
        last = input.shape[-1] if input.dim() else 1
        return data if last % form.unit else data.view(*input.shape[:-1], last * form.bits // 8), scales

    def dequantize(
        self,
        input_q: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Dequantize `input_q` to the shape and dtype of `fp_out`, or of the last quantized tensor.

        Args:
            input_q: the result of `quantize`, or only its data if `scale` is given.
            fp_out: a tensor for the result, which is returned.
            scale: the scales from `quantize(..., return_meta_tensor=True)`.

        Raises:
            ConfigError: the bytes are not a multiple of a group, or do not match the shape.
            StateError: nothing has been quantized, and `fp_out` is None.
        """
        form = format_of(q_bits, q_mantisa_bits)
        shape, dtype = self._target(fp_out)
        data, scales = self._parts(input_q, form, scale)
        if scales.numel() * self.group_size != shape.numel():
            raise ConfigError(
                f"input_q: found {counted(scales.numel(), 'group')} of {self.group_size}, but the tensor has the shape "
                f"{tuple(shape)}; give fp_out of the shape that was quantized"
            )
        found = dequantize_floats(data, scales, form, dtype).view(shape)
        return found if fp_out is None else fp_out.copy_(found)

    def selective_dequantize(
        self,
        input_q: Tensor,
        indexes: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return `dequantize(...)[indexes]` along the first dimension, without dequantizing the rest.

        Args:
            indexes: a 1-D integer tensor.
            fp_out: a tensor for the result, which is returned: (indexes, ...) of the last quantized tensor.

        Raises:
            ConfigError: see `dequantize`; also if a group spans two indexes.
            StateError: nothing has been quantized.
        """
        form = format_of(q_bits, q_mantisa_bits)
        shape, dtype = self._target(None)
        data, scales = self._parts(input_q, form, scale)
        if not shape or scales.numel() * self.group_size != shape.numel() or scales.numel() % shape[0]:
            raise ConfigError(
                f"input_q: found {counted(scales.numel(), 'group')} of {self.group_size} for a tensor of shape "
                f"{tuple(shape)}; a group must lie within one index of its first dimension"
            )
        rows = indexes.to(data.device).long()
        data, scales = (each.view(shape[0], -1, each.shape[1])[rows] for each in (data, scales))
        found = dequantize_floats(data, scales, form, dtype).view(rows.numel(), *shape[1:])
        return found if fp_out is None else fp_out.copy_(found)

    def get_scales(self) -> Tensor | None:
        """Return the scales of the last quantized tensor, fp32 (groups, 1), or None."""
        return self.scale

    def to(self, *args: Any, **kwargs: Any) -> "FP_Quantize":
        """Move the scales. They stay fp32."""
        if self.scale is not None:
            self.scale = self.scale.to(*args, **kwargs).float()
        return self

    def _target(self, fp_out: Tensor | None) -> tuple[torch.Size, torch.dtype]:
        if fp_out is not None:
            return fp_out.shape, fp_out.dtype
        if self.orig_shape is None or self.orig_dtype is None:
            raise StateError(
                "dequantize: this quantizer quantized nothing, so the shape is unknown; give fp_out, or set orig_shape "
                "and orig_dtype"
            )
        return torch.Size(self.orig_shape), self.orig_dtype

    def _parts(self, input_q: Tensor, form: FloatFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return data (G, bytes) and scales (G, 1)."""
        num_bytes = self.group_size * form.bits // 8
        whole = num_bytes + (_SCALE_BYTES if scale is None else 0)
        if input_q.element_size() != 1 or input_q.numel() % whole:
            raise ConfigError(
                f"input_q: found {input_q.dtype} of shape {tuple(input_q.shape)}, but {form.bits} bits in groups of "
                f"{self.group_size} are rows of {counted(whole, 'byte')}"
                + ("" if scale is not None else ", the scale behind them; give scale where it is apart")
            )
        rows = input_q.contiguous().view(torch.uint8).view(-1, whole)
        if scale is None:
            scales = rows[:, num_bytes:].clone(memory_format=torch.contiguous_format).view(torch.float32)
            return rows[:, :num_bytes].contiguous(), scales
        if scale.numel() != rows.shape[0]:
            raise ConfigError(
                f"scale: found shape {tuple(scale.shape)}, but input_q has {counted(rows.shape[0], 'group')} of "
                f"{self.group_size}"
            )
        return rows, scale.float().view(-1, 1)


def matmul_fp8(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: FP_Quantize
) -> Tensor:
    """Compute inp @ W, with W dequantized only for the product.

    Args:
        inp: (..., in).
        weight, scale: the result of `quantizer.quantize(W, return_meta_tensor=True)` for W (in, out).
        quantization_group_size: the group size of the quantizer.

    Raises:
        ConfigError: the group sizes differ, or weight and scale do not match the quantizer's last tensor.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> quantizer = FP_Quantize(SimpleNamespace(group_size=2))
    >>> data, scale = quantizer.quantize(torch.tensor([[448.0, 1.0], [-1.0, 2.0]]), return_meta_tensor=True)
    >>> matmul_fp8(torch.tensor([1.0, 2.0]), data, scale, 2, quantizer)
    tensor([446.,   5.])
    """
    if quantization_group_size != quantizer.group_size:
        raise ConfigError(
            f"quantization_group_size: found {quantization_group_size}, but the quantizer has groups of "
            f"{quantizer.group_size}; give the one that made the weight"
        )
    return inp @ quantizer.dequantize(weight, scale=scale).to(inp.dtype)


matmul_fp8_fallback = matmul_fp8

complete(__name__)
