"""`export`: the model of an inference engine as plain transformers again, in a folder that `from_pretrained` reads."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.agreement import Ranks, alone
from deepspeed.checkpoint.load import Position
from deepspeed.comm.values import all_gather_values
from deepspeed.engine.whole_model import tensor_parallel_whole
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import division_is_known


def export(module: nn.Module, group: ProcessGroup | None, path: Path) -> None:
    """Write the weights, whole, and the model's configuration into a folder. A collective of all ranks.

    The first rank writes, in the types that the weights have; the folder is made if it is not there. The module stays
    as it is. Called by `InferenceEngine.export`.

    Args:
        module: a model of transformers.
        group: of the ranks over which it is divided; None: it is whole.

    Raises:
        ConfigError: the module is not of transformers, its division is not known, or `path` is a file.
        CheckpointError: another rank could not go on; names it and its reason. That rank raises its own error.
    """
    save: Any = getattr(module, "save_pretrained", None)
    if save is None:
        raise ConfigError(
            f"export: {type(module).__name__} has no save_pretrained, so it is no model of transformers; save its "
            "state_dict() with torch.save"
        )
    if group is not None and not division_is_known(module):
        raise ConfigError(
            f"export: {type(module).__name__} is divided, and its parameters do not say which part a rank has; mark "
            "them with deepspeed.parallel.model_part.mark_part, or save the module's own state_dict() on every rank"
        )
    has_peers = torch_dist.is_initialized()
    rank, world_size = (torch_dist.get_rank(), torch_dist.get_world_size()) if has_peers else (0, 1)
    gather = all_gather_values if has_peers else alone
    ranks = Ranks(Position(rank, world_size, mp_rank=0, mp_world_size=1), commits=rank == 0, gather=gather)
    device = torch.device("cpu") if group is None else torch.device(get_accelerator().current_device_name())
    weights = tensor_parallel_whole(module, group, keeps=ranks.commits, device=device)

    def write() -> None:
        if weights is None:
            return
        if path.is_file():
            raise ConfigError(f"export: found the file {path}; give a folder")
        save(path, state_dict=weights)

    ranks.together(write, f"export the model to {path}")
