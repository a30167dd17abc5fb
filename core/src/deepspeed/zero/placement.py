"""`Placement` says where the optimizer's side of the owned shard lives, `ShardHome` where stage 3 keeps the weights.

Master weights, optimizer states and reduced gradients have a `Placement`. The class itself is the answer "beside the
weights": nothing is copied. `offload/host.py` is another, host memory, and `offload/nvme.py` the third, swap files.
`offload/policy.py` chooses. A stage calls, in this order, and does not look which of them it has:

    1. prepare                         once
       of_unit                         per unit: its own placement, where `ratio` divides them
       allocate, put_away              per unit: memory of its master weights; they, and states that exist, are final
    2. home_of_gradients               per unit: memory of its reduced gradients
    3. keeper                          per bucket; what it gives is called after each reduction
    4. settle                          every gradient of the step is where the optimizer reads it
    5. norms                           of what arrived
    6. plan                            before each update, where `fetches`
       fetch, copies, send, store      around the update of each batch
       finish_sending                  after the last
    7. forget                          with the gradients of the step

Whoever reads or writes a master weight, a state or a reduced gradient outside of an update calls `read` and `write`,
tensor by tensor: in swap files they have no memory then.

`ShardHome` is the contract of where stage 3 keeps the shard of a unit between its all-gathers, if not beside the whole
parameters: `offload_param` and `zero.Init(remote_device=...)` ask for it. `HostShards` in `offload/host.py` and
`offload/policy.py` answer it. A unit (`param_unit.py`) calls, in this order:

    1. keep         once, with the values of its shard
    2. read_ahead   when its next all-gather is expected soon; only a hint
    3. prepare      before that all-gather: the only call that may fail because values are lost
    4. copied_to    around the all-gather, which then reads the copy
    5. arrived      when that all-gather is over
    6. settle       before values are stored by others than the unit
    7. store        new values, part by part

`SecondaryShard` is a second copy of the weights, beside it.

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


#: what `read` and `write` call the tensors of a shard that are not states of the optimizer
MASTER = "master weights"
GRADIENT = "reduced gradients"

#: called by a bucket with the index of its unit, its reduction in flight and the memory that gets this rank's sum.
#: Returns what to wait for before that memory is written again
Keep = Callable[[int, Work, Tensor], Work]


class Placement:
    """`Placement` keeps master weights, states and reduced gradients beside the weights, in the accelerator's memory.

    Args:
        memory: for an accelerator whose memory is the host's: page-locks what the optimizer keeps, on request.
    """

    #: whether it is in another memory than the weights
    is_offloaded = False
    #: master weights, states and reduced gradients have memory between `fetch` and `store` only
    fetches = False
    #: reductions in flight after which a launch finishes the oldest, so that it is kept while the backward runs
    max_in_flight: int | None = None

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._host = memory

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose contents do not matter yet, where the reduced gradients of this rank can be left."""
        return tensor if self._host is None else self._host.pinned(tensor)

    def prepare(
        self, optimizer: Optimizer, numel: int, gradient_dtype: torch.dtype, *, max_sub_group_numel: int
    ) -> None:
        """See that there is room, before anything is laid out.

        Args:
            numel: of this rank's shards of all units, about.
            gradient_dtype: of the reduced gradients.
            max_sub_group_numel: of a sub-group, as the user bounds it; one that is a single shard may have more.

        Raises:
            ConfigError: there is not.
        """

    def of_unit(self, numel: int) -> Placement:
        """The placement of the next unit, which has `numel` elements on all ranks together. All ranks get the same."""
        return self

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, *, crosses: bool) -> Tensor:
        """An uninitialized 1-D tensor for master weights.

        Args:
            device: of the weights.
            crosses: whether it is copied to the weights as it is.
        """
        return self.pinned(torch.empty(numel, dtype=dtype, device=device))

    def put_away(self, optimizer: Optimizer, sub_groups: Sequence[SubGroup], gradient_dtype: torch.dtype) -> None:
        """The master weights of a unit have their values, and its states those that the optimizer was given with.

        Args:
            sub_groups: the unit's, in their order: they lie end to end from the beginning of this rank's shard on.
            gradient_dtype: of the reduced gradients.
        """

    def put_away_state(self, shard: ParamShard, state: dict[str, Any]) -> None:
        """The optimizer's state of one shard was replaced, as by a load."""

    def read(self, shard: ParamShard, name: str, value: Any) -> Any:
        """The values of a tensor of `shard`, in its shape, to be read and not written.

        Args:
            name: `MASTER`, `GRADIENT` or that of a state.
            value: what the shard, or the optimizer's state, has under that name.
        """
        return value

    def write(self, shard: ParamShard, name: str, value: Tensor | None, new: Tensor) -> None:
        """Give such a tensor other values.

        Args:
            new: of as many elements, in any shape, on any device.
        """
        assert value is not None
        value.data.view(-1).copy_(new.reshape(-1))

    def home_of_gradients(self, unit: Unit, own_S: Tensor) -> Tensor:
        """Return the memory where the optimizer finds this rank's reduced gradients; called in the order of the units.

        Args:
            own_S: this rank's part of what the unit's bucket lives in; empty where they live in buffers of a pool.
        """
        return own_S

    def keeper(self, *, adds: bool) -> Keep | None:
        """Return the function that takes a sum of this rank out of its bucket; None if sums stay where they are.

        Args:
            adds: whether a sum joins what is there of this step, instead of replacing it.
        """
        return None

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] zeros for one save or load, as large as this rank's part of a group of parameters.

        Args:
            device: of what is copied into it.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def settle(self) -> None:
        """Return when every sum that was taken can be read by the host."""

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """0-D norms of the reduced gradients, which are as `home_of_gradients` gave them."""
        return exact_norms(reduced)

    def gradients_changed(self) -> None:
        """Reduced gradients were written from outside."""

    def plan(self, optimizer: Optimizer, updated: Sequence[Sequence[ParamShard]]) -> None:
        """Prepare the update that begins.

        Args:
            optimizer: the optimizer that has the states.
            updated: the shards that are updated, by batch, in the order of `fetch`; empty batches are not fetched.
        """

    def fetch(self, number: int) -> None:
        """Master weights, states and gradients of the batch `number` have memory and values until `store`."""

    def store(self, number: int) -> None:
        """The update of the batch `number` is over."""

    def copies(self, shards: Sequence[ParamShard]) -> list[Tensor]:
        """Return the tensors to which the update of `shards` writes the weights, rounded to the model's dtype.

        Each has the shape of its master weight. There are none where the master weights themselves are what the
        weights become.
        """
        return [shard.weight for shard in shards if shard.has_master]

    def send(self, shards: Sequence[ParamShard], copies: Sequence[Tensor]) -> None:
        """The master weights of `shards` and their `copies` are final: bring them into the weights."""

    def finish_sending(self) -> None:
        """Return when master weights and copies may be written again."""

    def forget(self) -> None:
        """Forget every gradient."""

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between steps for copies; no states."""
        return 0

    def release(self) -> None:
        """Give back the memory that is held for copies."""


def read(norms: Sequence[Tensor]) -> list[float]:
    """0-D tensors as numbers, with one wait for all that are on a device."""
    values = [float(norm) for norm in norms if norm.device.type == "cpu"]
    on_device = [norm for norm in norms if norm.device.type != "cpu"]
    return values + (torch.stack(on_device).tolist() if on_device else [])


def exact_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """`exact_norm` of each. On a device they are one call, as every call costs the host more than the device."""
    many = [each for each in gradients if _is_plain_on_device(each)]
    if len(many) < 2:
        return [exact_norm(each) for each in gradients]
    norms = iter(torch._foreach_norm([each.reshape(-1) for each in many], 2, dtype=torch.float32))
    return [next(norms) if _is_plain_on_device(each) else exact_norm(each) for each in gradients]


def _is_plain_on_device(gradients: Tensor) -> bool:
    is_narrow = gradients.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_narrow and gradients.device.type != "cpu" and gradients.numel() > 0


def exact_norm(gradients: Tensor) -> Tensor:
    """L2 norm, 0-D on their device; of few elements on the host in fp64, so that no cut changes it."""
    if gradients.is_complex():
        gradients = torch.view_as_real(gradients)
    if gradients.numel() <= 2**16 and gradients.device.type == "cpu":  # some devices lack fp64
        return torch.linalg.vector_norm(gradients, dtype=torch.float64)
    return tensor_norm(gradients)


class OffloadedShard(ABC):
    """This rank's shard of one unit.

    Args:
        shard_S: its memory; on the meta device if it has none.
    """

    def __init__(self, shard_S: Tensor) -> None:
        self.shard_S = shard_S

    def read_ahead(self) -> bool:
        """Bring the values nearer; False: nothing to do, or no room to do it for this unit and those after it."""
        return False

    @abstractmethod
    def prepare(self) -> None:
        """The values are about to be copied.

        Raises:
            OSError: they are lost.
        """

    @abstractmethod
    def copied_to(self, part_S: Tensor) -> AbstractContextManager[None]:
        """Starts to copy the values to `part_S`, in the accelerator's memory; what is issued inside comes after it."""

    @abstractmethod
    def arrived(self) -> None:
        """The computation that follows comes after that copy."""

    @abstractmethod
    def settle(self) -> None:
        """Forget what was read ahead, and return when nothing reads the values any more."""

    @abstractmethod
    def load(self, start: int, numel: int) -> Tensor:
        """The elements [start, start + numel), in host memory; to be read only."""

    @abstractmethod
    def target(self, start: int, numel: int) -> Tensor:
        """Host memory for new values of [start, start + numel), which `store` is then called with."""

    @abstractmethod
    def store(self, start: int, values: Tensor) -> None:
        """Keep new values, 1-D, from the element `start` on; of another dtype, they are rounded. Where they are in host
        memory they may not be changed before the next `settle`."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The elements [start, start + numel) of an offloaded shard."""

    shard: OffloadedShard
    start: int
    numel: int

    def load(self) -> Tensor:
        """Return these elements, in host memory; to be read only."""
        return self.shard.load(self.start, self.numel)

    def target(self) -> Tensor:
        """Return host memory for new values, which `store` is then called with."""
        return self.shard.target(self.start, self.numel)

    def store(self, values: Tensor) -> None:
        """Keep new values, of any shape, as `OffloadedShard.store` does."""
        self.shard.store(self.start, values.detach().view(-1))


