"""Finding a checkpoint and checking that it fits this job, before anything is changed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import MODULE_FILES
from deepspeed.checkpoint.model_ranks import Division, SavedModelRank
from deepspeed.checkpoint.state_types import check_optimizer_types
from deepspeed.checkpoint.stored_tensor import StoredTensor
from deepspeed.checkpoint.tensors import map_tensors
from deepspeed.errors import CheckpointError, counted
from deepspeed.zero.named_states import SavedStates

_SHOWN = 8  # names in one message
_MAPPED = frozenset({"module", "optimizer", "frozen_param_fragments"})  # read by range, or copied where they are used


@dataclass(frozen=True)
class SavedParts:
    """The files of all data-parallel ranks of a save, of this rank's model-parallel place; mapped, not read."""

    model_states: list[dict[str, Any]]
    """Of each rank of stage 3; of other stages there is one for all."""
    shard_states: list[dict[str, Any]]
    """`optimizer_state_dict` of each rank; empty where the model file has the optimizer's state, or none has it."""


@dataclass(frozen=True)
class StatesByName:
    """The states that a load takes by the names of the parameters."""

    states: SavedStates
    loss_scaler: Any
    """Its state; None where the save had none."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `Checkpointer.load` found."""

    path: str
    """The model file that this rank read."""
    tag: str
    model_state: dict[str, Any]
    """The checkpoint's own keys (`layout.MODEL_STATE_KEYS`). Tensors of `module`, `optimizer` and
    `frozen_param_fragments` are mapped from the file: copy them, as a module's `load_state_dict` does."""
    shard_state: dict[str, Any] | None
    """This rank's optimizer shard: `optimizer_state_dict`, `ds_config`, `ds_version`. None when not asked for, or when
    `parts` has it. Mapped from the file too."""
    client_state: dict[str, Any]
    """The user's own keys, as they were given to the save."""
    parts: SavedParts | None = None
    """What another number of ranks, or another stage, saved."""
    stored: Mapping[str, StoredTensor] | None = None
    """Of another program's checkpoint: the weights and buffers, in its files. `module` is then empty."""
    model_ranks: Sequence[SavedModelRank] = ()
    """The files of all model-parallel ranks, where this run divides the model otherwise."""
    states: SavedStates | None = None
    """What `model_ranks` have of the optimizer, by the names of this run."""
    by_name: StatesByName | None = None
    """In place of `shard_state`: master weights, and the optimizer's state, to be read by range."""

    @property
    def has_masters(self) -> bool:
        """Whether master weights are to be restored apart from the module's."""
        return self.by_name is not None or self.shard_state is not None


@dataclass(frozen=True)
class Position:
    """Which part of a checkpoint is this rank's."""

    dp_rank: int
    dp_world_size: int
    mp_rank: int
    mp_world_size: int
    division: Division | None = None
    """How this run divides the model; None where it does not know."""
    layers: Mapping[int, str] | None = None
    """Of a pipeline: what the names of the weights of each layer begin with, whoever has it."""
    held_layers: Collection[int] = ()
    """Those that this rank has."""

    @property
    def rank(self) -> int:
        """Among all that share the checkpoint."""
        return self.dp_rank * self.mp_world_size + self.mp_rank

    @property
    def world_size(self) -> int:
        return self.dp_world_size * self.mp_world_size

    @property
    def divides_model(self) -> bool:
        """Whether the ranks of this run have different parts of the model, which are known."""
        own = self.division
        return own is not None and (max(own.axes.values()) > 1 or bool(own.experts))


def find_folder(load_dir: Path, tag: str) -> Path:
    """The folder in which the whole checkpoint `tag` lies."""
    folder = layout.whole_folder(load_dir / tag)
    if folder is None:
        found = layout.tags_in(load_dir)
        there = f"It holds: {', '.join(found)}." if found else "No checkpoint was found there."
        advice = tag_folder_hint(load_dir) or "Check the directory and the tag."
        raise CheckpointError(f"there is no checkpoint {tag!r} in {load_dir}. {there} {advice}")
    return folder


def tag_folder_hint(load_dir: Path) -> str:
    """What to pass instead when `load_dir` is the folder of one tag and not of all; else empty."""
    path = load_dir.absolute()
    if not path.is_dir() or not any(layout.is_checkpoint_file(file.name) for file in path.iterdir()):
        return ""
    parent = load_dir.parent if load_dir.name else path.parent
    return f"This is the folder of one tag: pass {str(parent)!r} and tag={path.name!r}."


def find_models(folder: Path, mp_rank: int) -> list[Path]:
    """The model files of `folder`: of all ranks for stage 3, else one, which may not be there."""
    if ranks := layout.partitioned_models_in(folder):
        _check_are_all(folder, "model files", len(set(ranks)), max(ranks) + 1)
        return [folder / layout.model_file(mp_rank, rank) for rank in range(max(ranks) + 1)]
    return [folder / layout.model_file(mp_rank)]


