"""Read a checkpoint of a divided model in a run that divides the model differently: another tp, pp or ep.

Each model-parallel rank of the save has files of its own, with the part of each parameter that it held
(`parallel.model_part`). A rank of the loading run reads its own parts from all these files, by range.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.saved_states import states_of
from deepspeed.checkpoint.tensors import StoredTensor, elements_of
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart
from deepspeed.zero.named_states import SavedStates

Read = Callable[[int, int], Tensor]

#: The key of a model file that says how its run divided the model; absent where the run did not know.
DIVISION = "ds_model_parallel"


@dataclass(frozen=True)
class SavedExperts:
    """`SavedExperts` are the experts of one rank.

    Args:
        holders: the data-parallel ranks that have these experts, in order.
        names: names of their parameters and buffers on these ranks.
    """

    holders: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """`Division` records how a run divides its model over ranks.

    Args:
        axes: numbers of ranks along "pp" and "tp".
        parts: this model-parallel rank's parts of the parameters that it does not have whole, by name.
        experts: this data-parallel rank's experts that are divided over ranks, by `param.group_name`.
        averaged: names of parameters that each tensor-parallel rank has whole, and whose mean over the ranks counts.
    """

    axes: Mapping[str, int]
    parts: Mapping[str, ModelPart]
    experts: Mapping[str, SavedExperts] = field(default_factory=dict)
    averaged: tuple[str, ...] = ()

    def is_first_holder(self, dp_rank: int) -> bool:
        """Whether the rank saves experts: it is the first of the ranks that have the same ones."""
        return any(each.holders[0] == dp_rank for each in self.experts.values())

    def to_state(self) -> dict[str, Any]:
        """Return the division as plain values, for a file."""
        parts = {name: part.to_plain() for name, part in self.parts.items()}
        experts = {name: [list(each.holders), list(each.names)] for name, each in self.experts.items()}
        own = {"axes": dict(self.axes), "parts": parts, "experts": experts}
        return {**own, "averaged": list(self.averaged)} if self.averaged else own

    @classmethod
    def of_file(cls, model_state: Mapping[str, Any], path: str) -> "Division | None":
        """Return the division that a model file records; without a record, the undivided one of a single rank.

        Return None if several model-parallel ranks saved the file and it has no record.

        Raises:
            CheckpointError: the record is of another form.
        """
        state = model_state.get(DIVISION)
        if state is None:
            return cls({"pp": 1, "tp": 1}, {}) if int(model_state.get("mp_world_size", 1)) == 1 else None
        try:
            axes = {str(axis): int(size) for axis, size in state["axes"].items()}
            parts = {str(name): ModelPart.of_plain(value) for name, value in state["parts"].items()}
            experts = {
                str(name): SavedExperts(tuple(map(int, holders)), tuple(map(str, names)))
                for name, (holders, names) in state.get("experts", {}).items()
            }
            if axes.keys() != {"pp", "tp"} or min(axes.values()) < 1:
                raise ValueError(f"axes {axes}")
            if any(min(each.holders) < 0 for each in experts.values()):
                raise ValueError(f"experts {experts}")
            return cls(axes, parts, experts, tuple(map(str, state.get("averaged", ()))))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} is damaged: {DIVISION} is no description of a divided model") from error


class SavedModelRank:
    """The files of one model-parallel rank; for experts divided over ranks, the files of those that hold the same ones.

    Args:
        model_states: content of its model files, by data-parallel rank: of each in stage 3, else of the first one and
            of those that save experts.
        shard_states: `optimizer_state_dict` of each data-parallel rank.
        division: the division that the file of `dp_rank` records.
        dp_rank: 0 for the weights that all ranks have and its own experts; another rank that saves experts, for these.
    """

    def __init__(
        self,
        model_states: Mapping[int, Mapping[str, Any]],
        shard_states: Sequence[Mapping[str, Any]],
        division: Division,
        dp_rank: int = 0,
    ) -> None:
        own = model_states[dp_rank]
        self.model_state = own
        """Content of its model file."""
        self.parts = division.parts
        self.averaged = frozenset(division.averaged)
        held = {name: each for each in division.experts.values() for name in each.names}
        is_here = {name for name, each in held.items() if each.holders[0] == dp_rank}
        weights = {name: value for name, value in own["module"].items() if isinstance(value, Tensor | StoredTensor)}
        self._weights = {
            name: value for name, value in weights.items() if (name in is_here if name in held else dp_rank == 0)
        }
        groups = [*(own.get("param_shapes") or []), own.get("frozen_param_shapes") or {}]
        holders = [_holders_of(group, held, len(shard_states)) for group in own.get("param_shapes") or []]
        self.states = states_of(own, shard_states, own["module"], holders)
        saved = shard_states[0] if shard_states else own.get("optimizer") or {}
        self.loss_scaler: Any = saved.get("loss_scaler")
        shapes = {name: torch.Size(shape) for group in groups for name, shape in group.items()}
        aliases = own.get("shared_params") or {}
        self._names = {name: aliases.get(name, name) for name in self._weights}
        self.shapes = {
            name: shapes.get(self._names[name], value.shape) if value.numel() == 0 else value.shape
            for name, value in self._weights.items()
        }
        ranks = {name: held[name].holders if name in held else sorted(model_states) for name in self._weights}
        self._fragments = {
            name: [model_states[rank]["frozen_param_fragments"][name] for rank in ranks[name]]
            for name, value in self._weights.items()
            if name in (own.get("frozen_param_fragments") or {}) and value.numel() < self.shapes[name].numel()
        }

    def part(self, name: str) -> ModelPart:
        """Return the part of a weight that this rank has."""
        part = self.parts.get(name)
        return part if part is not None and part.shape else ModelPart.all_elements(self.shapes[name])

    def check_shape(self, name: str) -> None:
        """Raise CheckpointError if the value of a weight does not have the shape of its part of the model."""
        part, found = self.parts.get(name), self.shapes[name]
        if part is not None and found != part.own_shape:
            raise CheckpointError(
                f"{part.name or name}: found shape {tuple(found)} in the model file of a model-parallel rank, whose "
                f"part of it has shape {tuple(part.own_shape)}; the file is damaged, load or convert another tag"
            )

    def trained(self, name: str) -> tuple[SavedStates, str] | None:
        """Return the states of a weight, and its name among them; None if no optimizer had the weight."""
        found = self._names[name]
        return (self.states, found) if self.states is not None and found in self.states.trained else None

    def is_alias(self, name: str) -> bool:
        """Whether `name` is another name of a shared parameter."""
        return self._names[name] != name

    def whole_name(self, name: str) -> str:
        """Return the name that a weight has in the undivided model."""
        part = self.parts.get(name)
        return (part.name if part is not None else "") or name

    def dtype(self, name: str) -> torch.dtype:
        return self._weights[name].dtype

    def weight(self, name: str, start: int, numel: int) -> Tensor:
        """Return [numel] elements of the module's value from `start` on; of a sharded parameter, from the shards."""
        value = self._weights[name]
        if value.numel() == self.shapes[name].numel():
            return elements_of(value, start, numel)
        name = self._names[name]
        if name in self._fragments:
            return _joined([each.reshape(-1) for each in self._fragments[name]], start, numel)
        assert self.states is not None
        return self.states.master(name, start, numel).to(value.dtype)


