"""Load a checkpoint into a model without values: `take_values_away`, then the division, then `load_weights`.

Each parameter gets memory for this rank's part on the device. The part is read by rows, through a buffer of
`BUFFER_BYTES`, so a rank that holds a part of a weight never holds the whole weight.

`convert` handles checkpoints of transformers with names and shapes that differ from the model's. Files of older models
use other names. Files of models with experts have one weight per expert (`block_sparse_moe.experts.3.w1.weight`), while
the model has one weight for all experts (`mlp.experts.gate_up_proj`). transformers has a table for both cases. Weights
that the table joins by concatenation are read piece by piece, so a rank still reads only its part.
"""

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import CheckpointError, ConfigError, counted
from deepspeed.inference.checkpoint import CheckpointWeights, Found
from deepspeed.inference.quantized import Packing
from deepspeed.log import warn_once
from deepspeed.parallel.model_part import ModelPart, part_held
from deepspeed.tensor_parallel.entry import prepare_params

#: operations of a converter, with their dimensions, that keep the elements of each piece consecutive: a stack of all
#: weights that one pattern matches; several stacks, concatenated along dimension 1; plain concatenation
_STACK, _STACKS, _JOIN = (("MergeModulelist", 0),), (("MergeModulelist", 0), ("Concatenate", 1)), (("Concatenate", 0),)


def convert(weights: CheckpointWeights, model: nn.Module) -> None:
    """Rename the weights in the files to the model's names, and join weights that are one weight in the model.

    Raises:
        CheckpointError: the pieces of a weight differ in number, shape or dtype, or transformers converts the weight
            in an unsupported way; the message names it.
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
    """Return name of the model's weight -> (converter, pattern -> names of pieces)."""
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
    """Return the pieces in the order of their elements, as rows along dimension 0, and whether rows are stacked."""
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
    """Return a sort key that orders numbers in names by value: 10 after 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


#: bytes per read, but at least one row of a weight
BUFFER_BYTES = 2**20
_SHOWN = 3  # names in a message


def has_no_values(model: nn.Module) -> bool:
    """Return whether a parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def take_values_away(model: nn.Module) -> None:
    """Move the parameters to the meta device, in place. Ties between modules are kept, and buffers keep their values.

    Non-persistent buffers on the meta device, which no checkpoint contains, are computed here: transformers derives
    them from a model's configuration.

    Raises:
        ConfigError: transformers cannot compute such a buffer, or another tensor is on the meta device; names it.
    """
    _replace(model, {id(param): _on_meta(param) for param in model.parameters() if not param.is_meta})
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_meta:
                _compute(model, path, name)
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigError(
                    f"init_inference: found the tensor {_join(path, name)!r} on the meta device, which is no parameter "
                    'or buffer, so that no checkpoint has it; make it with device="cpu", or register it as a buffer'
                )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)


def _replace(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Replace the parameters with the ids in `new`."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if id(param) in new:
                setattr(module, name, new[id(param)])


def _compute(model: nn.Module, path: str, name: str) -> None:
    """Let the transformers model around a module compute its buffer.

    It runs twice, with different initial values: if the results differ, the model did not compute the buffer.
    """
    module = model.get_submodule(path)
    buffer = module._buffers[name]
    assert buffer is not None
    names = path.split(".") if path else []
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
    compute: Any = next((each._init_weights for each in around if callable(getattr(each, "_init_weights", None))), None)
    results: list[Any] = []
    for filled in (0, 1):
        setattr(module, name, torch.full_like(buffer, filled, device="cpu"))
        if compute is not None:
            compute(module)
        results.append(module._buffers[name])
    if not torch.equal(results[0], results[1]):
        raise ConfigError(
            f"init_inference: found the buffer {_join(path, name)!r} on the meta device, which no checkpoint has, "
            'as it is not persistent; give it values with module.register_buffer(..., torch.tensor(..., device="cpu")) '
            "before"
        )


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: CheckpointWeights, device: torch.device, packing: Packing | None = None
) -> None:
    """Load the parameters and persistent buffers on `device`, in the model's dtypes.

    Called after the model is divided. Buffers that are not in the files keep their values.

    Args:
        packing: packs weights as they are read, and is then applied; None: do not pack.

    Raises:
        CheckpointError: a weight is missing, or has another shape or kind of dtype; the message names it.
    """
    names: dict[int, list[str]] = {}
    wanted: dict[int, Tensor] = {}
    persistent = set(model.state_dict(keep_vars=True))
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent),
    ):
        names.setdefault(id(tensor), []).append(name)
        wanted[id(tensor)] = tensor
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    convert(weights, model)
    found = {key: weights.find(_spellings(names[key], prefix)) for key in wanted}
    missing = [names[key][0] for key, tensor in wanted.items() if found[key] is None and tensor.is_meta]
    if missing:
        raise CheckpointError(_says_missing(model, weights, missing))
    places = {key: each for key, each in found.items() if each is not None}
    parts = {key: _part(wanted[key], each, names[key][0]) for key, each in places.items()}
    order = {id(each.file): number for number, each in reversed(list(enumerate(places.values())))}
    new = {}
    last = None
    for key, each in sorted(places.items(), key=lambda item: order[id(item[1].file)]):
        if last is not None and last is not each.file:
            last.release()
        last = each.file
        tensor = wanted[key]
        if packing is not None and packing.takes(tensor):
            packing.take(tensor, _read(tensor, each, parts[key], device, packing.num_parts_of(tensor)))
        else:
            new[key] = next(_read(tensor, each, parts[key], device))
    _put(model, new)
    prepare_params(model)
    if packing is not None:
        packing.apply()
    _warn_of_unused(model, weights)


