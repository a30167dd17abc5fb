"""`DividedStates` and `TorchStates` read the optimizer's side of a checkpoint by parameter and by range.

Files divide the parameters among the ranks that saved them. A loading rank reads only what its shards need, from all
files (`zero/named_states.py`), so that no rank holds whole states:

    stages 1 and 2   the parameters of a group end to end, cut at the sizes of the parts
    stage 3          each parameter in W parts of ceil(n / W)
    stage 0          whole; without master weights as torch's own state dict, beside the module's weights

A save writes some weights of a module to files of their own, as DeepSpeed does: layers of a pipeline, and experts.

    layer_03-model_states.pt                      layer 3 of a pipeline, with the names that its module has
    layer_03-model_01-model_states.pt             the second tensor-parallel rank's part of layer 3
    layer_0_expert_2_mp_rank_00_model_states.pt   expert 2 of the first mixture, with names of the whole model
    expp_rank_1_mp_rank_00_optim_states.pt        optimizer state of the second of the ranks that hold experts

The model file beside them lists the first three under `ds_module_files`: by file and key, the name in the module. The
last file is named under `ds_optimizer_file` if it has the optimizer state of the model file. In a pipeline, `module` is
None; values that are in no file, such as the copy of a shared module that another stage saves, are under
`ds_module_rest`. `consolidate_files.merged` puts all together again.

A pipeline with mixtures of experts has the files of the experts, and its layers in the model file, as in DeepSpeed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deepspeed.comm as dist
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import DATA_RANK, MODULE_FILES, MODULE_REST, OPTIMIZER_FILE
from deepspeed.checkpoint.tensors import StoredTensor, elements_of
from deepspeed.errors import CheckpointError, counted
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.optim.saved_state import check_numbers
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import expert_sizes
from deepspeed.pipe.module import PipelineModule
from deepspeed.zero.layout import Run, contiguous, in_parameters
from deepspeed.zero.named_states import SavedStates
from deepspeed.zero.state_dict import PER_PARAMETER, master_dtype, masters_key

#: Key of the names of the optimizer's parameters, in a state dict of stage 0.
PARAM_NAMES = "param_names"


class DividedStates(SavedStates):
    """`DividedStates` reads the states of flat groups, which the ranks of the save divided among them.

    Args:
        parts: `optimizer_state_dict` of each data-parallel rank; one with all parameters for stage 0 with masters.
        groups: shapes of the parameters of each group, in the order of the file.
        holders: for each group, the ranks whose parts divide it; None: all ranks.

    Raises:
        CheckpointError: the parts do not have as many elements as the parameters.
    """

    are_by_group = True
    are_mapped = True

    def __init__(
        self,
        parts: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        holders: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.shapes = {name: torch.Size(shape) for group in groups for name, shape in group.items()}
        self.trained = frozenset(self.shapes)
        self.param_groups = parts[0]["base_optimizer_state"]["param_groups"]
        self._parts = parts
        self._key = masters_key(int(parts[0]["zero_stage"]))
        self._holders = holders
        if self._key == masters_key(3) and (holders is None or all(len(each) == len(parts) for each in holders)):
            groups = _by_buffer(groups, [buffer.numel() for buffer in parts[0][self._key]], len(parts))
        self.names = names_by_group(self.param_groups, groups)
        self._steps = {
            name: param_group["step"]
            for param_group, names in zip(self.param_groups, self.names, strict=False)
            if "step" in param_group  # as DeepSpeed's FusedAdam counts
            for name in names
        }
        self._groups = {name: (index, place) for index, group in enumerate(groups) for place, name in enumerate(group)}
        self._runs = [_by_param(self._divide(index, group)) for index, group in enumerate(groups)]

    def _parts_of(self, index: int) -> Sequence[Mapping[str, Any]]:
        """Return the parts of the ranks that divide a group."""
        return self._parts if self._holders is None else [self._parts[rank] for rank in self._holders[index]]

    def _divide(self, index: int, group: Mapping[str, Any]) -> list[Run]:
        numels = [self.shapes[name].numel() for name in group]
        if any(len(part[self._key]) != len(self._parts[0][self._key]) for part in self._parts):
            raise CheckpointError("optimizer state: the files of its ranks hold different numbers of parameter groups")
        sizes = [part[self._key][index].numel() for part in self._parts_of(index)]
        by_parameter = self._key == masters_key(3)
        cuts = [0, *accumulate(sizes)]
        runs = in_parameters(numels, len(sizes)) if by_parameter else contiguous(numels, cuts)
        ends = [0] * len(sizes)
        for run in runs:
            ends[run.owner] = max(ends[run.owner], run.offset + run.numel)
        if sum(run.numel for run in runs) != sum(numels) or any(map(int.__gt__, ends, sizes)):
            raise CheckpointError(
                f"optimizer state of group {index}: found {counted(sum(sizes), 'element')} in the files of "
                f"{len(sizes)} ranks, and its parameters have {sum(numels)}; files are missing, or are of several "
                "checkpoints"
            )
        return runs

    def _read(self, name: str, start: int, numel: int, buffer: Callable[[Mapping[str, Any]], Tensor]) -> Tensor:
        index, place = self._groups[name]
        pieces, parts = [], self._parts_of(index)
        for run in self._runs[index].get(place, ()):
            first, stop = max(run.start, start), min(run.start + run.numel, start + numel)
            if first < stop:
                offset = run.offset + first - run.start
                pieces.append(buffer(parts[run.owner]).view(-1)[offset : offset + stop - first])
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def master(self, name: str, start: int, numel: int) -> Tensor:
        index, _ = self._groups[name]
        return self._read(name, start, numel, lambda part: part[self._key][index])

    def _state(self, name: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
        index, _ = self._groups[name]
        return part["base_optimizer_state"]["state"].get(index, {})  # type: ignore[no-any-return]

    def _first(self, name: str) -> Mapping[str, Any]:
        index, _ = self._groups[name]
        return self._parts_of(index)[0]

    def dtypes(self, name: str) -> dict[str, torch.dtype]:
        state = self._state(name, self._first(name))
        scalars = state.get("parameter_scalars", {})
        return {
            key: value.dtype
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() > 0 and key not in scalars
        }

    def elements(self, name: str, state: str, start: int, numel: int) -> Tensor:
        return self._read(name, start, numel, lambda part: self._state(name, part)[state])

    def scalars(self, name: str) -> dict[str, Any]:
        state, by_element = self._state(name, self._first(name)), self.dtypes(name)
        _, place = self._groups[name]
        single = state.get("parameter_scalars", {})
        values = {
            key: single[key].get(place) if key in single else value
            for key, value in state.items()
            if key not in by_element and key not in PER_PARAMETER
        }
        if name in self._steps and by_element:
            values.setdefault("step", torch.tensor(float(self._steps[name])))
        return {} if any(value is None for value in values.values()) else values

    def others(self, name: str) -> dict[str, Tensor]:
        index, place = self._groups[name]
        found = {}
        for part in self._parts_of(index):
            for key, values in self._state(name, part).get("parameter_states", {}).items():
                if values.get(place) is not None:
                    found[key] = values[place]
        return found


def names_by_group(param_groups: Sequence[Mapping[str, Any]], buffers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the parameters of each group of the optimizer. `params` numbers a group's buffers; without it, a group has
    one buffer. Earlier versions never wrote it: then it is not known which of several groups has several buffers."""
    if any("params" not in group for group in param_groups):
        return [[name for buffer in buffers for name in buffer]] if len(param_groups) == 1 else list(map(list, buffers))
    return [[name for number in group["params"] for name in buffers[number]] for group in param_groups]


