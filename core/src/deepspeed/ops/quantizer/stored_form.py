"""The layout of a weight that is stored in 8, 6 or 4 bits in one int8 tensor of B bytes:

    header   8 x int32: a mark, whether there are values, bits, group size, group dim, kind, rows, columns;
             kind: 0 asymmetric, 1 symmetric, 2 floating-point; rows: total rows of all experts
    scales   fp32, one per group
    zeros    fp32, one per group; omitted if symmetric
    data     the numbers in the layout of `packed.py`, padded to a multiple of 16 bytes

`packed.py` forms groups along the last dimension, so with group dim 0 the transposed weight is packed. The matrices of
experts are stacked along the rows; with group dim 0 each matrix is transposed first.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.config.inference import GroupWiseQuantConfig
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer.packed import PackedWeight, check_bits, pack_rows, unit_of, unpack_weight

_MARK = 0x51775344  # "DSwQ"
_HEADER_BYTES = 32
_HAS_VALUES = 1  # index in the header
_ALIGNMENT = 16  # bytes, so that the fp32 parts stay aligned when several weights are gathered into one buffer


@dataclass(frozen=True)
class StoredForm:
    """`StoredForm` describes how one weight is stored: see the module docstring.

    Fields:
        shape: shape of the layer's weight; for experts, the shape of one expert's weight.
        bits: 8 or 4; 8 or 6 if `floating`.
        group_size: number of elements that share a scale.
        group_dim: the dimension of the groups.
        symmetric: groups have no zero offset.
        floating: numbers are e4m3 or e3m2, and symmetric.
        experts: the number of experts, for a weight of shape [experts, *shape]; 0 for an ordinary layer.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    group_dim: int
    symmetric: bool
    floating: bool = False
    experts: int = 0

    @classmethod
    def of(cls, shape: torch.Size, config: GroupWiseQuantConfig, key: str, where: str) -> "StoredForm":
        """Return the form for a weight and its configuration.

        Raises:
            ConfigError: groups do not fit the weight; the message has the key, the layer and the sizes that fit.
        """
        try:
            check_bits(config.num_bits, config.floating)
        except ConfigError as error:
            raise ConfigError(f"{key}.num_bits: {error}") from None
        rows, cols = shape[-2:]
        length, size = (rows, cols)[config.group_dim], config.group_size
        step = unit_of(config.num_bits, config.floating)
        if length % size or size % step:
            even = {2: " and be even, as a byte holds two", 4: " and by 4, as three bytes hold four"}.get(step, "")
            fits = [each for each in range(step, length + 1, step) if length % each == 0]
            near = sorted(fits, key=lambda each: abs(math.log(each / size)))[:3]
            advice = f"for example {', '.join(map(str, sorted(near)))}" if near else "which no size does"
            raise ConfigError(
                f"{key}.group_size: found {size} for {where}, whose weight is {rows} x {cols}: with group_dim "
                f"{config.group_dim} it must divide {length}{even}; {advice}, or leave the layer out by a pattern of "
                "weight_quantization.post_init_quant"
            )
        symmetric = config.symmetric or config.floating
        experts = shape[0] if len(shape) == 3 else 0
        return cls((rows, cols), config.num_bits, size, config.group_dim, symmetric, config.floating, experts)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the weight, including all experts."""
        return (self.experts, *self.shape) if self.experts else self.shape

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the packed matrix, whose rows consist of groups."""
        rows, cols = self.shape if self.group_dim == 1 else self.shape[::-1]
        return rows * max(self.experts, 1), cols

    @property
    def num_groups(self) -> int:
        """The number of groups of the weight."""
        return math.prod(self.whole_shape) // self.group_size

    @property
    def num_bytes(self) -> int:
        """The number of bytes (and int8 elements) of a stored weight."""
        data = math.prod(self.whole_shape) * self.bits // 8
        numel = _HEADER_BYTES + 4 * self.num_groups * (1 if self.symmetric else 2) + data
        return -(-numel // _ALIGNMENT) * _ALIGNMENT

    def empty(self, device: torch.device) -> Tensor:
        """Create a stored weight without values."""
        stored_B = torch.zeros(self.num_bytes, dtype=torch.int8, device=device)
        self._write_header(stored_B, has_values=False)
        return stored_B

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Tensor:
        """Quantize a weight and return its stored form."""
        matrices = weight.detach() if self.experts else (weight.detach(),)
        rows = (each if self.group_dim == 1 else each.t() for each in matrices)
        form = (self.packed_shape, self.bits, self.group_size, self.symmetric)
        packed = pack_rows(rows, *form, floating=self.floating)
        stored_B = self.empty(weight.device)
        self._write_header(stored_B, has_values=True)
        view = self.view(stored_B)
        view.data.copy_(packed.data)
        view.scales.copy_(packed.scales)
        if view.zeros is not None and packed.zeros is not None:
            view.zeros.copy_(packed.zeros)
        return stored_B

    def view(self, stored_B: Tensor) -> PackedWeight:
        """Return the parts of a stored weight as views (of a copy if the fp32 parts are not aligned)."""
        rows, cols = self.packed_shape
        of_groups = (rows, cols // self.group_size)
        if stored_B.storage_offset() % 4:  # gathered into one buffer with parameters of another size
            stored_B = stored_B.clone()
        ends = [_HEADER_BYTES + 4 * self.num_groups * count for count in range(3)]
        scales = stored_B[ends[0] : ends[1]].view(torch.float32).view(of_groups)
        zeros = None if self.symmetric else stored_B[ends[1] : ends[2]].view(torch.float32).view(of_groups)
        start = ends[1] if self.symmetric else ends[2]
        data = stored_B[start : start + rows * cols * self.bits // 8].view(rows, cols * self.bits // 8)
        return PackedWeight(data, scales, zeros, self.bits, self.group_size, (rows, cols), self.floating)

    def unpack(self, stored_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in the shape of the layer."""
        weight = unpack_weight(self.view(stored_B), dtype)
        if self.experts:
            weight = weight.view(self.experts, -1, weight.shape[1])
        return weight if self.group_dim == 1 else weight.transpose(-1, -2)

    def difference(self, stored_B: Tensor) -> str:
        """Return how the header of a stored weight differs from this form; "" if it does not."""
        header = stored_B.detach()[:_HEADER_BYTES].cpu().clone().view(torch.int32).tolist()
        if stored_B.numel() < _HEADER_BYTES or header[0] != _MARK:
            return "it is no weight that deepspeed.inference.quantization stored"
        names = ("num_bits", "group_size", "group_dim", "kind", "rows", "columns")
        wanted = self._header(has_values=True)[2:]
        differ = [
            f"{name} {found} instead of {asked}"
            for name, found, asked in zip(names, header[2:], wanted, strict=True)
            if found != asked
        ]
        return ", ".join(differ)

    def has_values(self, stored_B: Tensor) -> bool:
        """Return whether the stored weight has values. Synchronizes with the device."""
        return bool(stored_B.detach()[:_HEADER_BYTES].cpu().clone().view(torch.int32)[_HAS_VALUES].item())

    def _header(self, has_values: bool) -> list[int]:
        kind = 2 if self.floating else int(self.symmetric)
        rows, cols = self.shape
        rows *= max(self.experts, 1)
        return [_MARK, int(has_values), self.bits, self.group_size, self.group_dim, kind, rows, cols]

    def _write_header(self, stored_B: Tensor, has_values: bool) -> None:
        header = torch.tensor(self._header(has_values), dtype=torch.int32).view(torch.int8)
        stored_B[:_HEADER_BYTES].copy_(header)
