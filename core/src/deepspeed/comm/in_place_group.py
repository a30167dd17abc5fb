"""`GroupBackend` over a `Backend`, which plugins of API 1.0 give: collectives in place, for all groups of the process.

Shape legend: N numel of a flat buffer, S numel of a shard.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Backend, Capabilities, Piece, Work
from deepspeed.comm.torch_group import TorchGroup
from deepspeed.comm.transports import TensorCollectives, Transport, copy
from deepspeed.comm.work import Followed, parts_of


class InPlaceGroup(TorchGroup):
    """A group whose collectives are those of `backend`; its all-to-all and barrier are torch's.

    Args:
        backend: of the process.
        group: this process is a member of it.
    """

    def __init__(self, backend: Backend, group: ProcessGroup) -> None:
        super().__init__(group)
        self.name = backend.name
        self.backend = backend

    @property
    def capabilities(self) -> Capabilities:
        """The backend's bucket sizes."""
        size, all_reduce_size = (
            self.backend.preferred_bucket_bytes(self.world_size, to_owners=owners) for owners in (True, False)
        )
        return Capabilities(False, super().capabilities.completes_on_host, size, all_reduce_size)

    @property
    def held_bytes(self) -> int:
        return self.backend.held_bytes

    def connect(self) -> None:
        """The backend's."""
        self.backend.connect(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """The backend's."""
        return self.backend.allocate(numel, dtype, device)

    def transport(self, device_type: str) -> Transport:
        """The backend, for every device."""
        return _InPlace(self.backend, self.group)

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """The backend's for its own works; for torch's, their streams wait."""
        own = [work.work for work in parts_of(works) if isinstance(work, _Unpolled)]
        self.backend.abandon(own, self.group, failed=failed)
        super().abandon([work for work in parts_of(works) if not isinstance(work, _Unpolled)], failed=False)

    def release(self) -> None:
        """The backend's."""
        self.backend.release()


class _InPlace(TensorCollectives):
    """The collectives out of place, made of those in place."""

    def __init__(self, backend: Backend, group: ProcessGroup) -> None:
        super().__init__(group)
        self._backend = backend

    def all_reduce(self, full_N: torch.Tensor, tag: str) -> Work:
        """As it is."""
        return _Unpolled(self._backend.reduce(full_N, self.group))

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, tag: str) -> Work:
        """A sum of W equal pieces, and a copy of the own one."""
        pieces = self._pieces(full_N)
        work = _Unpolled(self._backend.reduce_to_owners(full_N, pieces, self.group))
        return Followed(work, lambda: copy(self.part(full_N, self.rank), shard_S), in_poll=False)

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, tag: str) -> Work:
        """A copy to the own place, and a gather of W equal pieces."""
        copy(shard_S, self.part(full_N, self.rank))
        pieces = self._pieces(full_N)
        return _Unpolled(self._backend.gather_from_owners(full_N, pieces, self.group))

    def broadcast(self, tensor_N: torch.Tensor, source: int, tag: str) -> Work:
        """A gather of one piece."""
        return _Unpolled(self._backend.gather_from_owners(tensor_N, [Piece(0, tensor_N.numel(), source)], self.group))

    def _pieces(self, full_N: torch.Tensor) -> list[Piece]:
        """W equal parts, in the order of ranks."""
        size = full_N.numel() // self.world_size
        return [Piece(rank * size, (rank + 1) * size, rank) for rank in range(self.world_size)]


class _Unpolled:
    """A work of a plugin that was written before works had `poll`."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._is_over = False

    def poll(self) -> bool:
        """Whether it was waited for."""
        return self._is_over

    def wait(self) -> None:
        """The work's."""
        self.work.wait()
        self._is_over = True
