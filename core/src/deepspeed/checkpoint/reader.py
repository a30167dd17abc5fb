"""`Reader`: reads what one rank needs of a tag, after verifying it. Changes nothing of the caller's."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import DATA_RANK, MODULE_FILES, merged, naming_files
from deepspeed.checkpoint.dcp_file import is_dcp_folder
from deepspeed.checkpoint.dcp_load import load_dcp
from deepspeed.checkpoint.deepspeed_files import (
    as_own_shard,
    is_deepspeeds,
    named_by_stage,
    with_division,
    with_universal_states,
)
from deepspeed.checkpoint.layout import local_folder
from deepspeed.checkpoint.load import (
    LoadedCheckpoint,
    Position,
    SavedParts,
    as_damage,
    check_division_is_known,
    check_has_states,
    check_model_ranks,
    check_shard,
    check_types,
    divides_otherwise,
    find_folder,
    find_models,
    find_shards,
    split_client_state,
)
from deepspeed.checkpoint.model_ranks import Division, SavedModelRank, of_whole_weights
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tensors import StackedTensor
from deepspeed.errors import CheckpointError

Verify = Callable[[Path], None]


@dataclass(frozen=True)
class Reader:
    """A `Reader` reads one tag for one rank; `Checkpointer` and its `load` describe the arguments."""

    store: Store
    position: Position
    checks_sizes: bool
    """Whether this rank compares the sizes of all files, also of those that other ranks read; one rank does."""
    verify: bool
    partitioned_model: bool
    load_shard: bool
    needs_states: bool
    zero_stages: Collection[int] | None
    names: Sequence[Sequence[str]] | None
    map_location: Any

    def read(self, directory: Path, tag: str) -> LoadedCheckpoint:
        """Return what `Checkpointer.load` returns. Raises `CheckpointError`, on this rank only."""
        folder = find_folder(directory, tag)
        with as_damage(folder):
            found = self._read(folder, tag)
            return dataclasses.replace(found, rounding=self._rounding(folder)) if self.needs_states else found

    def _rounding(self, folder: Path) -> Mapping[str, Any] | None:
        """Return what the rank of this number had left to send."""
        path = folder / layout.rounding_file(self.position.dp_rank, self.position.mp_rank)
        if not path.exists():
            return None
        self._verifier(folder)(path)
        state = self.store.load(path, self.map_location, mmap=True)
        return state if isinstance(state, Mapping) else None

    def _read(self, folder: Path, tag: str) -> LoadedCheckpoint:
        position = self.position
        if is_dcp_folder(folder):
            check_division_is_known(folder, position)
            folder = local_folder(folder, "load, as a checkpoint of torch.distributed.checkpoint,")
            found = load_dcp(folder, tag, needs_states=self.needs_states)
            if not position.divides_model:
                return found
            rank = of_whole_weights({0: {**found.model_state, "module": found.stored}})
            return dataclasses.replace(found, stored=None, model_ranks=[rank])
        models = find_models(folder, position.mp_rank)
        if position.mp_rank > 0 and not any(path.exists() for path in models):  # fewer model-parallel ranks saved it
            models = find_models(folder, 0)
        path = models[min(position.dp_rank, len(models) - 1)]
        verify = self._verifier(folder)
        own, client = split_client_state(self._model(path, verify))
        if not layout.is_universal(folder) and divides_otherwise(own, path, position):
            ranks = self._model_ranks(folder, int(own.get("mp_world_size", 1)), verify)
            return LoadedCheckpoint(str(path), tag, own, None, client, SavedParts([own], []), model_ranks=ranks)
        was_divided = layout.is_partitioned(path.name)
        if layout.is_universal(folder):
            check_division_is_known(folder, position)
            load = partial(self.store.load, map_location=self.map_location, mmap=True)
            states = self._models(models, own, verify)
            if position.divides_model:
                states[0] = with_universal_states(states[0], folder, load)
                ranks = [of_whole_weights(dict(enumerate(states)))]
                return LoadedCheckpoint(str(path), tag, own, None, client, SavedParts([own], []), model_ranks=ranks)
            own = with_universal_states(own, folder, load)
            return LoadedCheckpoint(str(path), tag, own, None, client, SavedParts(states, []))
        if not (self.load_shard or was_divided):
            return LoadedCheckpoint(str(path), tag, own, None, client)
        shards = find_shards(folder, position.mp_rank, own, len(models))
        shards = self._named_shards(folder, own, shards)
        if self.needs_states:
            check_has_states(folder, shards, own)
        if len(shards) in (0, position.dp_world_size) and was_divided == self.partitioned_model:
            shard = self._shard(shards[position.dp_rank], verify) if shards else None
            if self._can_take(shard) and (shard is None or self._is_in_order(own)):
                return LoadedCheckpoint(str(path), tag, own, shard, client)
        verify = self._of_own_share([models, shards], verify, position.dp_rank, position.dp_world_size)
        parts = SavedParts(
            self._models(models, own, verify),
            [as_own_shard(self._shard(each, verify), each) for each in shards],
        )
        return LoadedCheckpoint(str(path), tag, own, None, client, parts)

    def _model_ranks(self, folder: Path, num_ranks: int, verify: Verify) -> list[SavedModelRank]:
        """The files of all model-parallel ranks of the save, and of all that saved experts."""
        check_model_ranks(folder, num_ranks)
        files = [self._files_of(folder, mp_rank) for mp_rank in range(num_ranks)]
        beside = sorted(path for path in folder.iterdir() if layout.is_module_file(path.name))
        verify = self._of_own_share(
            [beside, *(paths for models, shards in files for paths in (list(models.values()), shards))],
            verify,
            self.position.rank,
            self.position.world_size,
        )
        ranks = []
        read = [{rank: self._model(path, verify) for rank, path in models.items()} for models, _ in files]
        if len(read) > 1:
            read = named_by_stage(read, self.position.layers)
        for states, (models, shards) in zip(read, files, strict=True):
            shards = self._named_shards(folder, states[0], shards)
            if self.needs_states:
                check_has_states(folder, shards, states[0])
            owned = [as_own_shard(self._shard(each, verify), each) for each in shards]
            for rank, path in models.items():
                division = Division.of_file(states[rank], str(path))
                assert division is not None
                if rank == 0 or division.is_first_holder(rank):
                    ranks.append(SavedModelRank(states, owned, division, rank))
        return ranks

    def _files_of(self, folder: Path, mp_rank: int) -> tuple[dict[int, Path], list[Path]]:
        """The model files of a model-parallel rank, by data-parallel rank, and its shards."""
        models = dict(enumerate(find_models(folder, mp_rank)))
        is_partitioned, num_models = layout.is_partitioned(models[0].name), len(models)
        for rank in sorted(layout.expert_models_in(folder)):
            models[rank] = folder / layout.expert_file(mp_rank, rank)
        for path in layout.expp_files_in(folder, mp_rank):
            state = self.store.load(path, self.map_location, mmap=True)
            own_rank = state.get(DATA_RANK) if isinstance(state, dict) else None
            if isinstance(own_rank, int) and own_rank > 0:
                models[own_rank] = path
        if not (self.load_shard or is_partitioned):
            return models, []
        first = self.store.load(models[0], self.map_location, mmap=True)
        return models, find_shards(folder, mp_rank, first, num_models)

    def _named_shards(self, folder: Path, own: dict[str, Any], shards: list[Path]) -> list[Path]:
        """`shards`, if the files say of which parameters they are: DeepSpeed's of experts do not."""
        has_experts = any("_expert_" in name for name in own.get(MODULE_FILES, ()))
        if not has_experts or own.get("param_shapes") is not None or own.get("optimizer"):
            return shards
        if self.needs_states:
            raise CheckpointError(
                f"{folder} is of experts that DeepSpeed trained, whose files do not name the parameters of the "
                "optimizer's state; load it with load_optimizer_states=False"
            )
        return []

    def _can_take(self, shard: dict[str, Any] | None) -> bool:
        """Whether the caller takes a shard of as many ranks as it is; None: the model file has all."""
        saved = {"zero_stage": 0} if shard is None else shard["optimizer_state_dict"]
        return not is_deepspeeds(saved) and (self.zero_stages is None or int(saved["zero_stage"]) in self.zero_stages)

    def _is_in_order(self, own: Mapping[str, Any]) -> bool:
        """Whether shards, which have no names, hold this run's parameters in its order. Older files do not say."""
        groups = own.get("param_shapes")
        return self.names is None or groups is None or list(map(list, groups)) == list(map(list, self.names))

    def _models(self, paths: list[Path], own: dict[str, Any], verify: Verify) -> list[dict[str, Any]]:
        return [own] if len(paths) == 1 else [self._model(each, verify) for each in paths]

    def _model(self, path: Path, verify: Verify) -> dict[str, Any]:
        def load(name: str) -> Any:
            verify(path.parent / name)
            return self.store.load(path.parent / name, self.map_location, mmap=True)

        state, position = load(path.name), self.position
        if isinstance(state, dict):
            state = naming_files(state, path, load, position.layers, position.held_layers)
        check_types(state, path)
        return with_division(merged(state, load, StackedTensor) if MODULE_FILES in state else state, path)

    def _shard(self, path: Path, verify: Verify) -> dict[str, Any]:
        verify(path)
        state = self.store.load(path, self.map_location, mmap=True)
        check_shard(state, path)
        return cast(dict[str, Any], state)

    def _of_own_share(self, files: Iterable[list[Path]], verify: Verify, rank: int, world_size: int) -> Verify:
        """Limit `verify` to the share of `rank` in files that `world_size` ranks read by range."""
        share = {path for paths in files for path in paths[rank::world_size]}
        return lambda path: verify(path) if path in share else None

    def _verifier(self, folder: Path) -> Verify:
        """Return what to call with the path of each file that this rank is about to load; it verifies a file once.

        With `checks_sizes`, the sizes of the files of a load are compared here, before any is read.
        """
        store = self.store
        index = store.read_index(folder) if isinstance(store, IndexedStore) else None
        if index is None:
            return lambda path: None
        assert isinstance(store, IndexedStore)
        for entry in index.files if self.checks_sizes else ():
            if self.load_shard or layout.has_weights(entry.name):
                store.verify(folder / entry.name, index, content=False)
        return cache(partial(store.verify, index=index, content=self.verify))