def _holders_of(group: Mapping[str, Any], held: Mapping[str, SavedExperts], num_ranks: int) -> Sequence[int]:
    """Return the data-parallel ranks whose files divide a group; its parameters are of the same experts, or of none."""
    return next((held[name].holders for name in group if name in held), range(num_ranks))


def _joined(parts: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """Return [numel] elements from `start` on of the concatenation of `parts`."""
    pieces, at = [], 0
    for part in parts:
        first, stop = max(start - at, 0), min(start + numel - at, part.numel())
        if first < stop:
            pieces.append(part[first:stop])
        at += part.numel()
    return torch.cat(pieces) if pieces else torch.zeros(0)


class Source:
    """A `Source` joins the whole value of a parameter, or of a state of a parameter, from the parts of several ranks.

    Args:
        held: for each rank its part, and a function that reads [numel] elements of the part from an element on.
        what: name of the value in messages.

    Raises:
        CheckpointError: the parts do not make up the whole, or are of different wholes.
    """

    def __init__(self, held: Sequence[tuple[ModelPart, Read]], what: str) -> None:
        self.shape = held[0][0].shape
        whole = [each for each in held if each[0].is_whole]
        self._held = whole[:1] or list(held)
        dims = {part.dim for part, _ in self._held}
        if len({part.shape for part, _ in held}) > 1 or len(dims) > 1:
            raise CheckpointError(f"{what}: the model-parallel ranks of the save hold parts of different parameters")
        self._dim = dims.pop()
        end = 0
        for start, stop in sorted(each for part, _ in self._held for each in part.ranges):
            if start > end:
                break
            end = max(end, stop)
        if end < self.shape[self._dim]:
            raise CheckpointError(
                f"{what}: found nothing of number {end} of the {self.shape[self._dim]} along dimension {self._dim} in "
                "the files of any model-parallel rank of the save; files are missing"
            )

    def read(self, part: ModelPart, start: int, numel: int) -> Tensor:
        """Return [numel] elements of `part` from `start` on, in row-major order. Whole rows of the files are read."""
        own = part.own_shape
        row = own.numel() // own[0] if own.numel() else 1
        first, stop = start // row, -(-(start + numel) // row)
        flat = self._rows_of(part, first, stop).reshape(-1)
        return flat[start - first * row : start - first * row + numel]

    def _rows_of(self, part: ModelPart, first: int, stop: int) -> Tensor:
        """Return the rows [first, stop) of a part."""
        if part.dim > 0:
            rows = self._rows(first, stop)
            pieces = [rows.narrow(part.dim, start, end - start) for start, end in part.ranges]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)
        pieces, at = [], 0
        for start, end in part.ranges:
            low, high = max(first, at), min(stop, at + end - start)
            if low < high:
                pieces.append(self._rows(start + low - at, start + high - at))
            at += end - start
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.zeros(0)

    def _rows(self, first: int, stop: int) -> Tensor:
        """Return the rows [first, stop) of the whole, along its first dimension."""
        result: Tensor | None = None
        for part, read in self._held:
            for low, high, values in self._held_rows(part, read, first, stop):
                if result is None:
                    result = values.new_empty((stop - first, *self.shape[1:]))
                if self._dim == 0:
                    result[low - first : high - first] = values.view(high - low, *self.shape[1:])
                else:
                    _put_columns(part, values.view(stop - first, *part.own_shape[1:]), result)
        assert result is not None
        return result

    def _held_rows(self, part: ModelPart, read: Read, first: int, stop: int) -> Iterable[tuple[int, int, Tensor]]:
        """Yield (low, high, values) for each run of rows in [first, stop) that a rank has part of: its values there."""
        own = part.own_shape
        if own.numel() == 0:
            return
        row = own.numel() // own[0]
        if self._dim > 0:
            yield first, stop, read(first * row, (stop - first) * row)
            return
        at = 0
        for start, end in part.ranges:
            low, high = max(first, start), min(stop, end)
            if low < high:
                yield low, high, read((at + low - start) * row, (high - low) * row)
            at += end - start


