"""Finding a checkpoint and checking that it fits this job, before anything is changed."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.tensors import map_tensors
from deepspeed.errors import CheckpointError

_SHOWN = 8  # names in one message
_WEIGHTS_ALONE = f"take the weights alone: run {layout.SCRIPT_FILE} and load its file into the model before initialize"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `Checkpointer.load` found."""

    path: str
    """The model file that this rank read."""
    tag: str
    model_state: dict[str, Any]
    """The checkpoint's own keys (`layout.MODEL_STATE_KEYS`). Tensors of `module` are mapped from the file: copy
    them, as `load_state_dict` does."""
    shard_state: dict[str, Any] | None
    """This rank's optimizer shard: `optimizer_state_dict`, `ds_config`, `ds_version`. None when not asked for. Mapped
    from the file too."""
    client_state: dict[str, Any]
    """The user's own keys, as they were given to the save."""


@dataclass(frozen=True)
class Position:
    """Which part of a checkpoint is this rank's."""

    dp_rank: int
    dp_world_size: int
    mp_rank: int
    mp_world_size: int


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


def check_model_state(state: Any, path: Path, position: Position, *, needs_shard: bool) -> None:
    """Refuse a model file that is none, or that other numbers of ranks wrote. `needs_shard`: the shards matter too."""
    if not isinstance(state, dict) or "module" not in state:
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} is no model file of a checkpoint: it has no key 'module' (found: {found}).")
    saved_mp = state.get("mp_world_size", position.mp_world_size)
    if saved_mp != position.mp_world_size:
        raise CheckpointError(
            f"{path} was saved by {saved_mp} model parallel ranks, this job has {position.mp_world_size}. Start the "
            f"job with {saved_mp}: changing the number at load is not supported."
        )
    saved_dp = state.get("dp_world_size", position.dp_world_size)
    if needs_shard and saved_dp != position.dp_world_size:
        raise CheckpointError(_other_world_size(path.parent, saved_dp, position))


def check_kind(folder: Path, model_file: str, position: Position) -> None:
    """Refuse what a job of another kind saved: stage 3 has one model file per rank, the others have one for all."""
    is_stage_3, saved_ranks = layout.is_partitioned(model_file), layout.partitioned_models_in(folder)
    if is_stage_3 and saved_ranks:
        saved = 1 + max(saved_ranks | {dp for dp, _ in layout.shards_in(folder)})
        if saved != position.dp_world_size:
            raise CheckpointError(
                f"{folder} was saved by {saved} data parallel ranks with ZeRO stage 3, this job has "
                f"{position.dp_world_size}. Start the job with {saved}, or {_WEIGHTS_ALONE}."
            )
    if is_stage_3 != bool(saved_ranks) and not (folder / model_file).exists() and layout.has_models(folder):
        saved_stage, stage = ("0, 1 or 2", "3") if is_stage_3 else ("3", "0, 1 or 2")
        raise CheckpointError(
            f"{folder} was saved by ZeRO stage {saved_stage}, this job runs stage {stage}. Set zero_optimization.stage "
            f"to that of the save, or {_WEIGHTS_ALONE}."
        )


def find_shard(folder: Path, position: Position, prefix: str, model_state: dict[str, Any]) -> Path:
    """This rank's shard in `folder`, after checking that the shards of all ranks are there."""
    found = layout.shards_in(folder)
    wanted = {(dp, mp) for dp in range(position.dp_world_size) for mp in range(position.mp_world_size)}
    if not found:
        if model_state.get("optimizer"):
            raise CheckpointError(
                f"{folder} holds no optimizer shards (*_optim_states.pt): ZeRO stage 0 saved it, with the optimizer "
                "state in the model file. Set zero_optimization.stage to 0, or load with load_optimizer_states=False."
            )
        raise CheckpointError(
            f"{folder} holds no optimizer state: all of its shards are missing ({_names(sorted(wanted), prefix)}), and "
            "the model file has none. Copy the missing files, load another tag, or load with "
            "load_optimizer_states=False."
        )
    if missing := sorted(wanted - set(found)):
        raise CheckpointError(
            f"{folder} is incomplete: of {len(wanted)} optimizer shards {len(missing)} are missing "
            f"({_names(missing, prefix)}). Load another tag, or copy the missing files."
        )
    if len(found) > len(wanted):
        raise CheckpointError(_other_world_size(folder, 1 + max(dp for dp, _ in found), position))
    return found[position.dp_rank, position.mp_rank]


def check_shard(state: Any, path: Path, position: Position, zero_stages: Collection[int] | None) -> None:
    """Refuse a shard that is none, of another ZeRO stage, or of another number of ranks."""
    shard = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    if not isinstance(shard, dict) or "zero_stage" not in shard:
        raise CheckpointError(
            f"{path} is no optimizer shard: it has no key 'optimizer_state_dict' with a 'zero_stage'."
        )
    stage = int(shard["zero_stage"])
    if zero_stages is not None and stage not in zero_stages:
        raise CheckpointError(
            f"{path} was saved by ZeRO stage {stage}, this job runs {' or '.join(map(str, sorted(zero_stages)))}. "
            f"Set zero_optimization.stage to {stage}, or load with load_optimizer_states=False."
        )
    counts = shard.get("partition_count", position.dp_world_size)
    for count in counts if isinstance(counts, (list, tuple)) else [counts]:
        if count not in (1, position.dp_world_size):  # 1: a group that every rank holds whole
            raise CheckpointError(_other_world_size(path.parent, count, position))


def split_client_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint's own keys and the user's. All but the weights leaves the mapped file here."""
    kept = {key: value if key == "module" else map_tensors(value, Tensor.clone) for key, value in state.items()}
    own = {key: value for key, value in kept.items() if key in layout.MODEL_STATE_KEYS}
    return own, {key: value for key, value in kept.items() if key not in layout.MODEL_STATE_KEYS}


def _names(places: list[tuple[int, int]], prefix: str) -> str:
    """The shards' names, the first few of many."""
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(layout.shard_file(dp, mp, prefix) for dp, mp in places[:_SHOWN]) + more


def _other_world_size(folder: Path, saved: int, position: Position) -> str:
    return (
        f"{folder} was saved by {saved} data parallel ranks, this job has {position.dp_world_size}. Start the job with "
        f"{saved}, or take the weights alone: load with load_optimizer_states=False, or run {layout.SCRIPT_FILE}."
    )
