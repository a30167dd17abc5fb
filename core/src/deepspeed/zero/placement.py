"""`Placement` says where optimizer data of the owned shard is kept, `ShardHome` where stage 3 keeps the weights.

Master weights, optimizer states and reduced gradients have a `Placement`. The class `Placement` itself keeps them in
the memory of the weights, without copies. `offload/host.py` keeps them in host memory, `offload/nvme.py` in swap files.
`offload/policy.py` chooses. A stage makes the same calls, in this order, for each of them:

    1. prepare                         once
       of_unit                         per unit: its own placement, if `ratio` divides the units
       allocate, put_away              per unit: memory of its master weights; their values and states are final
    2. home_of_gradients               per unit: memory of its reduced gradients
    3. keeper                          per bucket: a function to call after each reduction
    4. settle                          every gradient of the step is where the optimizer reads it
    5. norms                           of the reduced gradients
    6. plan                            before each update, if `fetches`
       fetch, copies, send, store      around the update of each batch
       finish_sending                  after the last batch
    7. forget                          with the gradients of the step

Code that reads or writes a master weight, a state or a reduced gradient outside of an update calls `read` and `write`
for each tensor: in swap files the tensors have no memory then.

`ShardHome` is the interface for where stage 3 keeps the shard of a unit between its all-gathers, if not beside the
whole parameters. `offload_param` and `zero.Init(remote_device=...)` request it. `HostShards` in `offload/host.py` and
`offload/policy.py` implement it. A unit (`param_unit.py`) calls, in this order:

    1. keep         once, with the values of its shard
    2. read_ahead   when its next all-gather is expected soon; only a hint
    3. prepare      before that all-gather: the only call that may fail because values are lost
    4. copied_to    around the all-gather, which then reads the copy
    5. arrived      when that all-gather is finished
    6. settle       before code outside of the unit stores values
    7. store        new values, part by part

`SecondaryShard` is part of a second copy of the weights, for hpZ.

Legend: S numel of this rank's shard of a unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.optim.norm import tensor_norm

if TYPE_CHECKING:
    from deepspeed.zero.offload.buffers import HostMemory
    from deepspeed.zero.unit import ParamShard, SubGroup, Unit


#: names for `read` and `write` of the tensors of a shard that are not optimizer states
MASTER = "master weights"
GRADIENT = "reduced gradients"

#: a bucket calls it with the index of its unit, its reduction in flight and the memory for this rank's sum. It returns
#: the work to wait for before that memory is written again, if any
Keep = Callable[[int, Work, Tensor], Work | None]


class Placement:
    """`Placement` keeps master weights, states and reduced gradients beside the weights, in the accelerator's memory.

    Args:
        memory: page-locks optimizer data on request, for an accelerator whose memory is host memory.
    """

    #: whether optimizer data is in another memory than the weights
    is_offloaded = False
    #: whether master weights, states and reduced gradients have memory only between `fetch` and `store`
    fetches = False
    #: number of reductions in flight at which a launch finishes the oldest, so that it is stored during the backward
    max_in_flight: int | None = None

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._host = memory

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return `tensor` (contents arbitrary) or a replacement that can also hold this rank's reduced gradients."""
        return tensor if self._host is None else self._host.pinned(tensor)

    def prepare(
        self, optimizer: Optimizer, numel: int, gradient_dtype: torch.dtype, *, max_sub_group_numel: int
    ) -> None:
        """Check that there is room, before anything is laid out.

        Args:
            numel: approximate numel of this rank's shards of all units.
            gradient_dtype: dtype of the reduced gradients.
            max_sub_group_numel: the user's limit for a sub-group; a sub-group of a single shard may be larger.

        Raises:
            ConfigError: if there is no room.
        """

    def of_unit(self, numel: int) -> Placement:
        """Return the placement of the next unit, which has `numel` elements over all ranks. All ranks get the same."""
        return self

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, *, crosses: bool) -> Tensor:
        """Return an uninitialized 1-D tensor for master weights.

        Args:
            device: device of the weights.
            crosses: whether it is copied to the weights without conversion.
        """
        return self.pinned(torch.empty(numel, dtype=dtype, device=device))

    def put_away(self, optimizer: Optimizer, sub_groups: Sequence[SubGroup], gradient_dtype: torch.dtype) -> None:
        """Take over a unit whose master weights have their values, and whose states are those passed to `initialize`.

        Args:
            sub_groups: the unit's sub-groups in order: end to end from the beginning of this rank's shard.
            gradient_dtype: dtype of the reduced gradients.
        """

    def put_away_state(self, shard: ParamShard, state: dict[str, Any]) -> None:
        """Take over the new optimizer state of one shard, for example after a load."""

    def read(self, shard: ParamShard, name: str, value: Any) -> Any:
        """Return the values of a tensor of `shard`, in its shape; the caller must not write to them.

        Args:
            name: `MASTER`, `GRADIENT` or the name of a state.
            value: the tensor that the shard, or the optimizer's state, has under that name.
        """
        return value

    def write(self, shard: ParamShard, name: str, value: Tensor | None, new: Tensor) -> None:
        """Replace the values of such a tensor.

        Args:
            new: the same number of elements, in any shape, on any device.
        """
        assert value is not None
        value.data.view(-1).copy_(new.reshape(-1))

    def home_of_gradients(self, unit: Unit, own_S: Tensor) -> Tensor:
        """Return the memory where the optimizer finds this rank's reduced gradients; called in the order of the units.

        Args:
            own_S: this rank's part of the bucket's memory; empty if the bucket borrows its buffer from a pool.
        """
        return own_S

    def keeper(self, *, adds: bool) -> Keep | None:
        """Return the function that takes a sum of this rank out of its bucket; None if sums stay where they are.

        Args:
            adds: whether a sum is added to the existing sum of this step instead of replacing it.
        """
        return None

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [numel] zeros for one save or load, as large as this rank's part of a param group.

        Args:
            device: device of the values that are copied into it.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def settle(self) -> None:
        """Return when the CPU can read every sum that was taken."""

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Return 0-D norms of the reduced gradients, which are the tensors of `home_of_gradients`."""
        return exact_norms(reduced)

    def gradients_changed(self) -> None:
        """Note that reduced gradients were written from outside."""

    def plan(self, optimizer: Optimizer, updated: Sequence[Sequence[ParamShard]]) -> None:
        """Prepare the update that begins.

        Args:
            optimizer: the optimizer with the states.
            updated: the shards to update, by batch, in the order of `fetch`; empty batches are not fetched.
        """

    def fetch(self, number: int) -> None:
        """Give the batch `number` of master weights, states and gradients memory and values until `store`."""

    def store(self, number: int) -> None:
        """End the update of the batch `number`."""

    def copies(self, shards: Sequence[ParamShard]) -> list[Tensor]:
        """Return the tensors to which the update of `shards` writes the weights, rounded to the model's dtype.

        Each has the shape of its master weight. The list is empty if the weights are the master weights themselves.

        """
        return [shard.weight for shard in shards if shard.has_master]

    def send(self, shards: Sequence[ParamShard], copies: Sequence[Tensor]) -> None:
        """Copy the final master weights of `shards` and their `copies` to the weights."""

    def finish_sending(self) -> None:
        """Return when master weights and copies may be written again."""

    def forget(self) -> None:
        """Forget every gradient."""

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between steps for copies, without states."""
        return 0

    def release(self) -> None:
        """Free the memory that is held for copies."""