def _spellings(names: Iterable[str], prefix: str) -> Iterator[str]:
    """Yield the names that a weight with the model's `names` may have in files: with and without `prefix`."""
    for name in names:
        yield name
        if prefix:
            yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def _part(tensor: Tensor, found: Found, name: str) -> ModelPart:
    """Return this rank's part of the weight. Raises CheckpointError if the shape or kind of dtype does not match."""
    own = part_held(tensor) or ModelPart.all_elements(tensor.shape)
    whole = own.shape if part_held(tensor) is not None else tensor.shape
    expected = tensor.shape if found.is_own else whole
    if found.shape != expected:
        of_rank = ", this rank's part of it" if found.is_own and tensor.shape != whole else ""
        raise CheckpointError(
            f"checkpoint: found {name} of shape {tuple(found.shape)} in {found.file.path}, and the model's has "
            f"{tuple(expected)}{of_rank}; build the model from the configuration of the checkpoint"
        )
    if found.dtype.is_floating_point != tensor.is_floating_point() or found.dtype.itemsize < 2 <= tensor.itemsize:
        raise CheckpointError(
            f"checkpoint: found {name} of {found.dtype} in {found.file.path}, and the model's is {tensor.dtype}; the "
            "checkpoint is quantized: give one with weights in 16 or 32 bits, and dtype=torch.int8 for few bits"
        )
    return own


def _read(tensor: Tensor, found: Found, part: ModelPart, device: torch.device, num_parts: int = 1) -> Iterator[Tensor]:
    """Yield the value in equal parts along the first dimension."""
    shape = tensor.shape if num_parts == 1 else torch.Size((tensor.shape[0] // num_parts, *tensor.shape[1:]))
    read = found.reader(part)
    row = shape.numel() // shape[0] if shape and shape.numel() else 1
    step = row * max(1, BUFFER_BYTES // max(1, found.row_bytes))
    for number in range(num_parts):
        value = torch.empty(shape, dtype=tensor.dtype, device=device)
        flat = value.view(-1)
        for start in range(0, flat.numel(), step):
            numel = min(step, flat.numel() - start)
            flat[start : start + numel].copy_(read(number * flat.numel() + start, numel))
        yield value


def _put(model: nn.Module, values: dict[int, Tensor]) -> None:
    params = {id(param): param for param in model.parameters()}
    _replace(
        model,
        {
            key: nn.Parameter(value, requires_grad=params[key].requires_grad)
            for key, value in values.items()
            if key in params
        },
    )
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) in values:
                module._buffers[name] = values[id(buffer)]


def _says_missing(model: nn.Module, weights: CheckpointWeights, missing: list[str]) -> str:
    what, kind = weights.files.what, weights.files.kind
    names = weights.names()
    of_type = f" (of type {kind})" if kind else ""
    unused = list(weights.unused())
    if 2 * len(missing) > len(list(model.parameters())) and 2 * len(unused) > len(names):
        return (
            f"checkpoint: found no {_some(missing)} of {type(model).__name__} in {what}{of_type}, which has "
            f"{_some(unused)}; the checkpoint is of another family, so build its model"
        )
    return (
        f"checkpoint: found no {_some(missing)} of {type(model).__name__} in {what}{of_type}; name all files of the "
        "checkpoint, and build the model from its configuration"
    )


def _some(names: list[str]) -> str:
    more = f" and {counted(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"


def _warn_of_unused(model: nn.Module, weights: CheckpointWeights) -> None:
    """Warn about unused weights in the files: they may belong to layers that the model's configuration omits."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    of_buffers = {name for name, _ in model.named_buffers()}
    names = [
        name
        for name in weights.unused()
        if name not in of_buffers
        and not name.endswith((".inv_freq", ".masked_bias", ".position_ids"))
        and not any(pattern.search(name) for pattern in ignored)
    ]
    if names:
        warn_once(
            f"checkpoint: {type(model).__name__} has no place for {_some(names)} of {weights.files.what}; the model is "
            "computed without them"
        )