class _Mean(Source):
    """`_Mean` reads the mean, in fp32, of a parameter that several ranks have whole, with different values."""

    def __init__(self, held: Sequence[tuple[ModelPart, Read]], what: str) -> None:
        super().__init__(held, what)
        self._sources = [Source([each], what) for each in held]

    def read(self, part: ModelPart, start: int, numel: int) -> Tensor:
        total = self._sources[0].read(part, start, numel).to(torch.float32, copy=True)
        for source in self._sources[1:]:
            total += source.read(part, start, numel)
        return total / len(self._sources)


def _put_columns(part: ModelPart, values: Tensor, result: Tensor) -> None:
    at = 0
    for start, end in part.ranges:
        result.narrow(part.dim, start, end - start).copy_(values.narrow(part.dim, at, end - start))
        at += end - start


class _OwnTensor(StoredTensor):
    """The part that this run holds of a parameter that the save divided differently."""

    def __init__(self, source: Source, part: ModelPart, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._source, self._part = source, part

    def read(self, start: int, numel: int) -> Tensor:
        return self._source.read(self._part, start, numel).to(self.dtype, copy=True)


class AcrossRanks(SavedStates):
    """The weights and states for a run that divides its model differently from the save, by the run's own names.

    Args:
        ranks: the ranks that saved.
        own: parts of the run that loads, see `Division`.
        elsewhere: names, in the undivided model, of the weights and buffers that other ranks of this run have.

    Raises:
        CheckpointError: a weight does not have the shape of its part.
    """

    def __init__(
        self, ranks: Sequence[SavedModelRank], own: Mapping[str, ModelPart], elsewhere: Collection[str] = ()
    ) -> None:
        self._own = own
        here = {part.name: name for name, part in own.items() if part.name}
        held: dict[str, list[tuple[SavedModelRank, str]]] = {}
        for rank in ranks:
            for name in rank.shapes:
                whole = rank.whole_name(name)
                if whole in here or whole not in elsewhere:
                    rank.check_shape(name)
                    held.setdefault(here.get(whole, whole), []).append((rank, name))
        self._held = held
        self._states = [rank.states for rank in ranks if rank.states is not None]
        self.are_by_group = any(states.are_by_group for states in self._states)
        self.shapes = {name: self._shape(name) for name in held}
        self.trained = frozenset(
            name
            for name, its in held.items()
            if any(rank.trained(local) is not None and not rank.is_alias(local) for rank, local in its)
        )
        self.param_groups = self._states[0].param_groups if self._states else []
        names = {(id(rank), local): name for name, its in held.items() for rank, local in its}
        self.names = [
            list(
                dict.fromkeys(
                    names[id(rank), each]
                    for rank in ranks
                    if rank.states is not None
                    for each in rank.states.names[index]
                    if (id(rank), each) in names
                )
            )
            for index in range(len(self.param_groups))
        ]

    @property
    def has_states(self) -> bool:
        """Whether any file has optimizer states."""
        return bool(self._states)

    def weights(self) -> dict[str, StoredTensor]:
        """Return the module's values, by the names of this run."""
        return {
            name: _OwnTensor(self._weight(name), self._own_part(name), self.shapes[name], its[0][0].dtype(its[0][1]))
            for name, its in self._held.items()
        }

    def master(self, name: str, start: int, numel: int) -> Tensor:
        if not self._holders(name):
            return self._weight(name).read(self._own_part(name), start, numel).float()
        return self._read(name, "master weights", lambda states, local: partial(states.master, local), start, numel)

    def dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        return next((states.dtypes(local) for _, states, local in self._holders(name)), {})

    def elements(self, name: str, state: str, start: int, numel: int) -> Tensor:
        return self._read(name, state, lambda states, local: partial(states.elements, local, state), start, numel)

    def scalars(self, name: str) -> Mapping[str, Any]:
        return next((states.scalars(local) for _, states, local in self._holders(name)), {})

    def others(self, name: str) -> Mapping[str, Tensor]:
        for part, states, local in self._holders(name):
            found = states.others(local)
            if found and not (part.is_whole and self._own_part(name).is_whole):
                raise CheckpointError(
                    f"optimizer state {', '.join(sorted(found))} of {name}: found a shape that is not the parameter's, "
                    "and the parameter is divided over model-parallel ranks; load it with the layout of the save"
                )
            return found
        return {}

    def _shape(self, name: str) -> torch.Size:
        rank, local = self._held[name][0]
        is_same = self._own_part(name).is_whole and rank.part(local).is_whole
        return rank.shapes[local] if is_same else self._own_part(name).own_shape

    def _own_part(self, name: str) -> ModelPart:
        """Return the part of the saved parameter that this run holds; all of it if this run has no part of its shape.

        A model of another shape is refused where the shapes are compared.
        """
        rank, local = self._held[name][0]
        shape, part = rank.part(local).shape, self._own.get(name)
        return part if part is not None and part.shape == shape else ModelPart.all_elements(shape)

    def _holders(self, name: str) -> list[tuple[ModelPart, SavedStates, str]]:
        """Return the part, the states and the name there, for each saved rank whose optimizer had the parameter."""
        return [
            (rank.part(local), *found) for rank, local in self._held[name] if (found := rank.trained(local)) is not None
        ]

    def _weight(self, name: str) -> Source:
        held = [(rank.part(local), partial(rank.weight, local)) for rank, local in self._held[name]]
        return self._source(name, held, "weight")

    def _read(self, name: str, what: str, reader: Callable[[SavedStates, str], Read], start: int, numel: int) -> Tensor:
        held = [(part, reader(states, local)) for part, states, local in self._holders(name)]
        return self._source(name, held, what).read(self._own_part(name), start, numel)

    def _source(self, name: str, held: Sequence[tuple[ModelPart, Read]], what: str) -> Source:
        rank, local = self._held[name][0]
        return (_Mean if local in rank.averaged else Source)(held, f"{name}, {what}")


def of_whole_weights(model_states: Mapping[int, Mapping[str, Any]]) -> SavedModelRank:
    """Return a checkpoint with whole weights, and the optimizer's state in the model file, as the files of one rank.

    Args:
        model_states: content of its model files, by data-parallel rank.
    """
    return SavedModelRank(model_states, [], Division({"pp": 1, "tp": 1}, {}))
