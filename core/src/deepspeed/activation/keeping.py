"""Where the inputs of a recomputed block are kept until its backward: on a rank of a model, the host, in a buffer.

`Keeping.pack` takes a tensor away and `Keeping.unpack` brings it back, as hooks of autograd's saved tensors do. The
options add up: a tensor is first divided over the tensor-parallel ranks, then copied to the host, then into a slot.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend


@dataclass(frozen=True)
class Kept:
    """A tensor that was taken away.

    stored: the tensor, this rank's part of it as a flat tensor, or a slot.
    shape: of the whole tensor; None: `stored` is the tensor itself.
    device: where it is needed again.
    """

    stored: "torch.Tensor | Slot"
    shape: torch.Size | None
    device: torch.device


class Slot:
    """A part of a buffer; free again when nothing refers to it."""

    def __init__(self, pool: "_Pool", number: int) -> None:
        self._pool, self._number = pool, number

    def __del__(self) -> None:
        self._pool.free.append(self._number)

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory, flat."""
        return self._pool.buffer[self._number]


class _Pool:
    """One buffer of equal slots."""

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        self.buffer = torch.empty(num_slots, like.numel(), dtype=like.dtype, device=like.device)
        self.free = list(range(num_slots))[::-1]


@dataclass
class Keeping:
    """The options, and the buffers that they need.

    Args:
        partition: keep 1 / W of each tensor on each of the W tensor-parallel ranks, which have equal ones; the whole is
            gathered in the backward.
        on_host: keep tensors of a device in host memory, page-locked.
        num_slots: number of inputs of each size that a buffer holds; None: no buffers, each tensor has its own memory.
        backend: of the tensor-parallel ranks, asked at the first use.
    """

    partition: bool = False
    on_host: bool = False
    num_slots: int | None = None
    backend: Callable[[], GroupBackend] | None = None
    _pools: dict[tuple[int, torch.dtype, torch.device], _Pool] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether tensors stay as they are."""
        return not (self.partition or self.on_host or self.num_slots)

    def reset(self) -> None:
        """Drop the buffers; slots that are in use keep theirs until their backward."""
        self._pools = {}

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor. Parameters, and what has no floating-point numbers, stay as they are.

        Raises:
            ValueError: if all slots are in use.
        """
        if self.is_plain or isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return Kept(tensor, None, tensor.device)
        flat = tensor.detach().reshape(-1)
        if self.partition:
            flat = self._own_part(flat)
        if self.on_host and flat.device.type != "cpu":
            flat = get_accelerator().pin_memory(torch.empty(flat.shape, dtype=flat.dtype)).copy_(flat)
        stored: torch.Tensor | Slot = flat
        if self.num_slots is not None:
            stored = self._slot(flat)
        elif flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and self.partition:
            stored = flat.clone()  # or the part would keep the whole in memory
        return Kept(stored, tensor.shape, tensor.device)

    def unpack(self, kept: Kept) -> torch.Tensor:
        """The tensor again. With `partition` a collective: the ranks of a model compute the same blocks again."""
        stored = kept.stored
        if kept.shape is None:
            assert isinstance(stored, torch.Tensor)
            return stored
        flat = stored.tensor.clone() if isinstance(stored, Slot) else stored
        flat = flat.to(kept.device, non_blocking=True)
        if self.partition:
            flat = self._whole(flat)[: kept.shape.numel()]
        return flat.view(kept.shape)

    def _own_part(self, flat: torch.Tensor) -> torch.Tensor:
        backend = self._backend()
        size = math.ceil(flat.numel() / backend.world_size)
        start = min(backend.rank * size, flat.numel())
        own = flat[start : start + size]
        return torch.nn.functional.pad(own, (0, size - own.numel())) if own.numel() < size else own

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        backend = self._backend()
        whole = backend.allocate(part.numel() * backend.world_size, part.dtype, part.device)
        backend.all_gather(whole, part, tag="activations").wait()
        return whole

    def _backend(self) -> GroupBackend:
        assert self.backend is not None
        return self.backend()

    def _slot(self, flat: torch.Tensor) -> Slot:
        assert self.num_slots is not None
        key = (flat.numel(), flat.dtype, flat.device)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self.num_slots, flat)
        if not pool.free:
            raise ValueError(
                f"activation checkpointing: number_checkpoints is {self.num_slots}, and one more input of "
                f"{flat.numel()} elements is to be kept; give the number of checkpoints between a forward and its "
                "backward, or call deepspeed.checkpointing.reset() after forwards without a backward"
            )
        slot = Slot(pool, pool.free.pop())
        slot.tensor.copy_(flat)
        return slot
