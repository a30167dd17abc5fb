"""`Keeping` keeps the inputs of a recomputed block until its backward: on a rank of a model, the host, in a buffer.

`Keeping.pack` takes a tensor away and `Keeping.unpack` brings it back, as hooks of autograd's saved tensors do. The
options add up: a tensor is first divided over the tensor-parallel ranks, then copied to the host, then into a slot.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import counted
from deepspeed.parallel.model_part import is_sharded


@dataclass(frozen=True)
class Kept:
    """A tensor that was taken away.

    stored: the tensor, this rank's part of it as a flat tensor, or a slot.
    shape: of the whole tensor; None: `stored` is the tensor itself.
    device: where it is needed again.
    ranks: those that have the other parts; None: `stored` is all of it.
    version: of `stored` where it has the memory of the tensor itself; None: it is a copy.
    """

    stored: "torch.Tensor | Slot"
    shape: torch.Size | None
    device: torch.device
    ranks: GroupBackend | None = None
    version: int | None = None

    def check(self) -> None:
        """Raise `RuntimeError`, as autograd does, if the tensor was changed in place."""
        if self.version is not None and isinstance(self.stored, torch.Tensor) and self.stored._version != self.version:
            raise RuntimeError(
                f"activation checkpointing: an input of shape {tuple(self.shape or self.stored.shape)} of a block was "
                "changed in place between its forward and its backward, which computes the block again from it: it has "
                f"version {self.stored._version}, and had {self.version}; change a clone of it"
            )


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
        partition: keep 1 / W of each tensor on each of the W tensor-parallel ranks, where they have equal ones; the
            whole is gathered in the backward.
        on_host: keep tensors of a device in host memory, page-locked.
        num_slots: number of inputs of each size that a buffer holds; None: no buffers, each tensor has its own memory.
        ranks: gives the tensor-parallel ranks of the model whose forward runs; None where they have different
            activations now, so that each keeps its own.
    """

    partition: bool = False
    on_host: bool = False
    num_slots: int | None = None
    ranks: Callable[[], GroupBackend | None] | None = None
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
            return Kept(tensor, None, tensor.device, version=_version(tensor))
        flat = tensor.detach().reshape(-1)
        ranks = self.ranks() if self.partition and self.ranks is not None else None
        if ranks is not None:
            flat = _own_part(flat, ranks)
        if self.on_host and flat.device.type != "cpu":
            flat = get_accelerator().pin_memory(torch.empty(flat.shape, dtype=flat.dtype)).copy_(flat)
        stored: torch.Tensor | Slot = flat
        if self.num_slots is not None:
            stored = self._slot(flat)
        elif ranks is not None and _memory(flat) == _memory(tensor):
            stored = flat.clone()  # or the part would keep the whole in memory
        is_shared = isinstance(stored, torch.Tensor) and _memory(stored) == _memory(tensor)
        return Kept(stored, tensor.shape, tensor.device, ranks, _version(tensor) if is_shared else None)

    def unpack(self, kept: Kept) -> torch.Tensor:
        """The tensor again. With `partition` a collective: the ranks of a model compute the same blocks again."""
        kept.check()
        stored = kept.stored
        if kept.shape is None:
            assert isinstance(stored, torch.Tensor)
            return stored
        flat = stored.tensor.clone() if isinstance(stored, Slot) else stored
        flat = flat.to(kept.device, non_blocking=True)
        if kept.ranks is not None:
            flat = _whole(flat, kept.ranks)[: kept.shape.numel()]
        return flat.view(kept.shape)

    def _slot(self, flat: torch.Tensor) -> Slot:
        assert self.num_slots is not None
        key = (flat.numel(), flat.dtype, flat.device)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self.num_slots, flat)
        if not pool.free:
            raise ValueError(
                f"activation checkpointing: number_checkpoints is {self.num_slots}, and one more input of "
                f"{counted(flat.numel(), 'element')} is to be kept; give the number of checkpoints between a forward "
                "and its backward, or call deepspeed.checkpointing.reset() after forwards without a backward"
            )
        slot = Slot(pool, pool.free.pop())
        slot.tensor.copy_(flat)
        return slot


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often the tensor was changed in place; None for an inference tensor, whose changes torch does not
    count, and for a sharded parameter, whose values come and go."""
    return None if tensor.is_inference() or is_sharded(tensor) else tensor._version


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_part(flat: torch.Tensor, ranks: GroupBackend) -> torch.Tensor:
    size = math.ceil(flat.numel() / ranks.world_size)
    start = min(ranks.rank * size, flat.numel())
    own = flat[start : start + size]
    return torch.nn.functional.pad(own, (0, size - own.numel())) if own.numel() < size else own


def _whole(part: torch.Tensor, ranks: GroupBackend) -> torch.Tensor:
    whole = ranks.allocate(part.numel() * ranks.world_size, part.dtype, part.device)
    ranks.all_gather(whole, part, tag="activations").wait()
    return whole
