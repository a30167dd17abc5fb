"""The types that the values of a checkpoint must have, so that what was read is refused before it is used.

`check_optimizer_types` looks at the optimizer's side, `check_types` at a model file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from deepspeed.errors import CheckpointError, DeepSpeedError, first_line

_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")


@contextmanager
def as_damage(path: str | Path) -> Iterator[None]:
    """Around what makes sense of files that were read, and changes nothing: errors of Python's say that they hold
    something else.

    Raises:
        CheckpointError: in place of these.
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
    """Called with what a file has of an optimizer: torch's state dict, or ours of flat groups.

    Raises:
        CheckpointError: something is of another type; names the file and the key.
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
        found = f"{value!r:.40}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"{path} is damaged, or was not saved as a checkpoint: {key} is {found}, and {expected} is expected. Load "
            "another tag."
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
