"""A process group that its members make alone, while other ranks of the world are elsewhere.

torch has `new_group(ranks, use_local_synchronization=True)` for that, and names the group after its ranks and the
number of groups that this process is in. Members that are in different numbers of groups use different names, so each
waits for the others' addresses under its own; and a group that is made again after one was destroyed finds the
addresses of the former. So the name is given here. Called by `parallel/mesh.py`.
"""

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d

# By world group, how many groups of the same ranks were made: all members have made as many.
_num_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def group_of_members(ranks: Sequence[int]) -> ProcessGroup:
    """A new process group over the library of the world. Called by these ranks together, and by no other.

    Args:
        ranks: global ranks, of which this process is one.
    """
    world = torch_dist.group.WORLD
    assert world is not None
    members = tuple(sorted(ranks))
    num_made = _num_made.setdefault(world, Counter())
    name = f"deepspeed/{'_'.join(map(str, members))}/{num_made[members]}"
    num_made[members] += 1
    torchs_name = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return torch_dist.new_group(list(members), use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = torchs_name
