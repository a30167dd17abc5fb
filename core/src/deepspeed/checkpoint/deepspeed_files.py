"""Convert files of DeepSpeed 0.19, its checkpoints and its universal format, to the form of this package.

`reader.py` and `saved_run.py` call these functions with the contents that they have read.

A file of DeepSpeed has objects of its own classes: the loss scaler, the stage, and the addresses of parameters in a
shard. They are loaded as plain records of their attributes; no other class of DeepSpeed is admitted.

`named_by_stage` names the optimizer states of pipeline stages that DeepSpeed saved without ZeRO. torch's state dict
numbers a stage's parameters: the shared modules' first, then the layers' in order. No file says which layers a stage
has. The number of parameters per stage leaves candidates, and the one whose shapes fit is taken.

A universal checkpoint, as DeepSpeed's `ds_to_universal` writes it:

<tag>/*_model_states.pt                   as in the checkpoint that it was made from
<tag>/zero/<name>/fp32.pt, exp_avg.pt     one file per parameter and state: a tensor, or `{"param": tensor}`
<tag>/zero/<name>/step.pt                 in stages 1 and 2; in stage 3 the count is in the next file
<tag>/zero/optimizer_state.pt             the groups of the optimizer

`universal_checkpoint_info` in a client state (Megatron-DeepSpeed writes it) says by name patterns how parameters are
divided over tensor-parallel ranks. `with_division` converts it to a record of ours (`model_ranks.Division`) for each
model file without one. Patterns match from the beginning of a name, as `re.match` does:

    tp_replicated_parameter_patterns           whole on each rank
    parameter_to_average_patterns              the mean of the ranks' values
    parameter_with_row_parallelism_patterns    divided along dimension 1
    parameter_with_2_sub_params_cat_dim_0      two parameters along dimension 0, each divided
    parameter_with_sub_params                  `{"patterns", "shape", "partition_dim"}`: several parameters, see `shape`
    vocabulary_parameter_patterns              divided along dimension 0, like parameters that match nothing

Parameters that match the last pattern are written without the rows from `original_vocab_size` on; a load fills these
rows with zeros.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import MODULE_FILES, Attributes
from deepspeed.checkpoint.load import is_deepspeeds
from deepspeed.checkpoint.model_ranks import DIVISION, Division
from deepspeed.checkpoint.saved_states import PARAM_NAMES, names_by_group
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart
from deepspeed.precision.policy import LossScaler

#: names of files and keys in DeepSpeed's checkpoints, which scripts such as Megatron-DeepSpeed import
ZERO_FILE_PREFIX = "zero_pp_rank_"
FP16_ZERO_FILE_PREFIX = "fp16_zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_PREFIX = "mp_rank_"
MODEL_FILE_SUFFIX = "_model_states.pt"
LAYER_FILE_PREFIX = "layer_"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARAM_GROUPS = "param_groups"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
CLIP_GRAD = "clip_grad"
LOSS_SCALER = "loss_scaler"
PARAM = "param"
PARAM_SHAPES = "param_shapes"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
BUFFER_NAMES = "buffer_names"
DS_VERSION = "ds_version"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
FP32_WEIGHT_KEY = "fp32"
CAT_DIM = "cat_dim"
VOCAB_TENSOR = "vocab_tensor"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
EXPERT_PARAMETER_PATTERNS = "expert_parameter_patterns"


def as_own_shard(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the `optimizer_state_dict` in the content of the shard file `path`, with our keys and plain values.

    Raises:
        CheckpointError: the file is of an elastic checkpoint, which has no whole states of groups.
    """
    shard: dict[str, Any] = state["optimizer_state_dict"]
    if not is_deepspeeds(shard):
        return shard
    own = {**shard, "loss_scaler": loss_scale_in(shard), "zero_stage": int(shard["zero_stage"])}
    if "optimizer_state_dict" in own:  # its name in stage 3
        own["base_optimizer_state"] = own.pop("optimizer_state_dict")
    found = own.get("base_optimizer_state")
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path}: found base_optimizer_state as a {type(found).__name__}, which DeepSpeed writes with "
            "elastic_checkpoint; save it with elastic_checkpoint false"
        )
    return own


