"""A process group that its members make alone, while other ranks of the world are elsewhere.

torch has `new_group(ranks, use_local_synchronization=True)` for that, and names the group after its ranks and the
number of groups that this process is in. Members that are in different numbers of groups use different names, so each
waits for the others' addresses under its own; and a group that is made again after one was destroyed finds the
addresses of the former. From 2.14 on such a group counts on its members alone, so that the next `new_group` of the
world has another name on them than on other ranks, and hangs. torch has no public way to give a name (2.15), so the
function that makes it is replaced for the time of the call, and for the calling thread alone. Called by
`parallel/mesh.py`.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d

from deepspeed.comm import failure
from deepspeed.comm.arrivals import Arrivals, name_of
from deepspeed.comm.libraries import timeout_of

# By world group, how many groups of the same ranks were made: all members have made as many.
_num_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
_arrivals: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Arrivals]] = WeakKeyDictionary()
_lock = threading.Lock()  # not held while a group is made, for which this rank waits for others
_thread = threading.local()  # `name`: of the group that the thread makes
_num_threads = 0  # that make one
_torchs_name = distributed_c10d._process_group_name


def group_of_members(ranks: Sequence[int]) -> ProcessGroup:
    """A new process group over the library of the world, with its timeout. Called by these ranks together, and by no
    other.

    Args:
        ranks: global ranks, of which this process is one.

    Raises:
        CommError: not all of them came, or one has failed before.
    """
    world = torch_dist.group.WORLD
    assert world is not None
    members = tuple(sorted(ranks))
    with _lock:
        num_made = _num_made.setdefault(world, Counter())
        name = f"deepspeed/{name_of(members)}/{num_made[members]}"
        limit_s = timeout_of(world).total_seconds()
        of_world = _arrivals.setdefault(world, {})
        if members not in of_world:
            of_world[members] = Arrivals(members, f"members {name_of(members)}", limit_s, failure.unheard)
    if len(members) > 1:  # nobody can leave while the library connects them
        of_world[members].wait_for_all(f"the first collective of a new group of {len(members)} ranks")
    with _named(name):
        group = torch_dist.new_group(list(members), timeout=timeout_of(world), use_local_synchronization=True)
    with _lock:
        num_made[members] += 1  # ranks of which one fails here try the same name again
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, torch calls a group that this thread makes `name`; those of other threads as always."""
    global _num_threads
    with _lock:
        _num_threads += 1
        distributed_c10d._process_group_name = _name_of  # type: ignore[assignment]  # newer ones return a NewType of str
    _thread.name = name
    try:
        yield
    finally:
        del _thread.name
        with _lock:
            _num_threads -= 1
            if _num_threads == 0:
                distributed_c10d._process_group_name = _torchs_name


def _name_of(ranks: list[int], use_hashed_name: bool) -> str:
    given: str | None = getattr(_thread, "name", None)
    return _torchs_name(ranks, use_hashed_name=use_hashed_name) if given is None else given
