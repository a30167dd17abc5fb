"""`Reader` reads the part of a tag that one rank needs, after verifying it. It changes nothing of the caller's.

A checkpoint of `torch.distributed.checkpoint`, as FSDP2 and torchtitan save it, is converted to the form of ours. The
reader takes the state dicts of `torch.distributed.checkpoint.state_dict`, wherever they are in the saved dict:

    <model>.<fqn>                              weights and buffers, by fully qualified name
    <optim>.state.<fqn>.exp_avg                states of the optimizer, by the name of the parameter
    <optim>.param_groups.<index>.lr, .params   its groups; or, flattened, <optim>.param_groups.<fqn>.lr

All other values are client state, if they are plain data and, since every rank gets them, not large.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import DATA_RANK, MODULE_FILES, merged, naming_files
from deepspeed.checkpoint.dcp_file import DcpFolder, DcpTensor, NotPlainData
from deepspeed.checkpoint.deepspeed_files import (
    UNIVERSAL_CHECKPOINT_INFO,
    as_own_shard,
    named_by_stage,
    with_division,
    with_universal_states,
)
from deepspeed.checkpoint.layout import is_dcp_folder, local_folder
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
    is_deepspeeds,
    split_client_state,
)
from deepspeed.checkpoint.model_ranks import Division, SavedModelRank, of_whole_weights
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tensors import StackedTensor
from deepspeed.errors import CheckpointError, first_line
from deepspeed.log import logger

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
        """Return the result of `Checkpointer.load`. Raises `CheckpointError`, on this rank only."""
        folder = find_folder(directory, tag)
        with as_damage(folder):
            found = self._read(folder, tag)
            return dataclasses.replace(found, rounding=self._rounding(folder)) if self.needs_states else found

    def _rounding(self, folder: Path) -> Mapping[str, Any] | None:
        """Return the rounding errors that the rank of this number had yet to send."""
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
        """Return the files of all model-parallel ranks of the save, and of all ranks that saved experts."""
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
        """Return the model files of a model-parallel rank, by data-parallel rank, and its shards."""
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
        """Return `shards` if the files name their parameters, else none: DeepSpeed's files of experts do not."""
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
        """Whether the caller can load a shard of a save by as many ranks; None: the model file has everything."""
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
        state = merged(state, load, StackedTensor) if MODULE_FILES in state else state
        return with_division(state, path) if UNIVERSAL_CHECKPOINT_INFO in state else state

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
        """Return a function that verifies a file once; call it with each file that this rank is about to load.

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


_GROUPS, _STATES = "param_groups.", "state."
#: options of how a step is computed, not of its result: the loading run keeps its own
_OF_THE_RUN = frozenset({"foreach", "fused", "capturable", "differentiable", "params"})

#: limit for all tensors of client state: many more are another model, which each rank would hold whole
_CLIENT_BYTES = 64 * 2**20

_OF_ANOTHER_FORM = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


def load_dcp(folder: Path, tag: str, *, needs_states: bool) -> LoadedCheckpoint:
    """Return what the DCP checkpoint in `folder` holds; weights and states stay in its files.

    Raises:
        CheckpointError: a file is missing or damaged, or, with `needs_states`, there is no optimizer's state.
    """
    source = DcpFolder(folder)
    prefix = _optimizer_prefix(source)
    if prefix is None and needs_states:
        raise CheckpointError(
            f"{folder} holds no optimizer state (no entries *.state.* and *.param_groups.*); save the dict of "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict too, or load with "
            "load_optimizer_states=False"
        )
    states = _states(source, prefix) if prefix is not None else {}
    weights_prefix = _weights_prefix(source, prefix, states)
    weights = {
        name.removeprefix(weights_prefix): tensor
        for name, tensor in source.tensors.items()
        if _place(source, name) == weights_prefix and not _is_of_optimizer(name, prefix)
    }
    try:
        optimizer = _optimizer_state(source, prefix, states) if prefix is not None else None
        steps = [int(state["step"].whole().item()) for state in states.values() if "step" in state]
        client = _client_state(source, prefix, {f"{weights_prefix}{name}" for name in weights})
    except _OF_ANOTHER_FORM as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder}: the optimizer's groups and steps, or other values, are not of the form in which "
            f"torch.distributed.checkpoint.state_dict gives them ({first_line(error)}); save them in that form"
        ) from error
    model_state = {
        "module": {},
        "optimizer": optimizer,
        "lr_scheduler": None,
        "global_steps": max(steps, default=0),
        "global_samples": 0,
        "skipped_steps": 0,
    }
    return LoadedCheckpoint(str(folder), tag, model_state, None, client, SavedParts([model_state], []), weights)


def _place(source: DcpFolder, name: str) -> str:
    """Return the keys of the dicts that an entry was in, each with a dot after it."""
    return "".join(f"{key}." for key in source.paths[name][:-1])


def _is_of_optimizer(name: str, prefix: str | None) -> bool:
    return prefix is not None and name.startswith((prefix + _STATES, prefix + _GROUPS))


def _optimizer_prefix(source: DcpFolder) -> str | None:
    """Return what precedes `state.` and `param_groups.` in names of the optimizer's entries; None if there are none."""
    keys = [name for name in source.paths if name.startswith(_GROUPS) or f".{_GROUPS}" in name]
    found = sorted({name[: name.index(_GROUPS)] for name in keys})
    if len(found) > 1:
        raise CheckpointError(
            f"{source.folder} holds the states of {len(found)} optimizers ({', '.join(found)}), and an engine has one; "
            "save one of them, or load with load_optimizer_states=False"
        )
    return found[0] if found else None