def loss_scale_in(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the loss scaler in a file that DeepSpeed wrote or can load; None if there is none."""
    found = state.get("loss_scale_state", state.get("loss_scaler"))
    return dict(vars(found) if isinstance(found, Attributes) else found) if found is not None else None


def constant_scaler() -> LossScaler:
    """Return DeepSpeed's loss scaler without fp16, a constant scale of 1, which DeepSpeed needs in files of stage 3."""
    scaler = LossScaler.__new__(LossScaler)
    vars(scaler).update(cur_scale=1.0, dynamic=False)
    return scaler


_TIED = "tied_modules."
_Model = dict[str, Any]


def named_by_stage(ranks: Sequence[dict[int, _Model]], layers: Mapping[int, str] | None) -> list[dict[int, _Model]]:
    """Return the contents of the model files, by data-parallel rank, of each model-parallel rank; add missing names.

    Args:
        layers: as in `load.Position`.
    """
    models = [states[0] for states in ranks]
    groups = [(model.get("optimizer") or {}).get("param_groups", []) for model in models]
    is_whole = all(
        model.get("param_shapes") is None and PARAM_NAMES not in (model["optimizer"] or {}) for model in models
    )
    if not is_whole or any(len(its) != 1 for its in groups):
        return list(ranks)
    wanted = [len(its[0]["params"]) for its in groups]
    names = next((each for each in _cut(_layers_of(models[0], models, layers), wanted) if _fit(each, models)), None)
    if names is None:
        return list(ranks)
    return [
        {**states, 0: {**states[0], "optimizer": {**states[0]["optimizer"], PARAM_NAMES: [its]}}}
        for states, its in zip(ranks, names, strict=True)
    ]


def _layers_of(model: _Model, models: Sequence[_Model], layers: Mapping[int, str] | None) -> list[list[str]]:
    """Return the names of the parameters of each layer that has any."""
    buffers = {name for each in models for name in each.get("buffer_names") or ()}
    found = {}
    for file, names in model.get(MODULE_FILES, {}).items():
        if match := re.match(r"layer_(\d+)-", file):
            found[int(match[1])] = [name for name in names.values() if name not in buffers]
    params = [name for name in model["module"] if name not in buffers]
    for number, prefix in (layers or {}).items():
        if prefix.startswith(_TIED):
            found[number] = [name for name in params if name.startswith(prefix)]
    return [names for _, names in sorted(found.items()) if names]


def _cut(layers: Sequence[list[str]], wanted: Sequence[int]) -> Iterator[list[list[str]]]:
    """Yield every division of the layers into stages of `wanted` parameters each: the names of each stage, in order."""
    if not wanted:
        if not layers:
            yield []
        return
    for stop in range(1, len(layers) + 1):
        held = dict.fromkeys(name for its in layers[:stop] for name in its)
        if len(held) > wanted[0]:
            return
        if len(held) == wanted[0]:
            own = sorted(held, key=lambda name: not name.startswith(_TIED))
            yield from ([own, *rest] for rest in _cut(layers[stop:], wanted[1:]))


def _fit(names: Sequence[Sequence[str]], models: Sequence[_Model]) -> bool:
    """Whether the optimizer states of each stage have the shapes of its parameters."""
    for its, model in zip(names, models, strict=True):
        (group,) = model["optimizer"]["param_groups"]
        for number, name in zip(group["params"], its, strict=True):
            moment = model["optimizer"]["state"].get(number, {}).get("exp_avg")
            if isinstance(moment, Tensor) and moment.shape != model["module"][name].shape:
                return False
    return True


_SLICE = re.compile(r"layer_\d+(-[\w-]+)?-model_states\.pt")


def with_division(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of the model file `path`. If its client state says how parameters are divided, and nothing
    else does, add a record of that.

    Raises:
        CheckpointError: a pattern does not fit a parameter; the message names both.
    """
    num_ranks, info = state.get("mp_world_size") or 1, state.get(UNIVERSAL_CHECKPOINT_INFO)
    if not isinstance(info, Mapping) or not isinstance(num_ranks, int) or num_ranks < 2 or state.get(DIVISION):
        return state
    info = {key: _plain(value) for key, value in info.items()}
    slices = {match[1] for name in state.get(MODULE_FILES) or () if (match := _SLICE.fullmatch(name))}
    tp_size = num_ranks
    if slices:  # of a pipeline
        found = {_SLICE.fullmatch(each.name) for each in path.parent.iterdir()}
        tp_size = len({match[1] for match in found if match})
    tp_rank = layout.ranks_of(path.name)[1] % tp_size
    named = [*(state.get("param_shapes") or ()), state.get("frozen_param_shapes") or {}]
    shapes = {name: torch.Size(shape) for group in named for name, shape in group.items()}
    buffers = set(state.get("buffer_names") or ())
    shapes |= {
        name: value.shape
        for name, value in (state.get("module") or {}).items()
        if name not in shapes and name not in buffers and isinstance(value, torch.Tensor) and value.numel()
    }
    try:
        parts = {name: part for name, shape in shapes.items() if (part := _part(name, shape, info, tp_rank, tp_size))}
        averaged = tuple(name for name in shapes if _matches(name, info.get(PARAMETER_TO_AVERAGE_PATTERNS)))
    except (KeyError, TypeError, re.error) as error:
        raise CheckpointError(f"{path}: {UNIVERSAL_CHECKPOINT_INFO} is of another form: {error!r}") from error
    axes = {"pp": num_ranks // tp_size, "tp": tp_size}
    division = Division(axes, parts, averaged=averaged).to_state()
    return {**state, UNIVERSAL_CHECKPOINT_INFO: info, DIVISION: division}


def vocabulary_rows(client_state: Mapping[str, Any], name: str) -> int | None:
    """Return the number of rows without padding of a parameter divided by vocabulary; None for other parameters."""
    info = client_state.get(UNIVERSAL_CHECKPOINT_INFO)
    if not isinstance(info, Mapping) or not _matches(name, info.get(VOCABULARY_PARAMETER_PATTERNS)):
        return None
    rows = info.get(ORIGINAL_VOCAB_SIZE)
    return rows if isinstance(rows, int) and rows > 0 else None


def _part(name: str, shape: torch.Size, info: Mapping[str, Any], rank: int, size: int) -> ModelPart | None:
    """Return the part that a rank with a tensor of `shape` has of a parameter; None if it has the whole one."""
    is_whole = any(
        _matches(name, info.get(key)) for key in (TP_REPLICATED_PARAMETER_PATTERNS, PARAMETER_TO_AVERAGE_PATTERNS)
    )
    if is_whole or not shape:
        return None
    if _matches(name, info.get(PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0)):
        return _fused(name, shape, 0, [shape[0] * size // 2] * 2, rank, size)
    for each in info.get(PARAMETER_WITH_SUB_PARAMS) or ():
        if _matches(name, each["patterns"]):
            return _of_sub_params(name, shape, each, rank, size)
    dim = int(_matches(name, info.get(PARAMETER_WITH_ROW_PARALLELISM_PATTERNS)))
    if dim >= len(shape):
        raise CheckpointError(
            f"{name} of shape {tuple(shape)} matches {PARAMETER_WITH_ROW_PARALLELISM_PATTERNS}, and has no dimension "
            f"1; a bias that each rank has whole belongs to {TP_REPLICATED_PARAMETER_PATTERNS}"
        )
    return _fused(name, shape, dim, [shape[dim] * size], rank, size)


def _of_sub_params(name: str, shape: torch.Size, said: Mapping[str, Any], rank: int, size: int) -> ModelPart:
    whole, dim = list(said["shape"]), int(said["partition_dim"])
    sizes = list(whole[dim]) if isinstance(whole[dim], Sequence) else [whole[dim]]
    rest = [sum(each) if isinstance(each, Sequence) else each for each in whole]
    if len(rest) != len(shape):  # the parameter merges the leading dimensions into one
        sizes, dim, rest = sizes * math.prod(rest[:dim]), 0, [math.prod(rest[: dim + 1]), *rest[dim + 1 :]]
    own = [each // size if place == dim else each for place, each in enumerate(rest)]
    if own != list(shape):
        raise CheckpointError(
            f"{name} has shape {tuple(shape)} on one of {size} tensor-parallel ranks, and {PARAMETER_WITH_SUB_PARAMS} "
            f"says {said['shape']} of the whole, divided along {said['partition_dim']}"
        )
    return _fused(name, shape, dim, sizes, rank, size)


def _fused(name: str, shape: torch.Size, dim: int, sizes: Sequence[int], rank: int, size: int) -> ModelPart:
    """Return the part of a rank that has one of `size` equal runs of each of several parameters along `dim`."""
    if any(each % size for each in sizes) or sum(sizes) != shape[dim] * size:
        raise CheckpointError(
            f"{name} of shape {tuple(shape)} on each of {size} tensor-parallel ranks is not made of parameters of "
            f"{sizes} along dimension {dim}, which divide by {size}; correct the patterns of "
            f"{UNIVERSAL_CHECKPOINT_INFO}"
        )
    whole = [*shape[:dim], shape[dim] * size, *shape[dim + 1 :]]
    cuts = pairwise(accumulate(sizes, initial=0))
    ranges = tuple(
        (start + (stop - start) // size * rank, start + (stop - start) // size * (rank + 1)) for start, stop in cuts
    )
    return ModelPart(torch.Size(whole), dim, ranges)


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.match(pattern, name) for pattern in patterns or ())


def _plain(value: Any) -> Any:
    """Return an item of the info; a `SubparamShape` becomes the dict of its fields."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return dict(vars(value)) if isinstance(value, Attributes) else value


_GROUPS_FILE = "optimizer_state.pt"
_Load = Callable[[Path], Any]


def with_universal_states(model_state: Mapping[str, Any], folder: Path, load: _Load) -> dict[str, Any]:
    """Return `model_state` with the weights and the optimizer state of `folder`, as torch's state dict with names.

    Args:
        load: returns the content of a file; tensors may be mapped.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    zero = folder / layout.UNIVERSAL_FOLDER
    common = load(zero / _GROUPS_FILE)
    base = common.get("optimizer_state_dict", common) if isinstance(common, dict) else {}
    if "param_groups" not in base or not model_state.get("param_shapes"):
        raise CheckpointError(f"{zero / _GROUPS_FILE} has no param_groups, or the model file beside it no param_shapes")
    buffers = model_state["param_shapes"]
    names = names_by_group(base["param_groups"], buffers)
    steps = {
        name: state["step"]
        for number, state in base.get("state", {}).items()
        if "step" in state
        for name in buffers[number]
    }
    shapes = {name: torch.Size(shape) for buffer in buffers for name, shape in buffer.items()}
    numbers = {name: number for number, name in enumerate(name for its in names for name in its)}
    weights: dict[str, Tensor] = {}
    states: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        values = {path.stem: _value(load(path), shapes[name], path) for path in sorted((zero / name).glob("*.pt"))}
        if "fp32" not in values:
            raise CheckpointError(f"{zero / name / 'fp32.pt'} is missing; convert the checkpoint again")
        weights[name] = values.pop("fp32")
        states[number] = {**({"step": steps[name]} if name in steps else {}), **values}
    _refuse_missing(zero, names, shapes, [states[number] for number in range(len(numbers))])
    for its in names:
        of_group = [numbers[name] for name in its]
        if any("step" in states[number] for number in of_group):  # else this optimizer has no step count
            states |= {number: {} for number in of_group if "step" not in states[number]}
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[name] for name in its]}
        for group, its in zip(base["param_groups"], names, strict=True)
    ]
    optimizer = {"state": states, "param_groups": groups, PARAM_NAMES: names}
    if (scaler := loss_scale_in(common)) is not None:
        optimizer["loss_scaler"] = scaler
    return {**model_state, "module": {**model_state["module"], **weights}, "optimizer": optimizer}


def _refuse_missing(
    zero: Path, names: Sequence[Sequence[str]], shapes: Mapping[str, torch.Size], states: Sequence[Mapping[str, Any]]
) -> None:
    """Raise CheckpointError if an updated parameter lacks a state that another one of its group and number of
    dimensions has: optimizers with factored moments keep other states for a matrix than for a vector. A parameter that
    was never updated has no step count."""
    of_kind: dict[tuple[int, int], set[str]] = {}
    kinds = [(index, len(shapes[name]), name) for index, its in enumerate(names) for name in its]
    for (index, num_dims, _), state in zip(kinds, states, strict=True):
        of_kind.setdefault((index, num_dims), set()).update(state)
    for (index, num_dims, name), state in zip(kinds, states, strict=True):
        if state and (missing := sorted(of_kind[index, num_dims] - state.keys() - {"step"})):
            raise CheckpointError(
                f"{zero / name / f'{missing[0]}.pt'} is missing, and other parameters of the group have it; convert "
                "the checkpoint again"
            )


def _value(content: Any, shape: torch.Size, path: Path) -> Any:
    """Return the tensor in a file. Stage 3 writes it flat; a tensor divided by vocabulary has no padding rows there.

    Raises:
        CheckpointError: the tensor has as many elements as the parameter, in another shape.
    """
    value = content["param"] if isinstance(content, dict) else content
    if isinstance(content, dict) and content.get(VOCAB_TENSOR) and shape[1:] == value.shape[1:]:
        padding = shape[0] - value.shape[0]
        return torch.cat([value, value.new_zeros(padding, *shape[1:])]) if padding > 0 else value
    if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != shape.numel():
        return value
    if value.dim() > 1 and value.shape != shape:
        raise CheckpointError(
            f"{path}: found shape {tuple(value.shape)}, and the parameter has {tuple(shape)}; convert the checkpoint "
            "again"
        )
    return value.view(shape)
