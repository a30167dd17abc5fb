"""`send_experts` brings experts to the ranks that hold them, from the ranks that made them.

A layer is built before its engine, whose mesh may be another than the one that was viewed then (`parallel/groups.py`):
`tp_model_init` of another model lays ranks out, too. `layer.py` calls this when the layers are connected.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend, broadcast_together
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import is_tensor_parallel


class BuiltExperts(NamedTuple):
    """Experts of a layer as they were built on this rank."""

    module: nn.Module
    ep_size: int
    made: int | None
    """The part of the layer's experts whose weights these are; None: of any, they are copies of one module."""


def part_to_make(ep_size: int) -> int:
    """Return which part of a new layer's experts this rank makes: the one that it will hold, as far as is known now.

    That is by the mesh that is viewed, or, where `ep_size` does not fit it, the one of engines of whole models.

    Raises:
        ConfigError: there are no ranks yet, or `ep_size` fits neither.
    """
    if ep_size == 1:
        return 0
    if not dist.is_initialized():
        raise ConfigError(
            f"MoE: found ep_size {ep_size} before deepspeed.init_distributed(), which says which of the experts this "
            "rank holds; call it first"
        )
    mesh = groups.viewed_mesh()
    if mesh.size("dp", "sp") % ep_size:
        mesh = groups.mesh_of_whole_models()
    made = mesh.expert_grids.get(ep_size)
    layout = mesh.layout.experts(ep_size) if made is None else made.layout
    return layout.line(dist.get_rank(), "ep").index(dist.get_rank())


def send_experts(layers: Mapping[str, BuiltExperts], mesh: Mesh) -> None:
    """Bring experts to the ranks that hold them on `mesh`, where others made them. A collective of the mesh.

    Args:
        layers: by their paths in the model. Of a pipeline, each stage has its own.

    Raises:
        ConfigError: on every rank, if an `ep_size` does not fit the mesh, or experts cannot be sent.
    """
    held = {path: mesh.experts(built.ep_size).rank("ep") for path, built in layers.items()}
    elsewhere = [path for path, built in layers.items() if built.made not in (None, held[path])]
    paths = dict.fromkeys(path for each in all_gather_values(elsewhere, mesh.norm_group) for path in each)
    if not paths:
        return
    own = {path: [layers[path].made, held[path], _sendable(layers[path].module)] for path in paths if path in layers}
    everyone = all_gather_values(own, mesh.norm_group)
    by_rank = dict(zip(mesh.ranks(*mesh.layout.axes), everyone, strict=True))
    for path in paths:
        _check(path, {rank: each[path] for rank, each in by_rank.items() if path in each})
    axes = ("dp", "sp", "tp")
    members, ranks = mesh.ranks(*axes), dist.group_backend(mesh.group(*axes))
    ranks.connect()
    for path in own:
        makers = {by_rank[rank][path][0]: place for place, rank in reversed([*enumerate(members)])}
        _take(layers[path].module, held[path], makers, ranks)


def _sendable(module: nn.Module) -> str | None:
    """The kinds of the experts' tensors; None: this rank has parts of them, which others cannot take."""
    if any(hasattr(param, "ds_id") or is_tensor_parallel(param) for param in module.parameters()):
        return None
    named = (*module.named_parameters(), *module.named_buffers())
    return ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)


def _check(path: str, places: Mapping[int, Any]) -> None:
    """Raise ConfigError where the ranks' experts are of several kinds, or a part was made by none of them."""
    kinds = {kind for _, _, kind in places.values()}
    made = {part for part, _, _ in places.values()}
    if len(kinds) == 1 and None not in kinds and made >= {part for _, part, _ in places.values()}:
        return
    rank, (was, part, _) = next((rank, each) for rank, each in places.items() if each[0] != each[1])
    why = "were sharded or divided since" if None in kinds else "are not all there, or not all alike"
    raise ConfigError(
        f"MoE {path or 'layer'}: rank {rank} made part {was} of the experts, and on this mesh it holds part {part}. "
        f"They cannot be sent, as they {why}; lay the ranks out with deepspeed.utils.groups.set_mesh(...) before the "
        "model is built"
    )


def _take(module: nn.Module, part: int, makers: Mapping[int, int], ranks: GroupBackend) -> None:
    """Copy the experts of `part` into `module`. A collective.

    Args:
        makers: by part, the place in `ranks` of one that made it.
    """
    own = [each.detach() for each in (*module.parameters(), *module.buffers()) if each.numel()]
    found: list[Tensor] = []
    for index, source in sorted(makers.items()):
        values = [each.clone() if ranks.rank == source else torch.empty_like(each) for each in own]
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for value in values:
            by_kind.setdefault((value.dtype, value.device), []).append(value)
        for same_kind in by_kind.values():
            broadcast_together(same_kind, ranks, source, tag="experts")
        found = values if index == part else found
    for tensor, value in zip(own, found, strict=True):
        tensor.copy_(value)
