"""Of which types the values in a model file are, so that what was read is refused before anything is made of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.state_types import check_optimizer_types
from deepspeed.errors import CheckpointError

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")


def check_types(state: Any, path: str | Path) -> None:
    """Called with what the model file `path` holds.

    Raises:
        CheckpointError: it holds something else than a model file does; names the file and the key.
    """
    if not isinstance(state, Mapping) or "module" not in state:
        raise CheckpointError(f"{path} is no model file of a checkpoint: found {_shown(state)} without a key 'module'.")
    for key, (fits, expected) in _EXPECTED.items():
        is_beside = key == "module" and state[key] is None and state.get("ds_module_files")
        if key in state and not is_beside and not fits(state[key]):
            raise CheckpointError(
                f"{path} is damaged, or was not saved as a checkpoint: {key} is {_shown(state[key])}, and {expected} "
                "is expected. Load another tag."
            )
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
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_count, value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_name_or_row(value: Any) -> bool:
    """Of a weight, with its row where several experts have one."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return _is_name(value) or (is_pair and _is_name(value[0]) and _is_count(value[1]))


def _is_any(value: Any) -> bool:
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _or_nothing(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Or None, or an empty list, as some versions write it."""
    return lambda value: value is None or (isinstance(value, list) and not value) or fits(value)


def _by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(_is_name, value)) and all(map(fits, value.values()))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple | set) and all(map(fits, value))


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "module": (_by_name(_is_any), "a dict by name"),  # extra states are anything
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
