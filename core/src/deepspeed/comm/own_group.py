"""Process groups that their members make alone, while other ranks of the world are elsewhere.

`own_group` is one over gloo for the engine, where the library matches collectives by their order in a group.
The model may run collectives in its backward (experts, SyncBatchNorm), between which buckets are launched when they are
full: at places that differ between ranks which leave out different parameters. gloo would match a bucket here with the
model's collective there. Called by `TorchGroup.connect`.

`host_group` is one over host memory, where the library serves a device only. Called by `step_agreement.py`.

Torch's `new_group` needs all ranks of the world, or a name that the members agree on, and counts the
group among those of the process. So the groups are made of torch's classes, under a name that the ranks have met for.

`group_of_members` is one of `torch.distributed`, for the mesh. torch has
`new_group(ranks, use_local_synchronization=True)` for that, and names the group after its ranks and the
number of groups that this process is in. Members that are in different numbers of groups use different names, so each
waits for the others' addresses under its own; and a group that is made again after one was destroyed finds the
addresses of the former. From 2.14 on such a group counts on its members alone, so that the next `new_group` of the
world has another name on them than on other ranks, and hangs. torch has no public way to give a name (2.15), so the
function that makes it is replaced for the time of the call, and for the calling thread alone.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, distributed_c10d

from deepspeed.comm import failure
from deepspeed.comm.backend import is_gloo, timeout_of
from deepspeed.comm.values import Arrivals, all_gather_values, name_of
from deepspeed.errors import first_line
from deepspeed.log import warn_once

#: the ranks of a `host_group` begin together, and can do without it
CONNECT_LIMIT = timedelta(minutes=1)


def own_group(group: ProcessGroup, meet: Callable[[], str]) -> ProcessGroup:
    """A gloo group of the same ranks as `group`, with its timeout; `group` itself where it is not gloo's, or one rank.

    All ranks of `group` call it together. torch has no record of the new group, which ends when nothing refers to it;
    it is for functions of `torch.distributed` that take ranks within a group.

    Args:
        meet: waits until all ranks have come, and returns the same name on each.
    """
    if not is_gloo(group) or group.size() == 1:
        return group
    store = _store(meet())
    return _group_over(store, _connect(store, group.rank(), group.size(), timeout_of(group)))


def host_group(group: ProcessGroup, name: str) -> ProcessGroup | None:
    """A gloo group as `own_group` gives it, whatever the library of `group`; None on all ranks where a rank cannot
    connect to the others.

    All ranks of `group` call it together.

    Args:
        name: the same on all ranks, and of no other group.
    """
    store, rank, size = _store(name), group.rank(), group.size()
    limit = timeout_of(group)
    library, error = None, ""
    try:
        library = _connect(store, rank, size, min(CONNECT_LIMIT, limit))
    except RuntimeError as found:  # the network's; what torch's classes are asked for is outside this block
        error = first_line(found)
    for peer, its_error in enumerate(all_gather_values(error, group)):
        if its_error:
            warn_once(
                f"gloo finds no way from rank {peer} of a group to the hosts of its peers ({its_error}), so in each "
                "step the host waits for the device; set GLOO_SOCKET_IFNAME to the name of a network interface that "
                "reaches them"
            )
            return None
    assert library is not None
    library._set_default_timeout(limit)
    return _group_over(store, library)


def _store(name: str) -> PrefixStore:
    return PrefixStore(name, torch_dist.distributed_c10d._get_default_store())


def _connect(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Connect the ranks. Raises RuntimeError where gloo finds no way to a peer."""
    library = ProcessGroupGloo(store, rank, size, timeout)
    # a rank that drops the group at once would break the connections that a peer still makes
    library.barrier().wait()  # type: ignore[attr-defined]  # torch's stub lacks it
    return library


def _group_over(store: PrefixStore, library: ProcessGroupGloo) -> ProcessGroup:
    """The class that functions of `torch.distributed` take. It has no rank of its own before its backend is set."""
    own, kind = ProcessGroup(store, library.rank(), library.size()), ProcessGroup.BackendType.GLOO
    own._set_default_backend(kind)
    own._register_backend(torch.device("cpu"), kind, library)
    return own


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
    """Inside, torch calls a group that this thread makes `name`; groups of other threads keep torch's own names."""
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
