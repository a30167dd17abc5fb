"""An inference engine writes its model by the functions of this file.

`export` writes plain transformers again, in a folder that `from_pretrained` reads. `save_parts` writes the parts of a
divided model as each rank holds them, which load without being divided again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.agreement import Ranks, alone
from deepspeed.checkpoint.load import Position
from deepspeed.checkpoint.tensors import compact
from deepspeed.comm.values import all_gather_values
from deepspeed.config.precision import dtype_name
from deepspeed.engine.export import tensor_parallel_whole
from deepspeed.errors import ConfigError
from deepspeed.inference.checkpoint import JSON_NAME
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import division_is_known, parts_held


def all_ranks() -> Ranks:
    """The ranks of the job, or this process alone, that read or write together; the first one commits."""
    has_peers = torch_dist.is_initialized()
    rank, world_size = (torch_dist.get_rank(), torch_dist.get_world_size()) if has_peers else (0, 1)
    gather = all_gather_values if has_peers else alone
    return Ranks(Position(rank, world_size, mp_rank=0, mp_world_size=1), commits=rank == 0, gather=gather)


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
    ranks = all_ranks()
    device = torch.device("cpu") if group is None else torch.device(get_accelerator().current_device_name())
    weights = tensor_parallel_whole(module, group, keeps=ranks.commits, device=device)

    def write() -> None:
        if weights is None:
            return
        if path.is_file():
            raise ConfigError(f"export: found the file {path}; give a folder")
        save(path, state_dict=weights)

    ranks.together(write, f"export the model to {path}")


def save_parts(module: nn.Module, mesh: Mesh | None, dtype: torch.dtype, path: Path) -> None:
    """Write the weights as each rank holds them, and the JSON that `checkpoint` of `init_inference` loads them by.

    A collective of all ranks; the ranks of the first model write. The JSON is written last, and one that was there is
    removed first: a folder that has one is complete. Called by `init_inference` with `save_mp_checkpoint_path`.

    Raises:
        CheckpointError: another rank could not write; names it and its reason. That rank raises its own error.
    """
    ranks = all_ranks()
    tp_rank, tp_size = (mesh.rank("tp"), mesh.size("tp")) if mesh is not None else (0, 1)
    is_first = mesh.ranks("tp")[0] == 0 if mesh is not None else ranks.commits
    divided = {name for name, part in parts_held(module).items() if not part.is_whole}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    file, rest = f"tp_{tp_rank:02d}_00.pt", "non-tp.pt"

    def begin() -> None:
        if ranks.commits:
            path.mkdir(parents=True, exist_ok=True)
            (path / JSON_NAME).unlink(missing_ok=True)

    def write() -> None:
        if is_first and divided:
            _save({name: value for name, value in state.items() if name in divided}, path / file)
        if ranks.commits:
            _save({name: value for name, value in state.items() if name not in divided}, path / rest)

    def describe() -> None:
        if not ranks.commits:
            return
        files = {"non_tp": [rest], "tp": [f"tp_{rank:02d}_00.pt" for rank in range(tp_size)] if divided else []}
        content: dict[str, Any] = {"type": "ds_model", "checkpoints": files, "version": 1.0, "parallelization": "tp"}
        content |= {"tp_size": tp_size, "dtype": dtype_name(dtype), "division": divisions}
        text = json.dumps(content)
        (path / f".{JSON_NAME}").write_text(text)
        (path / f".{JSON_NAME}").replace(path / JSON_NAME)

    what = f"save the parts of the model to {path}"
    ranks.together(begin, what)
    divisions = division_of(module, mesh)
    ranks.together(write, what)
    ranks.together(describe, what)


def division_of(module: nn.Module, mesh: Mesh | None) -> list[str]:
    """Return a digest of the parts that each tensor-parallel rank holds; [] if undivided. A collective of the ranks."""
    if mesh is None:
        return []
    parts = {name: part.to_plain() for name, part in sorted(parts_held(module).items())}
    return all_gather_values(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16], mesh.group("tp"))


def _save(state: dict[str, Tensor], path: Path) -> None:
    """Through a file beside it, so that one that is there stays whole, or is replaced."""
    beside = path.with_name(f".{path.name}")
    torch.save(compact(state), beside)
    beside.replace(path)