def divides_otherwise(state: Mapping[str, Any], path: Path, position: Position) -> bool:
    """Whether the run that wrote a model file divided its model otherwise than this one.

    Raises:
        CheckpointError: it did, and one of the two does not know which part of a parameter a rank has.
    """
    saved, own = Division.of_file(state, str(path)), position.division
    saved_size = int(state.get("mp_world_size", position.mp_world_size))
    if saved is not None and own is not None:
        has_others = saved.axes["pp"] > 1 or bool(saved.experts or own.experts)  # stages may have other layers
        return saved.axes != own.axes or has_others
    if saved_size == position.mp_world_size:
        return False
    who = "the run that saved it" if saved is None else "this run"
    raise CheckpointError(
        f"{path} was saved by {counted(saved_size, 'model parallel rank')}, this job has {position.mp_world_size}, and "
        f"{who} did not say which part of each parameter a rank has (it divided the model itself, without "
        f"deepspeed.parallel.model_part.mark_part). Start the job with {saved_size}."
    )


def check_division_is_known(folder: Path, position: Position) -> None:
    """Refuse a checkpoint of whole parameters in a job whose ranks have parts of the model that are not known."""
    if position.mp_world_size > 1 and position.division is None:
        raise CheckpointError(
            f"{folder} holds whole parameters, and this job has {position.mp_world_size} model parallel ranks and did "
            "not say which part of each parameter a rank has (it divided the model itself, without "
            "deepspeed.parallel.model_part.mark_part). Load it with 1 model parallel rank."
        )


def find_shards(folder: Path, mp_rank: int, model_state: dict[str, Any], num_models: int) -> list[Path]:
    """The shards in `folder` of a model-parallel rank, of all data-parallel ranks of the save, after checking that none
    is missing. Empty where the model file has the optimizer's state, or nothing has it.

    Args:
        model_state: of this rank.
        num_models: of stage 3, whose ranks have a model file each; else 1.
    """
    found = layout.shards_in(folder)
    mp_world_size = int(model_state.get("mp_world_size", mp_rank + 1))
    num_ranks = max(model_state.get("dp_world_size", 1), num_models, 1 + max((dp for dp, _ in found), default=0))
    if not found and (num_models == 1 or model_state.get("optimizer")):
        return []
    places = ((dp, mp) for dp in range(num_ranks) for mp in range(mp_world_size))  # a damaged number may be any
    if missing := list(islice((place for place in places if place not in found), _SHOWN)):
        prefix = "bf16_" if any(path.name.startswith("bf16_") for path in found.values()) else ""
        there = sum(dp < num_ranks and mp < mp_world_size for dp, mp in found)
        num_missing = num_ranks * mp_world_size - there
        raise CheckpointError(
            f"{folder} is incomplete: of {num_ranks * mp_world_size} optimizer shards {num_missing} are "
            f"missing ({_names(missing, num_missing, prefix)}). Load another tag, or copy the missing files."
        )
    return [found[rank, mp_rank] for rank in range(num_ranks)]


def check_has_states(folder: Path, shards: list[Path], model_state: dict[str, Any]) -> None:
    """Refuse a checkpoint that holds no state of the optimizer."""
    if not shards and not model_state.get("optimizer"):
        raise CheckpointError(
            f"{folder} holds no optimizer state: it has no shards (*{layout.SHARD_SUFFIX}), and the model file has "
            "none. Copy the missing files, load another tag, or load with load_optimizer_states=False."
        )


def check_shard(state: Any, path: Path) -> int:
    """Refuse a shard that is none; returns the ZeRO stage of the save."""
    shard = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    if not isinstance(shard, dict) or "zero_stage" not in shard:
        raise CheckpointError(
            f"{path} is no optimizer shard: it has no key 'optimizer_state_dict' with a 'zero_stage'."
        )
    check_optimizer_types(shard, path)
    return int(shard["zero_stage"])


def split_client_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint's own keys and the user's. All but weights and states leaves the mapped file here."""
    kept = {key: value if key in _MAPPED else map_tensors(value, Tensor.clone) for key, value in state.items()}
    own = {key: value for key, value in kept.items() if key in layout.MODEL_STATE_KEYS}
    known = layout.MODEL_STATE_KEYS | layout.DEEPSPEED_KEYS
    if state.get(MODULE_FILES):
        known |= {"num_experts"}  # a user's own where the module has no experts
    return own, {key: value for key, value in kept.items() if key not in known}


def check_model_ranks(folder: Path, num_ranks: int) -> None:
    """Refuse a number of model-parallel ranks that the files of a save cannot be of, before counting to it."""
    _check_are_all(folder, "files of model-parallel ranks", min(num_ranks, sum(1 for _ in folder.iterdir())), num_ranks)


def _check_are_all(folder: Path, what: str, num_found: int, num_wanted: int) -> None:
    if num_found < num_wanted:
        raise CheckpointError(
            f"{folder} is incomplete: it holds {num_found} {what} of {num_wanted}. Load another tag, or copy the "
            "missing files."
        )


def _names(places: list[tuple[int, int]], num_places: int, prefix: str) -> str:
    """The shards' names, the first few of many."""
    more = f" and {num_places - len(places)} more" if num_places > len(places) else ""
    return ", ".join(layout.shard_file(dp, mp, prefix) for dp, mp in places) + more
