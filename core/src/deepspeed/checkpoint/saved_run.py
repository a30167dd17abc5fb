"""A checkpoint outside of training: its weights and the optimizer's states by name, which stay in the files.

Read by `convert.py` for what it writes. One process reads the files of all ranks. `joined_run.py` has those of models
that are divided over ranks.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import (
    MODULE_FILES,
    OPTIMIZER_FILE,
    merged,
    naming_files,
    read_file,
    tag_folder,
)
from deepspeed.checkpoint.consolidate_join import lazy_state_dict
from deepspeed.checkpoint.deepspeed_files import as_own_shard
from deepspeed.checkpoint.load import split_client_state
from deepspeed.checkpoint.saved_states import states_of
from deepspeed.checkpoint.stored_tensor import StackedTensor
from deepspeed.errors import CheckpointError, counted
from deepspeed.zero.named_states import SavedStates


class SavedRun:
    """Args:
    directory: as given to `save_checkpoint`.
    tag: default: what `latest` names.

    Raises:
        CheckpointError: a file is missing or damaged.
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
        """The names and the contents of the model files of an equal run, without states of the optimizer.

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
        """A state with one number per element of a parameter, of its shape; zeros if it was never updated."""
        assert self.states is not None
        shape = self.states.shapes[name]
        if state not in self.states.dtypes(name) or not self.states.scalars(name):
            return torch.zeros(shape)
        return self.states.elements(name, state, 0, shape.numel()).reshape(shape)

    @cached_property
    def state_names(self) -> list[str]:
        """Of the states with one number per element."""
        if self.states is None:
            return []
        return list(dict.fromkeys(key for name in sorted(self.states.trained) for key in self.states.dtypes(name)))

    def step(self, name: str) -> float:
        """How often a parameter was updated."""
        assert self.states is not None
        count = self.states.scalars(name).get("step", 0)
        return float(count)

    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each group, with the names of its parameters as `params`.

        Raises:
            CheckpointError: files of an earlier version divide a group, and do not say which one.
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