def read(norms: Sequence[Tensor]) -> list[float]:
    """Return 0-D tensors as numbers; wait only once for all those on a device."""
    values = [float(norm) for norm in norms if norm.device.type == "cpu"]
    on_device = [norm for norm in norms if norm.device.type != "cpu"]
    return values + (torch.stack(on_device).tolist() if on_device else [])


def exact_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return `exact_norm` of each, on a device in one call, since a call costs more on the CPU than on the device."""
    many = [each for each in gradients if _is_plain_on_device(each)]
    if len(many) < 2:
        return [exact_norm(each) for each in gradients]
    norms = iter(torch._foreach_norm([each.reshape(-1) for each in many], 2, dtype=torch.float32))
    return [next(norms) if _is_plain_on_device(each) else exact_norm(each) for each in gradients]


def _is_plain_on_device(gradients: Tensor) -> bool:
    is_narrow = gradients.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_narrow and gradients.device.type != "cpu" and gradients.numel() > 0


def exact_norm(gradients: Tensor) -> Tensor:
    """Return the L2 norm, 0-D on the same device. Small CPU tensors use fp64, so that cuts do not change the norm."""
    if gradients.is_complex():
        gradients = torch.view_as_real(gradients)
    if gradients.numel() <= 2**16 and gradients.device.type == "cpu":  # some devices lack fp64
        return torch.linalg.vector_norm(gradients, dtype=torch.float64)
    return tensor_norm(gradients)


class OffloadedShard(ABC):
    """`OffloadedShard` is this rank's shard of one unit, kept in other memory.

    Args:
        shard_S: memory of the shard; on the meta device if it has none.
    """

    def __init__(self, shard_S: Tensor) -> None:
        self.shard_S = shard_S

    def read_ahead(self) -> bool:
        """Start to read the values. False: nothing to do, or no room for this unit and the units after it."""
        return False

    @abstractmethod
    def prepare(self) -> None:
        """Prepare to copy the values.

        Raises:
            OSError: if the values are lost.
        """

    @abstractmethod
    def copied_to(self, part_S: Tensor) -> AbstractContextManager[None]:
        """Start the copy to `part_S`, in the accelerator's memory; work issued inside the context runs after it."""

    @abstractmethod
    def arrived(self) -> None:
        """Order the computation that follows after that copy."""

    @abstractmethod
    def settle(self) -> None:
        """Forget values that were read ahead; return when nothing reads the values any more."""

    @abstractmethod
    def load(self, start: int, numel: int) -> Tensor:
        """Return the elements [start, start + numel) in host memory; read-only."""

    @abstractmethod
    def target(self, start: int, numel: int) -> Tensor:
        """Return host memory for new values of [start, start + numel); the caller passes it to `store`."""

    @abstractmethod
    def store(self, start: int, values: Tensor) -> None:
        """Store new values, 1-D, from the element `start` on; another dtype is rounded. If `values` is in host memory,
        it must not change before the next `settle`."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """`StoredPart` is the elements [start, start + numel) of an offloaded shard."""

    shard: OffloadedShard
    start: int
    numel: int

    def load(self) -> Tensor:
        """Return these elements in host memory; read-only."""
        return self.shard.load(self.start, self.numel)

    def target(self) -> Tensor:
        """Return host memory for new values; the caller passes it to `store`."""
        return self.shard.target(self.start, self.numel)

    def store(self, values: Tensor) -> None:
        """Store new values, of any shape, as `OffloadedShard.store` does."""
        self.shard.store(self.start, values.detach().view(-1))


class ShardHome(ABC):
    """`ShardHome` keeps the shards of the units of one engine."""

    #: its name in the configuration
    name = ""

    @abstractmethod
    def keep(self, values_S: Tensor, name: str) -> OffloadedShard | None:
        """Take over a shard and copy its values. None: the shard stays where it is.

        Args:
            name: name of the unit, for errors.
        """

    def check(self) -> None:  # noqa: B027 - values in memory cannot be lost
        """Check that all values are readable, before they are read for the last time.

        Raises:
            OSError: if values are lost.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop all values."""


class SecondaryShard:
    """This rank's part of a second copy of a unit's weights, held by a small group of ranks. Owned by `ParamUnit`.

    The first all-gather after an update runs over all ranks, and each rank keeps its part of the result. Until the
    weights change again, all-gathers run in the small group: in the backward and in later micro-batches. The copy costs
    the weights in the model's dtype once per small group. N is the padded numel of the unit.

    Source: hpZ of G. Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.

    Args:
        ranks: the small group; its size divides the size of the unit's shard group.
    """

    def __init__(self, ranks: GroupBackend) -> None:
        self.ranks = ranks
        self.shard: Tensor | None = None  # [N / ranks]
        self.is_exact = False  # see `ParamUnit`
        self._is_current = False

    def serves(self, *, exact: bool) -> bool:
        """Return whether an all-gather may run in the small group."""
        return self._is_current and (self.is_exact or not exact)

    def keep(self, full_N: Tensor, *, is_exact: bool) -> None:
        """Keep this rank's part of the whole weights, unless it has a current copy."""
        if self._is_current:
            return
        part = full_N.view(self.ranks.world_size, -1)[self.ranks.rank]
        if self.shard is None:
            self.shard = torch.empty_like(part)
        self.shard.copy_(part)
        self.is_exact, self._is_current = is_exact, True

    def forget(self) -> None:
        """Invalidate the copy, because the weights change."""
        self._is_current = False
