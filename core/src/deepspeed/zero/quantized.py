"""Collectives that send few bits: int8 weights in an all-gather, int4 gradients in a reduction (ZeRO++).

    all_gather         each rank sends its shard in int8                                              (qwZ)
    reduce_scatter     each rank sends each peer its part in int4, by one all-to-all; the receiver
                       converts the parts to fp32, adds them in rank order and rounds once            (qgZ)
    ErrorFeedback      adds the int4 rounding error of a rank's gradients to its next gradients       (LoCo)

Source: G. Wang et al., ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3. The all-to-all here has one step, not one within
a node and one between nodes. Blocks of `BLOCK_NUMEL` elements share one fp32 scale, symmetric around 0, so that
|x - x'| <= scale / 2 with scale = max|x| / 127 in int8 and max|x| / 7 in int4 (`ops/quantizer/groups.py`). A block with
inf or nan becomes nan, so overflows are kept. Gathered values are rounded identically on every rank, its own included.

A group of one rank sends nothing. Dtypes that the quantizer does not support (fp64, integers) are sent unchanged.
`param_unit.py` calls this for weights that a module is about to read, `ZeroStage.reduce` for gradients.

[Note: error feedback] Let Q4 and Q8 be the rounding to int4 and int8. A rank with the gradients g of a unit, and with
the errors e (initially zero), sends and keeps (X. Xie et al., LoCo, arXiv 2407.04480)

    h = g + e,    send Q4(h),    e <- Q8(beta e + (1 - beta) (h - Q4(h)))

So K reductions send the sum of K gradients, except for (e_0 - e_K) / (1 - beta) and the rounding of Q8. The error of
their mean falls with 1 / K down to the error of Q8; without feedback it does not fall. With `beta` 0 only the last
error is kept. Errors scale with the gradients and belong to gradients that a step has used. So errors are reset to zero
after a skipped step and when the loss scale changes. An element that is inf or nan leaves no error.

[Note: rounded once] Weights that are stored in int8 are packed again when the output of `unpack` is loaded. In bf16 and
fp16 that gives the same codes and scales: the largest element m of a block is restored as m, and so is the scale.
In fp32 the product 127 * scale is rounded, and the next scale may differ. So `lasting` limits the elements of a block
to 127 times a scale of 17 significant bits, for which the product is exact.

Legend: N numel of a full buffer, S of a shard, W ranks, B bytes of a shard in few bits.
"""

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.comm.backend import Followed, GroupBackend, Work
from deepspeed.ops.operators import FLOATS
from deepspeed.ops.quantizer import dequantize, dequantize_reduce, quantize
from deepspeed.ops.quantizer.groups import TINY

#: elements per scale: 0.125 bits more per element
BLOCK_NUMEL = 256
WEIGHT_BITS, GRADIENT_BITS, ERROR_BITS = 8, 4, 8

#: elements whose errors are converted to fp32 at once. Measured on one core for 2 M gradients: 14.5 ms at 2**17, 24 at
#: 2**15; without error feedback 2.3 ms. On a device this takes 64 MiB of buffers
RUN_NUMEL, DEVICE_RUN_NUMEL = 2**17, 2**22

_SCALE_BYTES = torch.float32.itemsize
#: mask for the bits of an fp32 scale that would make its product with an int8 code inexact
_EXACT_SCALE = -(1 << 7)
#: scales and codes begin at a multiple of this, for the widest loads of the kernels
_ALIGNMENT_BYTES = 16


def all_gather(ranks: GroupBackend, full_N: Tensor, shard_S: Tensor, *, tag: str | int | None = None) -> Work:
    """Run `GroupBackend.all_gather` with int8 shards. `shard_S` may be written as soon as this returns."""
    if not _is_quantized(ranks, shard_S):
        return ranks.all_gather(full_N, shard_S, tag=tag)
    packing = ShardPacking(shard_S.numel(), WEIGHT_BITS)
    packed_B = ranks.allocate(packing.num_bytes, torch.int8, full_N.device)
    packing.pack(shard_S, packed_B)
    return all_gather_packed(ranks, full_N, packed_B, packing, tag=tag)


def all_gather_packed(
    ranks: GroupBackend, full_N: Tensor, packed_B: Tensor, packing: "ShardPacking", *, tag: str | int | None = None
) -> Work:
    """Run `all_gather` with a shard that is packed already."""
    packed_WB = _allocate(ranks, packing, full_N.device)

    def unpack() -> None:
        for each_B, part_S in zip(packed_WB, full_N.view(ranks.world_size, -1), strict=True):
            packing.unpack(each_B, part_S)

    work = ranks.all_gather(packed_WB.view(-1), packed_B, tag=tag)
    return Followed(work, unpack, in_poll=full_N.device.type == "cpu")


