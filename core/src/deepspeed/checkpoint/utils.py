"""`clone_tensors_for_torch_save`, at the address at which Accelerate and others look it up."""

from typing import Any

import torch

from deepspeed._absent import complete
from deepspeed.checkpoint.tensors import map_tensors


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of `item` (nested dicts, lists, tuples) whose tensors have storages of their own, on `device`.

    Users and Accelerate call it on a `state_dict` before `torch.save`: a weight that is a view of a flat buffer would
    otherwise bring the whole buffer into the file. Values that are no tensors are passed through.
    """
    target = torch.device(device)

    return map_tensors(item, lambda tensor: tensor.detach().to(target, copy=True))


complete(__name__)
