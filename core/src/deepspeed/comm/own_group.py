"""Process groups over gloo for the engine alone.

`own_group`: where the library matches collectives by their order in a group.
The model may run collectives in its backward (experts, SyncBatchNorm), between which buckets are launched when they are
full: at places that differ between ranks which leave out different parameters. gloo would match a bucket here with the
model's collective there. Called by `TorchGroup.connect`.

`host_group`: over host memory, where the library serves a device only. Called by `host_sums.py`.

Torch's `new_group` needs all ranks of the world, or a name that the members agree on (`members.py`), and counts the
group among those of the process. So the groups are made of torch's classes, under a name that the ranks have met for.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from deepspeed.comm.libraries import is_gloo, timeout_of
from deepspeed.comm.values import all_gather_values
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
