"""A process group for the engine alone, where the library matches collectives by their order in a group.

The model may run collectives in its backward (experts, SyncBatchNorm), between which buckets are launched when they are
full: at places that differ between ranks which leave out different parameters. gloo would match a bucket here with the
model's collective there. Called by `TorchGroup.connect`.

Torch's `new_group` needs all ranks of the world, or a name that the members agree on (`members.py`), and counts the
group among those of the process. So the group is made of torch's classes, under a name that its first rank draws.
"""

import secrets

import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from deepspeed.comm.libraries import library_by_device, timeout_of

_NAME_BYTES = 8


def own_group(group: ProcessGroup) -> ProcessGroup:
    """A gloo group of the same ranks as `group`, with its timeout; `group` itself where it is not gloo's, or one rank.

    All ranks of `group` call it together. torch has no record of the new group, which ends when nothing refers to it;
    it is for functions of `torch.distributed` that take ranks within a group.
    """
    if set(library_by_device(group).values()) != {"gloo"} or group.size() == 1:
        return group
    host = torch.device("cpu")
    name = torch.frombuffer(bytearray(secrets.token_bytes(_NAME_BYTES)), dtype=torch.uint8)
    torch_dist.broadcast(name, group=group, group_src=0)
    default_store = torch_dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"deepspeed/{bytes(name.tolist()).hex()}", default_store)
    own, kind = ProcessGroup(store, group.rank(), group.size()), ProcessGroup.BackendType.GLOO
    own._set_default_backend(kind)
    own._register_backend(host, kind, ProcessGroupGloo(store, own.rank(), own.size(), timeout_of(group)))
    own.barrier().wait()  # a rank that drops the group at once would break the connections that a peer still makes
    return own
