"""DeepSpeed's universal format, as its `ds_to_universal` writes it, in the form of one of our checkpoints.

<tag>/*_model_states.pt                   as in the checkpoint that it was made from
<tag>/zero/<name>/fp32.pt, exp_avg.pt     one file per parameter and state: a tensor, or `{"param": tensor}`
<tag>/zero/<name>/step.pt                 in stages 1 and 2; in stage 3 the count is in the next file
<tag>/zero/optimizer_state.pt             the groups of the optimizer
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.constants import VOCAB_TENSOR
from deepspeed.checkpoint.deepspeed_files import loss_scale_in
from deepspeed.checkpoint.saved_states import PARAM_NAMES, names_by_group
from deepspeed.errors import CheckpointError

_GROUPS_FILE = "optimizer_state.pt"
_Load = Callable[[Path], Any]


def with_universal_states(model_state: Mapping[str, Any], folder: Path, load: _Load) -> dict[str, Any]:
    """`model_state` with the weights and the optimizer's state in `folder`, as torch's state dict with names.

    Args:
        load: gives what a file holds; tensors may be mapped.

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
    """Raise CheckpointError where a parameter that was updated lacks a state that one of its group and number of
    dimensions has: optimizers with factored moments keep others for a matrix than for a vector. A step count is not
    there for a parameter that was never updated."""
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
    """The tensor in a file, which stage 3 writes flat; of one divided by vocabulary without the rows of its padding.

    Raises:
        CheckpointError: it has as many elements as the parameter in another shape.
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
