"""A save writes some weights of a module to files of their own, as DeepSpeed does: layers of a pipeline, and experts.

    layer_03-model_states.pt                      layer 3 of a pipeline, with the names that its module has
    layer_03-model_01-model_states.pt             the part of it that the second tensor-parallel rank has
    layer_0_expert_2_mp_rank_00_model_states.pt   expert 2 of the first mixture, with names of the whole model
    expp_rank_1_mp_rank_00_optim_states.pt        of the second of those ranks that hold experts: the optimizer's state

The model file beside them has the names of the first three under `ds_module_files`, by file the names in the module of
what is under each key, and that of the last under `ds_optimizer_file`, where it has the optimizer's state of the model
file. `module` of a pipeline is None then; what is in no file, such as the copy of a shared module that another stage
saves, is under `ds_module_rest`. `consolidate_files.merged` puts all together again.

A pipeline that has mixtures of experts has the files of these, and its layers in the model file, as in DeepSpeed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deepspeed.comm as dist
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import DATA_RANK, MODULE_FILES, MODULE_REST, OPTIMIZER_FILE
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.parallel.expert_params import expert_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.pipe.module import PipelineModule


class FilePlace(NamedTuple):
    """A `FilePlace` is a part of the weights of a module, and the file that they go into."""

    file: str
    prefix: str
    """The prefix of the weights' names in the module; with `row`, the whole name."""
    own_prefix: str
    """The prefix that replaces `prefix` in the file; with `row`, the whole key."""
    row: int | None = None
    """The row that goes into the file, where one weight has several experts; else None."""


@dataclass(frozen=True)
class ModuleFiles:
    """`ModuleFiles` says which of a rank's weights go into files of their own, and divides a save's state accordingly.

    Args:
        places: the weights of this rank that go into such files.
        expp_file: the file of this rank's optimizer state, where the module has experts; else None.
        num_experts: the number of experts of each mixture of experts in the module.
    """

    places: Sequence[FilePlace]
    expp_file: str | None = None
    num_experts: Sequence[int] = ()

    def divide(self, state: Mapping[str, Any], model_file: str, dp_rank: int) -> dict[str, dict[str, Any]]:
        """Return the contents of this rank's files, by name.

        Args:
            state: content of a model file, with all weights.
            model_file: its name; `expp_file` on all data-parallel ranks but the first.
        """
        weights = state["module"]
        rest, files = _like(weights, weights), dict[str, dict[str, Any]]()
        names: dict[str, dict[str, Any]] = {}
        for place in self.places:
            content = _content(weights, place)
            if not content and place.row is not None:
                continue
            taken = files.setdefault(place.file, OrderedDict())
            names.setdefault(place.file, {}).update({key: name for key, (name, _) in content.items()})
            taken.update({key: value for key, (_, value) in content.items()})
            _add_metadata(weights, place, taken)
            for name in content.values():
                rest.pop(name[0] if place.row is None else place.prefix, None)
        own = {**state, "module": rest, MODULE_FILES: names}
        if files and self.expp_file is None:  # of a pipeline
            own |= {"module": None, MODULE_REST: rest}
        if self.num_experts:
            own["num_experts"] = list(self.num_experts)
        if self.expp_file == model_file:
            own[DATA_RANK] = dp_rank
        elif self.expp_file is not None:
            files[self.expp_file] = {"optimizer": own["optimizer"], DATA_RANK: dp_rank}
            own |= {"optimizer": None, OPTIMIZER_FILE: self.expp_file}
        return {model_file: own, **files}


def _content(weights: Mapping[str, Any], place: FilePlace) -> dict[str, tuple[Any, Any]]:
    """Return the name in the module and the value of each weight of `place`, by its key in the file.

    With `place.row` the name is a list of name and row.
    """
    if place.row is not None:
        value, name = weights.get(place.prefix), [place.prefix, place.row]
        return {place.own_prefix: (name, value[place.row])} if isinstance(value, Tensor) else {}
    start = len(place.prefix)
    return {
        place.own_prefix + name[start:]: (name, value)
        for name, value in weights.items()
        if name.startswith(place.prefix)
    }


def _like(weights: Mapping[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of `items` with the versions of modules that `weights` has."""
    made: dict[str, Any] = OrderedDict(items)
    if (metadata := getattr(weights, "_metadata", None)) is not None:
        made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _add_metadata(weights: Mapping[str, Any], place: FilePlace, content: dict[str, Any]) -> None:
    """The versions of the modules whose weights are in a file."""
    metadata, prefix = getattr(weights, "_metadata", None), place.prefix
    if metadata is None or place.row is not None:
        return
    own = getattr(content, "_metadata", OrderedDict())
    for path, value in metadata.items():
        if f"{path}.".startswith(prefix):
            own[(place.own_prefix + f"{path}."[len(prefix) :]).removesuffix(".")] = value
    content._metadata = own  # type: ignore[attr-defined]


def module_files(module: torch.nn.Module, mesh: Mesh, zero_stage: int) -> ModuleFiles | None:
    """Return the files of their own that weights of this rank go into; None if its model file has them all.

    None at stage 3 too, whose weights are in the optimizer's shards.
    """
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
    return ModuleFiles([FilePlace(layout.layer_file(index, place), prefix, "") for index, prefix in layers])


def _of_experts(mixtures: Mapping[str, MoE], mesh: Mesh) -> Iterator[FilePlace]:
    """Yield the places of the experts that this rank is the first to hold."""
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
                yield FilePlace(file, f"{held}deepspeed_experts.{local}.", own)
                continue
            for name, _ in experts.named_parameters():
                yield FilePlace(file, held + name, f"{own}{name}.weight", local)


def _expp_rank(mesh: Mesh, sizes: list[int]) -> int:
    """This rank's place among those that are the first to hold some experts; 0 of those that are none."""
    layouts = [mesh.experts(size).layout for size in sizes]
    places = mesh.ranks("dp", "sp")
    firsts = [
        rank for rank in places if rank == places[0] or any(each.line(rank, "edp")[0] == rank for each in layouts)
    ]
    return firsts.index(dist.get_rank()) if dist.get_rank() in firsts else 0
