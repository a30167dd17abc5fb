"""Which weights of a module a checkpoint has in files of their own: layers of a pipeline, and experts. For `saving.py`.

A pipeline that has mixtures of experts has the files of these, and its layers in the model file, as in DeepSpeed.
"""

from collections.abc import Iterator, Mapping

import torch

import deepspeed.comm as dist
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.module_files import ModuleFiles, Place
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.parallel.expert_params import expert_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.pipe.module import PipelineModule


def module_files(module: torch.nn.Module, mesh: Mesh, zero_stage: int) -> ModuleFiles | None:
    """What this rank writes; None: its model file has all. At stage 3 the weights are in the optimizer's shards."""
    if zero_stage == 3:
        return None
    mixtures = {path: layer for path, layer in module.named_modules() if isinstance(layer, MoE)}
    sizes = [size for size in expert_sizes(module).values() if size > 1]
    if not mixtures and not sizes:
        return _of_layers(module, mesh) if isinstance(module, PipelineModule) else None
    return ModuleFiles(
        list(_of_experts(mixtures, mesh)),
        layout.expp_file(_expp_rank(mesh, sizes), mesh.model_rank),
        [layer.num_experts for layer in mixtures.values()],
    )


def _of_layers(module: PipelineModule, mesh: Mesh) -> ModuleFiles:
    topology = module.topology()
    place = topology.get_rank_repr(dist.get_rank())
    if mesh.size("tp") > 1 and "model" not in topology.get_axis_names():
        place = f"model_{mesh.rank('tp'):02d}"
    layers = module.saved_layers().items()
    return ModuleFiles([Place(layout.layer_file(index, place), prefix, "") for index, prefix in layers])


def _of_experts(mixtures: Mapping[str, MoE], mesh: Mesh) -> Iterator[Place]:
    """Of the experts that this rank is the first to hold."""
    for number, (path, layer) in enumerate(mixtures.items()):
        ranks = mesh.experts(layer.ep_size)
        if ranks.rank("edp") > 0:
            continue
        first = ranks.rank("ep") * layer.num_local_experts
        held, experts = f"{path}.deepspeed_moe.experts.".lstrip("."), layer.deepspeed_moe.experts
        for local in range(layer.num_local_experts):
            file = layout.moe_file(number, first + local, mesh.model_rank)
            own = f"{held}deepspeed_experts.{first + local}."
            if isinstance(experts, Experts):
                yield Place(file, f"{held}deepspeed_experts.{local}.", own)
                continue
            for name, _ in experts.named_parameters():
                yield Place(file, held + name, f"{own}{name}.weight", local)


def _expp_rank(mesh: Mesh, sizes: list[int]) -> int:
    """This rank's place among those that are the first to hold some experts; 0 of those that are none."""
    layouts = [mesh.experts(size).layout for size in sizes]
    places = mesh.ranks("dp", "sp")
    firsts = [
        rank for rank in places if rank == places[0] or any(each.line(rank, "edp")[0] == rank for each in layouts)
    ]
    return firsts.index(dist.get_rank()) if dist.get_rank() in firsts else 0