def _by_buffer(
    groups: Sequence[Mapping[str, Any]], sizes: Sequence[int], world_size: int
) -> Sequence[Mapping[str, Any]]:
    """Return the parameters of each buffer of a file of stage 3: a group's, or, in DeepSpeed's files, a sub-group's."""
    if len(sizes) == len(groups):
        return groups
    buffers: list[dict[str, Any]] = []
    room = 0
    for name, shape in (item for group in groups for item in group.items()):
        numel = math.ceil(torch.Size(shape).numel() / world_size)
        if not buffers or room < numel:
            if len(buffers) == len(sizes):
                raise CheckpointError(
                    f"optimizer state: found {counted(len(sizes), 'buffer')}, with no room for {name}"
                )
            room = sizes[len(buffers)]
            buffers.append({})
        buffers[-1][name] = shape
        room -= numel
    return buffers


class TorchStates(SavedStates):
    """`TorchStates` reads states that lie whole in torch's state dict, and the module's weights as the master weights.

    Args:
        weights: tensors or `StoredTensor`s of the module, by name. The states may be either, too.
        state: torch's state dict of the module's optimizer.
        names: names of the parameters of each group, in the order of `state`.
    """

    def __init__(self, weights: Mapping[str, Any], state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> None:
        self._weights = {name: value for name, value in weights.items() if isinstance(value, Tensor | StoredTensor)}
        self.shapes = {name: value.shape for name, value in self._weights.items()}
        self.param_groups = [
            {key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]
        ]
        self.trained = frozenset(name for group in names for name in group)
        self.names = names
        check_numbers(state["param_groups"])
        self._states: dict[str, Mapping[str, Any]] = {}
        self._by_element: dict[str, frozenset[str]] = {}
        for group, its_names in zip(state["param_groups"], names, strict=True):
            held = {name: state["state"].get(key, {}) for key, name in zip(group["params"], its_names, strict=True)}
            by_element = frozenset(key for key in _keys(held.values()) if self._is_by_element(key, held))
            self._states.update(held)
            self._by_element.update(dict.fromkeys(held, by_element))
        self.are_mapped = not any(
            isinstance(value, StoredTensor) for held in self._states.values() for value in held.values()
        )

    def _is_by_element(self, key: str, held: Mapping[str, Mapping[str, Any]]) -> bool:
        """Return whether the state `key` has one number per element in all of `held`, as in `state_dict.collect`.

        Parameters without dimensions do not show it: their step count looks like their moments.
        """
        present = [(state[key], self.shapes[name]) for name, state in held.items() if key in state]
        fits = all(isinstance(value, Tensor | StoredTensor) and value.shape == shape for value, shape in present)
        return fits and any(value.dim() > 0 for value, _ in present)

    def master(self, name: str, start: int, numel: int) -> Tensor:
        found = elements_of(self._weights[name], start, numel)
        return found.to(master_dtype(found.dtype))

    def dtypes(self, name: str) -> dict[str, torch.dtype]:
        by_element, state = self._by_element.get(name, frozenset()), self._states.get(name, {})
        return {key: value.dtype for key, value in state.items() if key in by_element}

    def elements(self, name: str, state: str, start: int, numel: int) -> Tensor:
        return elements_of(self._states[name][state], start, numel)

    def _rest(self, name: str) -> Iterator[tuple[str, Any]]:
        by_element = self._by_element.get(name, frozenset())
        return ((key, value) for key, value in self._states.get(name, {}).items() if key not in by_element)

    def scalars(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self._rest(name) if not _has_elements(value)}

    def others(self, name: str) -> dict[str, Tensor]:
        found = {key: value for key, value in self._rest(name) if _has_elements(value)}
        return {key: value.whole() if isinstance(value, StoredTensor) else value for key, value in found.items()}


def states_of(
    model_state: Mapping[str, Any],
    shard_states: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Any],
    holders: Sequence[Sequence[int]] | None = None,
) -> SavedStates | None:
    """Return the states of the trained parameters; None if the checkpoint does not name them.

    Args:
        model_state: content of a model file.
        shard_states: `optimizer_state_dict` of each data-parallel rank; empty where the model file has all.
        weights: values by name, if the model file has the state of an optimizer without master weights.
        holders: for each group, the ranks whose `shard_states` divide it; None: all ranks.
    """
    groups = model_state.get("param_shapes") or []
    whole = model_state.get("optimizer") or {}
    if shard_states:
        return DividedStates(shard_states, groups, holders)
    if is_flat(whole):
        return DividedStates([whole], groups)
    return TorchStates(weights, whole, whole[PARAM_NAMES]) if PARAM_NAMES in whole else None