def reduce_scatter(
    ranks: GroupBackend,
    shard_S: Tensor,
    full_N: Tensor,
    *,
    tag: str | int | None = None,
    feedback: "ErrorFeedback | None" = None,
) -> Work:
    """Run `GroupBackend.reduce_scatter` with int4 parts. `full_N` may be written as soon as this returns.

    Args:
        feedback: the errors of earlier reductions with the same `tag`; None: no error feedback.
    """
    if not _is_quantized(ranks, shard_S):
        return ranks.reduce_scatter(shard_S, full_N, tag=tag)
    packing = ShardPacking(shard_S.numel(), GRADIENT_BITS)
    sent_WB, packed_WB = (_allocate(ranks, packing, full_N.device) for _ in range(2))
    parts_WS = full_N.view(ranks.world_size, -1)
    if feedback is not None:
        feedback.pack(tag, parts_WS, sent_WB)
    else:
        for part_S, packed_B in zip(parts_WS, sent_WB, strict=True):
            packing.pack(part_S, packed_B)
    work = ranks.all_to_all(packed_WB.view(-1), sent_WB.view(-1), tag=tag)
    return Followed(work, lambda: packing.unpack_sum(packed_WB, shard_S), in_poll=full_N.device.type == "cpu")


class _BlockRun(NamedTuple):
    """`_BlockRun` is a run of blocks of one length."""

    elements: slice
    num_blocks: int
    scales: slice  # of the packed bytes
    codes: slice


