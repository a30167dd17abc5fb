"""Find a checkpoint, and check that it fits this job, before anything is changed.

The values of a checkpoint must have certain types, and others are refused before they are used:
`check_optimizer_types` checks the optimizer's side, `check_types` a model file.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import MODULE_FILES, Attributes
from deepspeed.checkpoint.model_ranks import Division, SavedModelRank
from deepspeed.checkpoint.stores import map_tensors
from deepspeed.checkpoint.tensors import StoredTensor
from deepspeed.errors import CheckpointError, DeepSpeedError, counted, first_line
from deepspeed.zero.named_states import SavedStates

_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")


@contextmanager
def as_damage(path: str | Path) -> Iterator[None]:
    """Raise `CheckpointError` in place of Python's errors, in code that interprets files that were read.

    The code changes nothing, so such errors mean that the files hold something else.

    Raises:
        CheckpointError: in place of such errors.
    """
    try:
        yield
    except DeepSpeedError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"{path} is damaged, or was not saved as a checkpoint: what it holds does not fit together "
            f"({type(error).__name__}: {first_line(error)}). Load another tag."
        ) from error


def check_optimizer_types(state: Any, path: str | Path) -> None:
    """Check the types in an optimizer's state from a file: torch's state dict, or ours of flat groups.

    Raises:
        CheckpointError: a value has another type; the message names the file and the key.
    """
    _expect(isinstance(state, Mapping), path, "the optimizer's state", state, "a dict")
    if "param_groups" in state or "state" in state:
        _check_groups(state, path)
    if (base := state.get("base_optimizer_state")) is not None and isinstance(base, Mapping):
        _check_groups(base, path)
    for key in _FLAT:
        if key in state:
            _check_tensors(state[key], path, key)
    if "zero_stage" in state:
        _expect(_is_int(state["zero_stage"]), path, "zero_stage", state["zero_stage"], "an integer")
    counts = state.get("partition_count", 1)
    is_counts = _is_int(counts) or (isinstance(counts, list | tuple) and all(map(_is_int, counts)))
    _expect(is_counts, path, "partition_count", counts, "an integer, or a list of integers")


def _check_groups(state: Mapping[str, Any], path: str | Path) -> None:
    states, groups = state.get("state", {}), state.get("param_groups", [])
    _expect(isinstance(states, Mapping), path, "state", states, "a dict")
    for key, value in states.items():
        _expect(isinstance(value, Mapping), path, f"state[{key!r}]", value, "a dict by name")
        _expect(all(isinstance(name, str) for name in value), path, f"state[{key!r}]", value, "a dict by name")
        for nested in ("parameter_scalars", "parameter_states"):
            is_nested = isinstance(value.get(nested, {}), Mapping)
            is_nested = is_nested and all(isinstance(each, Mapping) for each in value.get(nested, {}).values())
            _expect(is_nested, path, f"state[{key!r}][{nested!r}]", value.get(nested), "a dict of dicts")
    _expect(isinstance(groups, Sequence) and not isinstance(groups, str), path, "param_groups", groups, "a list")
    for index, group in enumerate(groups):
        _expect(isinstance(group, Mapping), path, f"param_groups[{index}]", group, "a dict by name")
        params = group.get("params", [])
        _expect(isinstance(params, list | tuple), path, f"param_groups[{index}].params", params, "a list")


def _check_tensors(values: Any, path: str | Path, key: str) -> None:
    _expect(isinstance(values, list | tuple), path, key, values, "a list of tensors")
    for index, value in enumerate(values):
        is_flat = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        _expect(is_flat, path, f"{key}[{index}]", value, "a tensor of floating point or complex numbers")


def _expect(fits: bool, path: str | Path, key: str, value: Any, expected: str) -> None:
    if not fits:
        raise CheckpointError(
            f"{path} is damaged, or was not saved as a checkpoint: {key} is {_shown(value)}, and {expected} is "
            "expected. Load another tag."
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_COUNTS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")


def check_types(state: Any, path: str | Path) -> None:
    """Check the types in the content of the model file `path`.

    Raises:
        CheckpointError: it holds something else than a model file does; the message names the file and the key.
    """
    if not isinstance(state, Mapping) or "module" not in state:
        raise CheckpointError(f"{path} is no model file of a checkpoint: found {_shown(state)} without a key 'module'.")
    for key, (fits, expected) in _EXPECTED.items():
        is_beside = key == "module" and state[key] is None and state.get("ds_module_files")
        if key in state and not is_beside:
            _expect(fits(state[key]), path, key, state[key], expected)
    if isinstance(state.get("optimizer"), Mapping):
        check_optimizer_types(state["optimizer"], path)
    unknown = set(state.get("frozen_param_fragments") or ()) - set(state.get("frozen_param_shapes") or ())
    if unknown:
        raise CheckpointError(
            f"{path} is damaged: frozen_param_shapes does not have {', '.join(sorted(unknown)[:4])} of "
            "frozen_param_fragments. Load another tag."
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(sorted(map(str, value))[:8]) or 'nothing'}"
    is_brief = isinstance(value, str | int | float)
    return f"{value!r:.40}" if is_brief else "None" if value is None else f"a {type(value).__name__}"


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_count, value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_name_or_row(value: Any) -> bool:
    """Return whether `value` is the name of a weight, or a name and a row where one weight has several experts."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return _is_name(value) or (is_pair and _is_name(value[0]) and _is_count(value[1]))


