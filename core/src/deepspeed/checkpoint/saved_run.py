"""A checkpoint outside of training: its weights and the optimizer's states by name; the values stay in the files.

`convert.py` and `ds_to_universal.py` read it. One process reads the files of all ranks. `JoinedRun` presents a divided
model like that of one rank: it joins tensor-parallel parts, pipeline stages and experts, one value at a time, on
request.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import (
    DATA_RANK,
    MODULE_FILES,
    MODULE_REST,
    OPTIMIZER_FILE,
    merged,
    naming_files,
    read_file,
    tag_folder,
)
from deepspeed.checkpoint.consolidate_join import lazy_state_dict
from deepspeed.checkpoint.deepspeed_files import UNIVERSAL_CHECKPOINT_INFO, as_own_shard, with_division
from deepspeed.checkpoint.load import Position, split_client_state
from deepspeed.checkpoint.model_ranks import DIVISION, AcrossRanks, Division, SavedModelRank
from deepspeed.checkpoint.reader import Reader
from deepspeed.checkpoint.saved_states import states_of
from deepspeed.checkpoint.stores import TorchStore
from deepspeed.checkpoint.tensors import StackedTensor, StoredTensor
from deepspeed.errors import CheckpointError, counted
from deepspeed.zero.named_states import SavedStates
from deepspeed.zero.redistribute import part_of_parts


class SavedRun:
    """A `SavedRun` has the weights and the optimizer's states of one tag by name; they stay in the files.

    Args:
        directory: the directory that `save_checkpoint` was given.
        tag: default: the tag that `latest` names.

    Raises:
        CheckpointError: a file is missing or damaged, or the optimizer's state does not name its parameters.
    """

    def __init__(self, directory: Path, tag: str | None = None) -> None:
        self.folder = tag_folder(directory, tag)
        self.weights: Mapping[str, Any] = lazy_state_dict(self.folder, exclude_frozen_parameters=False)
        """`consolidate_join.LazyTensor`s: fp32 weights, and buffers, of the names of the module."""
        shards = [(path, read_file(path)) for path in layout.shards_in(self.folder).values()]
        partitioned = sorted(layout.partitioned_models_in(self.folder))
        names = [layout.model_file(0, rank) for rank in partitioned] or [layout.model_file(0)]
        self.model_files = [self.folder / name for name in names]
        first = naming_files(read_file(self.model_files[0]), self.model_files[0], self._read)
        first = merged(first, self._read, StackedTensor)
        self.model_state, self.client_state = split_client_state(first)
        states = [as_own_shard(state, path) for path, state in shards]
        self.common_state: Mapping[str, Any] = states[0] if states else self.model_state.get("optimizer") or {}
        """The optimizer's state of the first rank, and what all ranks have in theirs, such as the loss scale."""
        self.zero_stage = int(self.common_state.get("zero_stage", 0))
        self.states: SavedStates | None = states_of(self.model_state, states, self.model_state["module"])
        self._refuse_unnamed(self.model_files[0], self.model_state)

    def _refuse_unnamed(self, path: Path | str, model_state: Mapping[str, Any]) -> None:
        if self.states is None and model_state.get("optimizer"):
            raise CheckpointError(
                f"{path} has an optimizer state without the names of its parameters, as DeepSpeed saves "
                "it at stage 0; load it in an engine with the optimizer of that run, and save it again"
            )

    def _read(self, name: str) -> dict[str, Any]:
        return read_file(self.folder / name)

    def model_contents(self, scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and the contents of the model files of an equal run, without optimizer states.

        Args:
            scratch: a folder for files that are needed until the contents are written.
        """
        for path in self.model_files:
            model_state = read_file(path)  # mapped
            for name in model_state.get(MODULE_FILES, ()):
                yield name, read_file(path.with_name(name))
            model_state.pop(OPTIMIZER_FILE, None)
            yield path.name, {**model_state, "optimizer": None}

    def optimizer_state(self, name: str, state: str) -> Tensor:
        """Return a state with one number per element of a parameter, in its shape; zeros if it was never updated."""
        assert self.states is not None
        shape = self.states.shapes[name]
        was_updated = self._counts.get(name, frozenset()) <= self.states.scalars(name).keys()
        if state not in self.states.dtypes(name) or not was_updated:
            return torch.zeros(shape)
        return self.states.elements(name, state, 0, shape.numel()).reshape(shape)

    @cached_property
    def _counts(self) -> dict[str, frozenset[str]]:
        """The names of the one-number states that some parameter of the same group has, by parameter. SGD has none."""
        assert self.states is not None
        counts: dict[str, frozenset[str]] = {}
        for names in self.states.names:
            of_group = frozenset(key for name in names for key in self.states.scalars(name))
            counts.update(dict.fromkeys(names, of_group))
        return counts

    def state_names(self, name: str) -> list[str]:
        """Return the names of the states with one number per element that the parameter's group has."""
        return self._state_names[name]

    @cached_property
    def _state_names(self) -> dict[str, list[str]]:
        """The state names are by group: Muon keeps other states for its matrices than for the rest."""
        assert self.states is not None
        found: dict[str, list[str]] = {}
        for names in self.states.names:
            trained = sorted(self.states.trained.intersection(names))
            of_group = list(dict.fromkeys(key for name in trained for key in self.states.dtypes(name)))
            found.update(dict.fromkeys(names, of_group))
        return found

    def step(self, name: str) -> float:
        """Return how often a parameter was updated; 0 if the save has no count of it."""
        assert self.states is not None
        count = self.states.scalars(name).get("step", 0)
        return float(count)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the options of each group, with the names of its parameters as `params`.

        Raises:
            CheckpointError: files of an earlier version divide a group, and do not say which group.
        """
        if self.states is None:
            return []
        groups, names = self.states.param_groups, self.states.names
        if len(groups) != len(names):
            raise CheckpointError(
                f"{self.folder}: found {counted(len(names), 'group')} of parameters for the {len(groups)} of the "
                "optimizer, of which an earlier version did not say which is divided; load it and save it again, or "
                "convert the weights alone (--to safetensors)"
            )
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(its)}
            for group, its in zip(groups, names, strict=True)
        ]


_LAYER = re.compile(r"layer_(\d+)(?:-[\w-]+)?-model_states\.pt")
_OF_DIVISION = frozenset({DIVISION, MODULE_FILES, MODULE_REST, DATA_RANK})
_ONE_RANK = Position(0, 1, 0, 1, Division({"pp": 1, "tp": 1}, {}))


def open_run(directory: Path, tag: str | None = None) -> SavedRun:
    """Return the checkpoint `tag` of `directory`, with whole values however the run divided its model.

    Raises:
        CheckpointError: a file is missing or damaged, or the files do not say how the model was divided.
    """
    folder = tag_folder(directory, tag)
    partitioned = sorted(layout.partitioned_models_in(folder))
    path = folder / layout.model_file(0, partitioned[0] if partitioned else None)
    state = with_division(naming_files(read_file(path), path, lambda name: read_file(folder / name)), path)
    num_ranks, division = int(state.get("mp_world_size") or 1), state.get(DIVISION) or {}
    if num_ranks > 1 and not division:
        raise CheckpointError(
            f"{folder} was saved by {num_ranks} model parallel ranks, and its files do not say which part of each "
            "parameter a rank has (the run divided the model itself, without deepspeed.parallel.model_part.mark_part); "
            "load it in the layout of the save, with a model whose parameters are marked or a client state that has "
            f"{UNIVERSAL_CHECKPOINT_INFO}, and save it again"
        )
    is_divided = num_ranks > 1 or division.get("experts")
    return JoinedRun(directory, tag) if is_divided else SavedRun(directory, tag)


class _SavedWeight:
    """A weight in fp32, from the master weights if there are any; integers and booleans keep their dtype."""

    def __init__(self, name: str, stored: StoredTensor, states: AcrossRanks) -> None:
        self.shape = stored.shape
        self.dtype = torch.float32 if stored.dtype.is_floating_point else stored.dtype
        self._name, self._stored, self._states = name, stored, states

    def contiguous(self) -> Tensor:
        """Read the weight into memory, again at each call."""
        if not self.dtype.is_floating_point:
            return self._stored.whole()
        return self._states.master(self._name, 0, self.shape.numel()).view(self.shape)


class JoinedRun(SavedRun):
    """A `JoinedRun` is the `SavedRun` of a divided model, whose ranks' parts it joins; the arguments are the same.

    Its `model_state` is one that a run of one rank would have saved, without the weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the parts cannot be joined.
    """

    def __init__(self, directory: Path, tag: str | None = None) -> None:
        self.folder = tag_folder(directory, tag)
        reader = Reader(
            store=TorchStore(),
            position=_ONE_RANK,
            checks_sizes=False,
            verify=False,
            partitioned_model=False,
            load_shard=True,
            needs_states=False,
            zero_stages=None,
            names=None,
            map_location="cpu",
        )
        found = reader.read(self.folder.parent, self.folder.name)
        self._ranks: Sequence[SavedModelRank] = found.model_ranks
        self._check_groups()
        across = AcrossRanks(self._ranks, {})
        self._stored = across.weights()
        self.weights = {name: _SavedWeight(name, stored, across) for name, stored in self._stored.items()}
        shards = list(layout.shards_in(self.folder).values())[:1]
        firsts = [as_own_shard(read_file(path), path) for path in shards]
        self.common_state = firsts[0] if firsts else found.model_state.get("optimizer") or {}
        self.zero_stage = int(self.common_state.get("zero_stage", 0))
        self.client_state = found.client_state
        self.states = across if across.has_states else None
        self._refuse_unnamed(found.path, found.model_state)
        self._aliases = {
            rank.whole_name(alias): rank.whole_name(name)
            for rank in self._ranks
            for alias, name in (rank.model_state.get("shared_params") or {}).items()
        }
        self._frozen = {
            name: self._stored[name].shape
            for name in self._names("frozen_param_shapes")
            if name in self._stored and name not in across.trained
        }
        self.model_state = {
            **{key: value for key, value in found.model_state.items() if key not in _OF_DIVISION},
            "module": {},
            "optimizer": None,
            "buffer_names": [name for name in self._names("buffer_names") if name in self._stored],
            "param_shapes": [{name: across.shapes[name] for name in names} for names in across.names],
            "frozen_param_shapes": self._frozen,
            "shared_params": self._aliases,
            "mp_world_size": 1,
        }

    def _check_groups(self) -> None:
        """Refuse ranks whose optimizers have other groups than the first one."""
        states = [rank.states for rank in self._ranks if rank.states is not None]
        num_groups = len(states[0].param_groups) if states else 0
        for each in states:
            if {len(each.param_groups), len(each.names)} != {num_groups}:
                raise CheckpointError(
                    f"{self.folder}: found {counted(len(each.names), 'group')} of parameters for the "
                    f"{len(each.param_groups)} of the optimizer of a model-parallel rank, and {num_groups} on the "
                    "first; load it and save it again, or convert the weights alone (--to safetensors)"
                )

    def _names(self, key: str) -> list[str]:
        """Return the names, in the undivided model, of the entries of `key` in the model files."""
        names = (rank.whole_name(name) for rank in self._ranks for name in rank.model_state.get(key) or ())
        return list(dict.fromkeys(names))

    def model_contents(self, scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        files = self._layers()
        in_files = {name for names in files.values() for name in names.values()}
        module = self._module(scratch)
        rest = _like(module, {name: value for name, value in module.items() if name not in in_files})
        state = {**self.client_state, **self.model_state, "module": module}
        if files:
            state |= {"module": None, MODULE_FILES: files, MODULE_REST: rest}
        for file, names in files.items():
            yield file, OrderedDict((key, module[name]) for key, name in names.items())
        if self.zero_stage < 3:
            yield (
                layout.model_file(0),
                {**state, "frozen_param_fragments": {name: module[name] for name in self._frozen}},
            )
            return
        frozen = {
            name: _mapped(self._stored[name].whole(), scratch / f"frozen_{number}.pt")
            for number, name in enumerate(self._frozen)
        }
        num_ranks = len(layout.partitioned_models_in(self.folder))
        for rank in range(num_ranks):
            fragments = {name: part_of_parts([value], value.shape, rank, num_ranks) for name, value in frozen.items()}
            yield layout.model_file(0, rank), {**state, "frozen_param_fragments": fragments}

    def _module(self, scratch: Path) -> dict[str, Any]:
        """Return the module's values, mapped from files in `scratch`; parameters are empty at stage 3."""
        module: dict[str, Any] = OrderedDict()
        buffers = set(self.model_state["buffer_names"])
        for number, (name, stored) in enumerate(self._stored.items()):
            if self.zero_stage == 3 and name not in buffers:
                module[name] = torch.empty(0, dtype=stored.dtype)
            elif self._aliases.get(name, name) in module:
                module[name] = module[self._aliases[name]]
            else:
                module[name] = _mapped(stored.whole(), scratch / f"{number}.pt")
        metadata: dict[str, Any] = {}
        for rank in self._ranks:
            saved = rank.model_state["module"]
            metadata = {**getattr(saved, "_metadata", {}), **metadata}
            for name, value in saved.items():
                if not isinstance(value, Tensor | StoredTensor):  # a module's extra state
                    module.setdefault(rank.whole_name(name), value)
        module._metadata = metadata  # type: ignore[attr-defined]
        return module

    def _layers(self) -> dict[str, dict[str, str]]:
        """Return the module's names of the weights in each file of a pipeline layer, by file and key."""
        files: dict[str, dict[str, str]] = {}
        for rank in self._ranks:
            for file, names in rank.model_state.get(MODULE_FILES, {}).items():
                if match := _LAYER.fullmatch(file):
                    own = files.setdefault(layout.layer_file(int(match[1])), {})
                    own.update((key, rank.whole_name(name)) for key, name in names.items() if isinstance(name, str))
        return dict(sorted(files.items()))


def _mapped(value: Tensor, path: Path) -> Tensor:
    """Return `value`, mapped from a file that is created, so that it needs no memory of its own."""
    torch.save(value, path)
    mapped: Tensor = torch.load(path, weights_only=True, mmap=True)
    return mapped


def _like(module: Mapping[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = OrderedDict(items)
    made._metadata = getattr(module, "_metadata", {})  # type: ignore[attr-defined]
    return made
