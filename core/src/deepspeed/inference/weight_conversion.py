"""Checkpoints of transformers whose keys and shapes are not those of the model, read as those that the model has.

Files of older models have other names. Those of models with experts have a weight for each of them
(`block_sparse_moe.experts.3.w1.weight`) where the model has one for all (`mlp.experts.gate_up_proj`), and transformers
saves them so. It has a table of both. What the table joins by putting pieces one behind the other is read piece by
piece, so a rank still reads no more than its part.
"""

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from deepspeed.errors import CheckpointError, counted
from deepspeed.inference.checkpoint import CheckpointWeights

#: operations of a converter, with their dimensions, after which the elements of the pieces lie one behind the other:
#: a stack of all that one pattern matches; such stacks, joined behind their first dimension; the pieces themselves
_STACK, _STACKS, _JOIN = (("MergeModulelist", 0),), (("MergeModulelist", 0), ("Concatenate", 1)), (("Concatenate", 0),)


def convert(weights: CheckpointWeights, model: nn.Module) -> None:
    """Give the weights in the files the names that `model` has for them, and join those that it has in one.

    Raises:
        CheckpointError: the pieces of a weight differ in number, shape or dtype, or transformers converts it in a way
            that is not read here; names it.
    """
    table = _table_of(model)
    renames = [each for each in table if type(each).__name__ == "WeightRenaming"]
    converters = [each for each in table if type(each).__name__ == "WeightConverter"]
    weights.rename(
        lambda name: functools.reduce(lambda found, each: str(each.rename_source_key(found)[0]), renames, name)
    )
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    wanted = {name.removeprefix(prefix) for name in model.state_dict(keep_vars=True)}
    names = weights.names()
    for target, (converter, by_pattern) in _pieces(names, converters).items():
        pieces = [piece for its in by_pattern.values() for piece in its]
        if target.removeprefix(prefix) not in wanted or (target in names and target not in pieces):
            continue
        rows, is_stacked = _in_order(target, converter, by_pattern, type(model).__name__, weights.files.what)
        weights.join(target, rows, is_stacked=is_stacked)


def _table_of(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules or importlib.util.find_spec("transformers.conversion_mapping") is None:
        return []
    if not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return []
    table = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return list(table)


def _pieces(names: Sequence[str], converters: Sequence[Any]) -> dict[str, tuple[Any, dict[str, list[str]]]]:
    """Return by name of a weight of the model its converter, and the names of its pieces by pattern."""
    found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in names:
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                found.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(name)
                break
    return found


def _in_order(
    target: str, converter: Any, by_pattern: dict[str, list[str]], model: str, what: str
) -> tuple[list[list[str]], bool]:
    """The pieces in the order of their elements, by rows along the first dimension, and whether rows are stacked."""
    operations = tuple((type(each).__name__, getattr(each, "dim", None)) for each in converter.operations)
    if operations not in (_STACK, _STACKS, _JOIN) or len(converter.target_patterns) > 1:
        raise CheckpointError(
            f"checkpoint: {what} has {target} of {model} as transformers saves it, and the conversion to the model's "
            f"({', '.join(name for name, _ in operations)}) is not done here; load the model with from_pretrained, and "
            "leave checkpoint out"
        )
    columns = [sorted(by_pattern.get(pattern, []), key=_natural) for pattern in converter.source_patterns]
    if len(set(map(len, columns))) > 1:
        found = ", ".join(
            f"{len(column)} of {pattern}" for pattern, column in zip(converter.source_patterns, columns, strict=True)
        )
        raise CheckpointError(
            f"checkpoint: {target} is joined of as many weights of each kind, and {what} has {found}; name all files "
            "of the checkpoint"
        )
    if operations == _JOIN and len(columns[0]) > 1:
        raise CheckpointError(
            f"checkpoint: {target} is joined of {counted(len(columns), 'weight')}, and {what} has "
            f"{', '.join(columns[0])} in the place of one"
        )
    return [list(row) for row in zip(*columns, strict=True)], operations != _JOIN


def _natural(name: str) -> list[int | str]:
    """Return the key by which names are sorted as people sort them: 10 behind 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