def _states(source: DcpFolder, prefix: str) -> dict[str, dict[str, DcpTensor]]:
    """Return the states of each parameter, by its name."""
    states: dict[str, dict[str, DcpTensor]] = {}
    for key, tensor in source.tensors.items():
        if key.startswith(prefix + _STATES):
            name, _, state = key.removeprefix(prefix + _STATES).rpartition(".")
            states.setdefault(name, {})[state] = tensor
    return states


def _weights_prefix(source: DcpFolder, prefix: str | None, states: Iterable[str]) -> str:
    """Return what precedes the names of the weights: the path of the largest dict that has all trained parameters."""
    found: dict[str, set[str]] = {}
    for name in source.tensors:
        if not _is_of_optimizer(name, prefix):
            place = _place(source, name)
            found.setdefault(place, set()).add(name.removeprefix(place))
    fitting = [place for place, names in found.items() if names.issuperset(states)]
    if not fitting:
        missing = sorted(set(states) - set().union(*found.values()))
        raise CheckpointError(
            f"{source.folder} holds no weights of the parameters that its optimizer has "
            f"({', '.join(missing[:4]) or 'none'}); save the dict of "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict too"
        )
    return max(fitting, key=lambda place: len(found[place]))


def _optimizer_state(source: DcpFolder, prefix: str, states: Mapping[str, Mapping[str, DcpTensor]]) -> dict[str, Any]:
    """Return the optimizer's state in the form of torch's state dict, with the parameters' names as `param_names`."""
    by_group: dict[str, dict[str, Any]] = {}
    for key in source.paths:
        if key.startswith(prefix + _GROUPS):
            group, _, option = key.removeprefix(prefix + _GROUPS).rpartition(".")
            by_group.setdefault(group, {})[option] = _option(source, key)
    if all("params" in group for group in by_group.values()):
        groups = [by_group[index] for index in sorted(by_group, key=int)]
        names = [list(group["params"]) for group in groups]
    else:
        groups, names = _merged(by_group)
    numbers = {name: number for number, name in enumerate(name for its in names for name in its)}
    return {
        "state": {
            numbers[name]: {key: tensor if tensor.dim() else tensor.whole() for key, tensor in state.items()}
            for name, state in states.items()
            if name in numbers
        },
        "param_groups": [
            {
                "params": [numbers[name] for name in its],
                **{option: value for option, value in group.items() if option not in _OF_THE_RUN},
            }
            for group, its in zip(groups, names, strict=True)
        ],
        "param_names": names,
    }


def _option(source: DcpFolder, key: str) -> Any:
    """Return an option of a group; some runs save it as a tensor, such as `lr` of a capturable optimizer."""
    return source.tensors[key].whole().item() if key in source.tensors else source.value(key)


def _merged(by_name: Mapping[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the groups of a flattened state dict, which has options per parameter: equal options form a group."""
    groups: list[dict[str, Any]] = []
    names: list[list[str]] = []
    for name, options in by_name.items():
        if options not in groups:
            groups.append(options)
            names.append([])
        names[groups.index(options)].append(name)
    return groups, names


def _client_state(source: DcpFolder, prefix: str | None, weights: set[str]) -> dict[str, Any]:
    """Return the other values, nested as they were saved."""
    client: dict[Any, Any] = {}
    others = {
        key: path for key, path in source.paths.items() if key not in weights and not _is_of_optimizer(key, prefix)
    }
    large = _large(source, [key for key in others if key in source.tensors])
    odd: list[str] = []
    for key, path in others.items():
        if key in large:
            continue
        try:
            value = source.tensors[key].whole() if key in source.tensors else source.value(key)
        except NotPlainData:
            odd.append(key)
            continue
        place = client
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = value
    size = f"{sum(map(_num_bytes, (source.tensors[key] for key in large))) / 2**20:.1f} MiB of tensors in"
    places = sorted({_place(source, key) or key for key in large})
    for left, why in ((odd, "they are not plain data:"), (places, f"every rank would hold {size}")):
        if left:
            logger.warning(
                "%s: not loaded, because %s %s. Read them with torch.distributed.checkpoint.",
                source.folder,
                why,
                ", ".join(left),
            )
    return client


def _large(source: DcpFolder, names: Iterable[str]) -> set[str]:
    """Return the tensors in the dicts that, counted from the smallest one, no longer fit into `_CLIENT_BYTES`."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        by_place.setdefault(_place(source, name), []).append(name)
    sizes = {place: sum(_num_bytes(source.tensors[name]) for name in its) for place, its in by_place.items()}
    places = sorted(sizes, key=lambda place: sizes[place])
    totals = accumulate(sizes[place] for place in places)
    return {
        name for place, total in zip(places, totals, strict=True) if total > _CLIENT_BYTES for name in by_place[place]
    }


def _num_bytes(tensor: DcpTensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
