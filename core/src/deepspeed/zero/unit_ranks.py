"""Over which ranks a unit is sharded, and over which its gradients are summed.

    parameters              `shards`             `replicas`         `near`         `everyone`
    of all ranks            data group           None               None           data group
    of all ranks, MiCS      shard group          replicate group    None           data group
    of all ranks, hpZ       data group           None               shard group    data group
    of experts              expert data group    None               None           expert data group
    of several stages       data group           their peers        None           data group

The data group is dp x sp of the mesh (`mesh.gradient_group()`), the expert data group the ranks that hold the same
experts (`mesh.gradient_group(ep_size)`).

[Note: the average] A gradient is the sum over `everyone` divided by the size of the *data group*, also that of an
expert. Experts get the tokens of all ranks, whose losses are averaged over the data group: so this is the gradient of
the mean loss, and does not depend on `ep_size`. The gradient of a parameter that several pipeline stages hold is the
sum over the stages, as in a model on one rank that uses it several times.

MiCS: arXiv 2205.00119. hpZ: ZeRO++, arXiv 2306.10209, section 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend


@dataclass(frozen=True)
class UnitRanks:
    """The groups of a unit.

    Args:
        shards: hold the shards of one copy of the weights.
        everyone: hold the same parameters, whose gradients are summed over them.
        replicas: hold the same shard, one in each copy; None: there is one copy.
        near: hold a second copy of the weights together (hpZ); None: there is none.
        copies: by copy and shard, the rank of its holder within `everyone`; empty: one copy, in the order of ranks.
        is_tied: the replicas are other pipeline stages, which use the parameter in other layers.
        part: which of `num_parts` sets of parameters this rank holds; experts of other ranks are other parameters.
    """

    shards: GroupBackend
    everyone: GroupBackend
    replicas: GroupBackend | None = None
    near: GroupBackend | None = None
    copies: tuple[tuple[int, ...], ...] = ()
    part: int = 0
    num_parts: int = 1
    is_tied: bool = False

    @classmethod
    def over(cls, ranks: GroupBackend, *, part: int = 0, num_parts: int = 1) -> "UnitRanks":
        """One copy, sharded over `ranks`."""
        return cls(ranks, ranks, part=part, num_parts=num_parts)

    @property
    def world_size(self) -> int:
        """Number of shards."""
        return self.shards.world_size

    @property
    def rank(self) -> int:
        """Which of them this rank holds."""
        return self.shards.rank

    def holders(self, shard: int) -> tuple[int, ...]:
        """Ranks within `everyone` that hold a shard, one in each copy."""
        return tuple(copy[shard] for copy in self.copies) or (shard,)

    def counted(self, gradients_S: Tensor) -> Tensor:
        """What this rank adds to the norm of gradients that all copies have."""
        if self.replicas is None:
            return gradients_S
        return gradients_S.tensor_split(self.replicas.world_size)[self.replicas.rank]


def source_in(group: ProcessGroup, global_rank: int) -> int:
    """The rank within `group` of a global rank; the first where that is no member, as of a group of experts."""
    members = torch.distributed.get_process_group_ranks(group)
    return members.index(global_rank) if global_rank in members else 0