def _is_any(value: Any) -> bool:
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _or_nothing(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that accepts what `fits` accepts, and None and an empty list: some versions write these."""
    return lambda value: value is None or (isinstance(value, list) and not value) or fits(value)


def _by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(_is_name, value)) and all(map(fits, value.values()))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple | set) and all(map(fits, value))


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "module": (_by_name(_is_any), "a dict by name"),  # extra states may be anything
        "ds_module_files": (_by_name(_by_name(_is_name_or_row)), "a dict of names by file"),
        "ds_module_rest": (_or_nothing(_by_name(_is_any)), "a dict by name"),
        "ds_optimizer_file": (_is_name, "the name of a file"),
        "ds_data_rank": (_is_count, "an integer >= 0"),
        "buffer_names": (_or_nothing(_list_of(_is_name)), "a list of names"),
        "optimizer": (_or_nothing(lambda value: isinstance(value, Mapping)), "a dict"),
        "param_shapes": (_or_nothing(_list_of(_by_name(_is_shape))), "a list of dicts of shapes by name"),
        "frozen_param_shapes": (_or_nothing(_by_name(_is_shape)), "a dict of shapes by name"),
        "frozen_param_fragments": (_or_nothing(_by_name(_is_tensor)), "a dict of tensors by name"),
        "shared_params": (_or_nothing(_by_name(_is_name)), "a dict of names by name"),
        **dict.fromkeys(_COUNTS, (_is_count, "an integer >= 0")),
    }
)


_SHOWN = 8  # names in one message
_MAPPED = frozenset({"module", "optimizer", "frozen_param_fragments"})  # read by range, or copied when they are used


@dataclass(frozen=True)
class SavedParts:
    """The mapped files of all data-parallel ranks of a save, at this rank's model-parallel place."""

    model_states: list[dict[str, Any]]
    """The model state of each rank of stage 3; other stages have one for all ranks."""
    shard_states: list[dict[str, Any]]
    """`optimizer_state_dict` of each rank; empty where the model file has the optimizer's state, or none has it."""


@dataclass(frozen=True)
class StatesByName:
    """The states that a load finds by the names of the parameters."""

    states: SavedStates
    loss_scaler: Any
    """Its state; None where the save had none."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """`LoadedCheckpoint` is the result of `Checkpointer.load`."""

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
    """The files of a save by another number of ranks, or of another stage, which this rank has to join; else None."""
    stored: Mapping[str, StoredTensor] | None = None
    """The weights and buffers of another program's checkpoint, in its files; `module` is then empty."""
    model_ranks: Sequence[SavedModelRank] = ()
    """The files of all model-parallel ranks, where this run divides the model otherwise."""
    states: SavedStates | None = None
    """The optimizer's state in the files of `model_ranks`, by the names of this run."""
    by_name: StatesByName | None = None
    """The master weights and the optimizer's state, to be read by range, in place of `shard_state`."""
    rounding: Mapping[str, Any] | None = None
    """The errors that the rank of this number had left to send; None where nothing was rounded. Mapped, too."""

    @property
    def has_masters(self) -> bool:
        """Whether master weights must be restored apart from the module's weights."""
        return self.by_name is not None or self.shard_state is not None


@dataclass(frozen=True)
class Position:
    """`Position` says which part of a checkpoint belongs to this rank."""

    dp_rank: int
    dp_world_size: int
    mp_rank: int
    mp_world_size: int
    division: Division | None = None
    """The way in which this run divides the model; None where the run does not know."""
    layers: Mapping[int, str] | None = None
    """The prefix of the names of each layer's weights in a pipeline, by the layer, whichever stage has the layer."""
    held_layers: Collection[int] = ()
    """The numbers of the layers that this rank has."""

    @property
    def rank(self) -> int:
        """The rank among all that share the checkpoint."""
        return self.dp_rank * self.mp_world_size + self.mp_rank

    @property
    def world_size(self) -> int:
        return self.dp_world_size * self.mp_world_size

    @property
    def divides_model(self) -> bool:
        """Whether the ranks of this run have different parts of the model that are known."""
        own = self.division
        return own is not None and (max(own.axes.values()) > 1 or bool(own.experts))


def find_folder(load_dir: Path, tag: str) -> Path:
    """Return the folder of the whole checkpoint `tag`."""
    folder = layout.whole_folder(load_dir / tag)
    if folder is None:
        found = layout.tags_in(load_dir)
        there = f"It holds: {', '.join(found)}." if found else "No checkpoint was found there."
        advice = tag_folder_hint(load_dir) or "Check the directory and the tag."
        raise CheckpointError(f"there is no checkpoint {tag!r} in {load_dir}. {there} {advice}")
    return folder


def why_no_latest(load_dir: Path) -> str:
    """Say what is at `load_dir` instead of the folder of all tags, or what to pass."""
    if not load_dir.exists():
        return f"The folder {load_dir.absolute()} does not exist."
    if not load_dir.is_dir():
        return f"{load_dir} is no folder; give the one that save_checkpoint was given."
    return tag_folder_hint(load_dir) or "Pass a tag if there is a checkpoint without that file."


def tag_folder_hint(load_dir: Path) -> str:
    """Say what to pass when `load_dir` is the folder of one tag and not of all tags; else return an empty text."""
    path = load_dir.absolute()
    if not path.is_dir() or not any(layout.is_checkpoint_file(file.name) for file in path.iterdir()):
        return ""
    parent = load_dir.parent if load_dir.name else path.parent
    return f"This is the folder of one tag: pass {str(parent)!r} and tag={path.name!r}."


def find_models(folder: Path, mp_rank: int) -> list[Path]:
    """Return the model files of `folder`: those of all ranks for stage 3, else one, which may be missing."""
    if ranks := layout.partitioned_models_in(folder):
        _check_are_all(folder, "model files", len(set(ranks)), max(ranks) + 1)
        return [folder / layout.model_file(mp_rank, rank) for rank in range(max(ranks) + 1)]
    return [folder / layout.model_file(mp_rank)]


def divides_otherwise(state: Mapping[str, Any], path: Path, position: Position) -> bool:
    """Whether the run that wrote a model file divided its model differently from this run.

    Raises:
        CheckpointError: it did, and one of the two runs does not know which part of a parameter a rank has.
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
    """Refuse a checkpoint of whole parameters if the ranks of this job have unknown parts of the model."""
    if position.mp_world_size > 1 and position.division is None:
        raise CheckpointError(
            f"{folder} holds whole parameters, and this job has {position.mp_world_size} model parallel ranks and did "
            "not say which part of each parameter a rank has (it divided the model itself, without "
            "deepspeed.parallel.model_part.mark_part). Load it with 1 model parallel rank."
        )


def find_shards(folder: Path, mp_rank: int, model_state: dict[str, Any], num_models: int) -> list[Path]:
    """Return a model-parallel rank's shards in `folder`, one per data-parallel rank of the save, after checking that
    none is missing. Empty if the model file has the optimizer's state, or no file has it.

    Args:
        model_state: the model state of this rank.
        num_models: number of model files: one per rank in stage 3, else 1.
    """
    found = layout.shards_in(folder)
    mp_world_size = int(model_state.get("mp_world_size", mp_rank + 1))
    num_ranks = max(model_state.get("dp_world_size", 1), num_models, 1 + max((dp for dp, _ in found), default=0))
    if not found and (num_models == 1 or model_state.get("optimizer")):
        return []
    places = ((dp, mp) for dp in range(num_ranks) for mp in range(mp_world_size))  # damaged files may say any number
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
    """Refuse a file that is no shard; return the ZeRO stage of the save."""
    shard = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    if not isinstance(shard, dict) or "zero_stage" not in shard:
        raise CheckpointError(
            f"{path} is no optimizer shard: it has no key 'optimizer_state_dict' with a 'zero_stage'."
        )
    check_optimizer_types(shard, path)
    return int(shard["zero_stage"])


def split_client_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's own keys and the user's. All values but weights and states are copied from the file."""
    kept = {key: value if key in _MAPPED else map_tensors(value, Tensor.clone) for key, value in state.items()}
    own = {key: value for key, value in kept.items() if key in layout.MODEL_STATE_KEYS}
    known = layout.MODEL_STATE_KEYS | layout.DEEPSPEED_KEYS
    if state.get(MODULE_FILES):
        known |= {"num_experts"}  # it is a user's own key if the module has no experts
    return own, {key: value for key, value in kept.items() if key not in known}


def check_model_ranks(folder: Path, num_ranks: int) -> None:
    """Refuse a number of model-parallel ranks that is larger than the number of files, before counting to it."""
    _check_are_all(folder, "files of model-parallel ranks", min(num_ranks, sum(1 for _ in folder.iterdir())), num_ranks)


def _check_are_all(folder: Path, what: str, num_found: int, num_wanted: int) -> None:
    if num_found < num_wanted:
        raise CheckpointError(
            f"{folder} is incomplete: it holds {num_found} {what} of {num_wanted}. Load another tag, or copy the "
            "missing files."
        )


def _names(places: list[tuple[int, int]], num_places: int, prefix: str) -> str:
    """Return the names of the shards, or the first few of many."""
    more = f" and {num_places - len(places)} more" if num_places > len(places) else ""
    return ", ".join(layout.shard_file(dp, mp, prefix) for dp, mp in places) + more


def is_deepspeeds(shard: Mapping[str, Any]) -> bool:
    """Whether an `optimizer_state_dict` is in DeepSpeed's form: written by it, or for it (`checkpoint.format`)."""
    return isinstance(shard.get("loss_scaler"), Attributes) or "loss_scale_state" in shard