def is_flat(whole: Mapping[str, Any]) -> bool:
    """Whether an optimizer state of stage 0 has master weights."""
    return "single_partition_of_fp32_groups" in whole


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor | StoredTensor) and value.dim() > 0


def _by_param(runs: Sequence[Run]) -> dict[int, list[Run]]:
    by_param: dict[int, list[Run]] = {}
    for run in runs:
        by_param.setdefault(run.param, []).append(run)
    return by_param


def _keys(mappings: Any) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


class FilePlace(NamedTuple):
    """`FilePlace` is a part of the weights of a module, and the file that it goes into."""

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
            model_file: name of the model file; `expp_file` on all data-parallel ranks but the first.
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
    """Return a state dict of `items` with the versions of modules that `weights` has."""
    made: dict[str, Any] = OrderedDict(items)
    if (metadata := getattr(weights, "_metadata", None)) is not None:
        made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _add_metadata(weights: Mapping[str, Any], place: FilePlace, content: dict[str, Any]) -> None:
    """Add the versions of the modules whose weights are in a file."""
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
    """Return this rank's place among those that are the first to hold some experts; 0 if it is none of them."""
    layouts = [mesh.experts(size).layout for size in sizes]
    places = mesh.ranks("dp", "sp")
    firsts = [
        rank for rank in places if rank == places[0] or any(each.line(rank, "edp")[0] == rank for each in layouts)
    ]
    return firsts.index(dist.get_rank()) if dist.get_rank() in firsts else 0
