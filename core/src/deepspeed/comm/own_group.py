"""A process group for the engine alone, where the library matches collectives by their order in a group.

The model may run collectives in its backward (experts, SyncBatchNorm), between which buckets are launched when they are
full: at places that differ between ranks which leave out different parameters. gloo would match a bucket here with the
model's collective there. Called by `TorchGroup.connect`.
"""

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.libraries import library_by_device

_own_group: ProcessGroup | None = None
# Of which world `_own_group` is. It stays as long as that: torch names a group by its ranks, and one that is made again
# would find the addresses of the former.
_own_world: ProcessGroup | None = None


def own_group(group: ProcessGroup) -> ProcessGroup:
    """A gloo group of the same ranks as `group`, made once; `group` itself where it is not the world or not gloo's.

    All ranks call it together. (A group of some ranks would have to be made by these alone.)
    """
    global _own_group, _own_world
    is_world = group is torch_dist.group.WORLD
    if not is_world or set(library_by_device(group).values()) != {"gloo"} or torch_dist.get_world_size(group) == 1:
        return group
    if _own_group is None or _own_world is not group:
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)
        timeout = getattr(options, "_timeout", None)
        _own_group, _own_world = torch_dist.new_group(timeout=timeout, backend="gloo"), group
    return _own_group
