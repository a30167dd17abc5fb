"""Of which types the optimizer's side of a checkpoint is, so that what was read is refused before it is used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
