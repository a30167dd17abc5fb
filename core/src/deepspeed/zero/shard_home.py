"""Where stage 3 keeps the shard of a unit between its all-gathers, if not beside the whole parameters.

Asked for by `offload_param` and by `zero.Init(remote_device=...)`.

`ShardHome` is the contract; `offload/host_shards.py` answers it, and `offload/policy.py` chooses. A unit
(`param_unit.py`) calls, in this order:

    1. keep         once, with the values of its shard: an `OffloadedShard`, whose `shard_S` has them from then on
    2. copied_to    around the all-gather, which then reads the copy
    3. arrived      when that all-gather is over
    4. settle       before `shard_S` is written, or read again after it was written

Legend: S numel of a shard.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from torch import Tensor


class OffloadedShard(ABC):
    """This rank's shard of one unit.

    Args:
        shard_S: its memory, whose views stay valid.
    """

    def __init__(self, shard_S: Tensor) -> None:
        self.shard_S = shard_S

    @abstractmethod
    def copied_to(self, part_S: Tensor) -> AbstractContextManager[None]:
        """Starts to copy the values to `part_S`, in the accelerator's memory; what is issued inside comes after it."""

    @abstractmethod
    def arrived(self) -> None:
        """The computation that follows comes after that copy."""

    @abstractmethod
    def settle(self) -> None:
        """Return when nothing reads `shard_S` any more."""


class ShardHome(ABC):
    """Keeps the shards of the units of one engine."""

    #: as the configuration names it
    name = ""

    @abstractmethod
    def keep(self, values_S: Tensor) -> OffloadedShard:
        """Take over a shard; `values_S` are copied."""
