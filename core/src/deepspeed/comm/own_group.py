"""Process groups that only their members create, while other ranks of the world are elsewhere.

`own_group` creates a gloo group for the engine, since gloo matches collectives by their order in a group. The model may
run collectives in its backward (experts, SyncBatchNorm), and the engine launches each bucket between them when the
bucket is full. That place differs between ranks that skip different parameters. In a shared group, gloo would match a
bucket of one rank with the model's collective of another. `Watch.connect` calls it.

`host_group` creates a gloo group over host memory if the library serves only a device. `step_agreement.py` calls it.

Torch's `new_group` needs all ranks of the world, or a name that the members agree on, and registers the group in the
process. So these two functions build groups from torch's classes, under a name that the ranks have agreed on.

`group_of_members` creates a registered group of `torch.distributed`, for the mesh. torch has
`new_group(ranks, use_local_synchronization=True)` for that, and names the group after its ranks and the number of
groups of this process. Members with different numbers of groups use different names, so each waits for the others'
addresses under its own name; and a group that is created again after it was destroyed finds the old addresses. From
torch 2.14 on only the members count such a group, so the next `new_group` of the world has different names on members
and other ranks, and hangs. torch has no public way to give a name (2.15), so the function that makes the name is
replaced during the call, for the calling thread only.
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

#: timeout for connecting a `host_group`: its ranks begin together, and can do without the group
CONNECT_LIMIT = timedelta(minutes=1)


def own_group(group: ProcessGroup, meet: Callable[[], str]) -> ProcessGroup:
    """Create a gloo group with the ranks and the timeout of `group`. Returns `group` itself if gloo does not serve it
    or it has one rank. All ranks of `group` call this together. torch does not register the new group; it ends when
    nothing refers to it. Use it with functions of `torch.distributed` that take ranks within a group.

    Args:
        meet: waits for all ranks, and returns the same name on each.
    """
    if not is_gloo(group) or group.size() == 1:
        return group
    store = _store(meet())
    return _group_over(store, _connect(store, group.rank(), group.size(), timeout_of(group)))


def host_group(group: ProcessGroup, name: str) -> ProcessGroup | None:
    """Create a gloo group like `own_group`, whatever the library of `group`. Returns None on all ranks if any rank
    cannot connect to the others.

    All ranks of `group` call it together.

    Args:
        name: equal on all ranks, and unique among groups.
    """
    store, rank, size = _store(name), group.rank(), group.size()
    limit = timeout_of(group)
    library, error = None, ""
    try:
        library = _connect(store, rank, size, min(CONNECT_LIMIT, limit))
    except RuntimeError as found:  # a network error; calls of other torch classes stay outside this block
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
    """Connect the ranks. Raises RuntimeError if gloo cannot reach a peer."""
    library = ProcessGroupGloo(store, rank, size, timeout)
    # without a barrier, a rank that drops the group at once would break connections that a peer is still making
    library.barrier().wait()  # type: ignore[attr-defined]  # torch's stub lacks it
    return library


def _group_over(store: PrefixStore, library: ProcessGroupGloo) -> ProcessGroup:
    """Wrap `library` in the class that functions of `torch.distributed` take."""
    own, kind = ProcessGroup(store, library.rank(), library.size()), ProcessGroup.BackendType.GLOO
    own._set_default_backend(kind)
    own._register_backend(torch.device("cpu"), kind, library)
    return own


# By world group and ranks, the number of groups made: all members have made equally many.
_num_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
_arrivals: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Arrivals]] = WeakKeyDictionary()
_lock = threading.Lock()  # not held while a group is made, since that waits for other ranks
_thread = threading.local()  # `name`: the name of the group that the thread is making
_num_threads = 0  # threads that are making a group
_torchs_name = distributed_c10d._process_group_name


def group_of_members(ranks: Sequence[int]) -> ProcessGroup:
    """Create a process group of `ranks` with the library and the timeout of the world group. Only these ranks call it,
    together.

    Args:
        ranks: global ranks, including this process.

    Raises:
        CommError: not all ranks came, or one has failed before.
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
        num_made[members] += 1  # not counted after a failure, so the ranks try the same name again
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Make torch name the group that this thread creates `name`; groups of other threads keep torch's names."""
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