class ShardPacking:
    """`ShardPacking` lays S elements out in B bytes: the scales of all blocks, then their codes. The last block may be
    shorter.

    Args:
        numel: S, at least 1.
        bits: 8 or 4 per element.
        run_numel: maximum of elements per call of the quantizer, in whole blocks; does not change the bytes.
    """

    def __init__(self, numel: int, bits: int, run_numel: int = sys.maxsize) -> None:
        self.numel = numel
        self.bits = bits
        self._run_blocks = run_numel // BLOCK_NUMEL
        num_full, num_left = divmod(numel, BLOCK_NUMEL)
        self._codes_start = _aligned((num_full + (num_left > 0)) * _SCALE_BYTES)
        self.runs = list(self._cut(num_full, num_left))
        self.num_bytes = _aligned(self.runs[-1].codes.stop)

    def _cut(self, num_full: int, num_left: int) -> Iterator[_BlockRun]:
        for first in range(0, num_full, self._run_blocks):
            yield self._run(first, min(self._run_blocks, num_full - first), BLOCK_NUMEL)
        if num_left:
            yield self._run(num_full, 1, num_left)

    def _run(self, first: int, num_blocks: int, block_numel: int) -> _BlockRun:
        """Return the run of `num_blocks` blocks after the first `first` blocks, which are full."""
        start, codes = first * BLOCK_NUMEL, self._codes_start + first * BLOCK_NUMEL * self.bits // 8
        num_codes = num_blocks * math.ceil(block_numel * self.bits / 8)
        return _BlockRun(
            slice(start, start + num_blocks * block_numel),
            num_blocks,
            slice(first * _SCALE_BYTES, (first + num_blocks) * _SCALE_BYTES),
            slice(codes, codes + num_codes),
        )

    def pack(self, numbers_S: Tensor, packed_B: Tensor) -> None:
        """Pack `numbers_S` (fp32, bf16 or fp16) into `packed_B` (int8)."""
        for run in self.runs:
            self.pack_run(run, numbers_S[run.elements], packed_B)

    def pack_run(self, run: "_BlockRun", numbers: Tensor, packed_B: Tensor) -> None:
        """Pack the elements of one of `runs` into their places in `packed_B`."""
        codes, scales = quantize(numbers, run.num_blocks, self.bits)
        packed_B[run.codes].copy_(codes.view(-1))
        packed_B[run.scales].view(torch.float32).copy_(scales.view(-1))

    def lasting(self, numbers_S: Tensor) -> Tensor:
        """Return `numbers_S` with its largest elements reduced by at most 2**-16 of their value, so that packing the
        output of `unpack` again in 8 bits changes nothing; see [Note: rounded once]."""
        if numbers_S.dtype is not torch.float32:
            return numbers_S
        limited_S = torch.empty_like(numbers_S)
        for run in self.runs:
            blocks = numbers_S[run.elements].view(run.num_blocks, -1)
            scale = (blocks.abs().amax(1, keepdim=True) * (1 / 127)).clamp_min(TINY)
            largest = 127 * (scale.view(torch.int32) & _EXACT_SCALE).view(torch.float32)
            limited_S[run.elements].view_as(blocks).copy_(blocks.clamp(-largest, largest))
        return limited_S

    def unpack(self, packed_B: Tensor, numbers_S: Tensor) -> None:
        """Unpack the output of `pack` to `numbers_S`, rounded to its dtype."""
        for run in self.runs:
            numbers = numbers_S[run.elements]
            numbers.copy_(self.unpack_run(run, packed_B, numbers.dtype))

    def unpack_run(self, run: "_BlockRun", packed_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements of one of `runs`, 1-D."""
        codes, scales = self._parts(run, packed_B)
        numel = run.elements.stop - run.elements.start
        return dequantize(codes, scales, self.bits, shape=(numel,), dtype=dtype)

    def unpack_sum(self, packed_WB: Tensor, sum_S: Tensor) -> None:
        """Write the sum of W packed shards to `sum_S`: added in fp32 in rank order, rounded once."""
        for run in self.runs:
            numbers = sum_S[run.elements]
            codes, scales = self._parts(run, packed_WB)
            numbers.copy_(dequantize_reduce(codes, scales, self.bits, shape=numbers.shape, dtype=numbers.dtype))

    def codes(self, packed_B: Tensor) -> Tensor:
        """Return the 8-bit codes of all elements, a view of S elements."""
        assert self.bits == 8
        return packed_B.narrow(0, self._codes_start, self.numel)

    def _parts(self, run: _BlockRun, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a run as views with one block per row; `packed` is (..., B)."""
        codes = packed[..., run.codes].unflatten(-1, (run.num_blocks, -1))
        scales = packed[..., run.scales].view(torch.float32).unsqueeze(-1)
        return codes, scales


class ErrorFeedback:
    """`ErrorFeedback` keeps the int4 rounding errors of gradients that this rank has sent; see [Note: error feedback].

    The errors of all N elements of a unit are kept in int8 on every rank, from its first reduction on.

    Args:
        beta: weight of the former errors, 0 <= beta < 1.
        reset_steps: number of steps after which errors are reset to zero.
    """

    def __init__(self, beta: float, reset_steps: int) -> None:
        self.beta = beta
        self.reset_steps = reset_steps
        self._num_steps = 0  # since errors were reset
        self._errors: dict[str | int | None, Tensor] = {}  # by key of `pack`: packed errors, (W, B)

    def pack(self, key: str | int | None, parts_WS: Tensor, sent_WB: Tensor) -> None:
        """Pack `parts_WS` plus the errors of `key`, in int4, into `sent_WB`, and keep the new errors."""
        world_size, numel = parts_WS.shape
        run_numel = RUN_NUMEL if parts_WS.device.type == "cpu" else DEVICE_RUN_NUMEL
        sending, resting = (ShardPacking(numel, bits, run_numel) for bits in (GRADIENT_BITS, ERROR_BITS))
        errors_WB = self._errors.get(key)
        if errors_WB is None:  # zero bytes unpack to zeros
            shape = world_size, resting.num_bytes
            errors_WB = self._errors[key] = torch.zeros(shape, dtype=torch.int8, device=parts_WS.device)
        for part_S, error_B, sent_B in zip(parts_WS, errors_WB, sent_WB, strict=True):
            for sent, kept in zip(sending.runs, resting.runs, strict=True):
                error = resting.unpack_run(kept, error_B, torch.float32)
                wanted = error + part_S[sent.elements]
                sending.pack_run(sent, wanted, sent_B)
                wanted.sub_(sending.unpack_run(sent, sent_B, torch.float32))
                error.mul_(self.beta).add_(wanted, alpha=1 - self.beta).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                resting.pack_run(kept, error, error_B)

    def end_step(self, *, keeps: bool) -> None:
        """End a step. `keeps`: whether its gradients were used and the next gradients have the same loss scale."""
        self._num_steps += 1
        if not keeps or self._num_steps >= self.reset_steps:
            self.drop()

    def drop(self) -> None:
        """Reset the errors to zero and free their memory."""
        self._errors.clear()
        self._num_steps = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the errors."""
        return sum(errors_WB.nbytes for errors_WB in self._errors.values())


def _is_quantized(ranks: GroupBackend, shard_S: Tensor) -> bool:
    return ranks.world_size > 1 and shard_S.numel() > 0 and shard_S.dtype in FLOATS


def _allocate(ranks: GroupBackend, packing: ShardPacking, device: torch.device) -> Tensor:
    """Allocate a packed shard for each rank, (W, B)."""
    numel = ranks.world_size * packing.num_bytes
    return ranks.allocate(numel, torch.int8, device).view(ranks.world_size, packing.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