class ShardHome(ABC):
    """Keeps the shards of the units of one engine."""

    #: as the configuration names it
    name = ""

    @abstractmethod
    def keep(self, values_S: Tensor, name: str) -> OffloadedShard | None:
        """Take over a shard, whose values are copied; None: it stays where it is.

        Args:
            name: of the unit, for errors.
        """

    def check(self) -> None:  # noqa: B027 - memory does not get lost
        """Called before all values are read for the last time.

        Raises:
            OSError: they are lost.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop all values."""


class SecondaryShard:
    """This rank's part of a second copy of a unit's weights, held by a small group of ranks. Owned by `ParamUnit`.

    The first all-gather after an update runs over all ranks. Each rank keeps its part of the result, and until the
    weights change again all-gathers run in the small group: that of the backward, and those of later micro-batches. It
    costs the weights in the model's dtype once per small group. N is the padded numel of the unit.

    Source: hpZ of G. Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.

    Args:
        ranks: the small group, whose size divides that of the group that shards the unit.
    """

    def __init__(self, ranks: GroupBackend) -> None:
        self.ranks = ranks
        self.shard: Tensor | None = None  # [N / ranks]
        self.is_exact = False  # as in `ParamUnit`
        self._is_current = False

    def serves(self, *, exact: bool) -> bool:
        """Whether an all-gather may run in the small group."""
        return self._is_current and (self.is_exact or not exact)

    def keep(self, full_N: Tensor, *, is_exact: bool) -> None:
        """Take this rank's part of the whole weights, if it has none of these weights yet."""
        if self._is_current:
            return
        part = full_N.view(self.ranks.world_size, -1)[self.ranks.rank]
        if self.shard is None:
            self.shard = torch.empty_like(part)
        self.shard.copy_(part)
        self.is_exact, self._is_current = is_exact, True

    def forget(self) -> None:
        """The weights change."""
        self._is_current = False
