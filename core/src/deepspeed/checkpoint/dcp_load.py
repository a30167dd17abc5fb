"""A checkpoint of `torch.distributed.checkpoint`, as FSDP2 and torchtitan save it, in the form of one of ours.

Read are the state dicts that `torch.distributed.checkpoint.state_dict` gives, wherever they are in the saved dict:

    <model>.<fqn>                              weights and buffers, by fully qualified name
    <optim>.state.<fqn>.exp_avg                states of the optimizer, by the name of the parameter
    <optim>.param_groups.<index>.lr, .params   its groups; or, flattened, <optim>.param_groups.<fqn>.lr

All else is client state, where it is plain data and, as every rank gets it, not large.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.dcp_file import DcpFolder, DcpTensor, NotPlainData
from deepspeed.checkpoint.load import LoadedCheckpoint, SavedParts
from deepspeed.errors import CheckpointError, first_line
from deepspeed.log import logger

_GROUPS, _STATES = "param_groups.", "state."
#: how a step is computed and not what it is: those of the run that loads stay
_OF_THE_RUN = frozenset({"foreach", "fused", "capturable", "differentiable", "params"})

#: what the tensors of client state may have together: many more are another model, which each rank would hold whole
_CLIENT_BYTES = 64 * 2**20

_OF_ANOTHER_FORM = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


def load_dcp(folder: Path, tag: str, *, needs_states: bool) -> LoadedCheckpoint:
    """Return what the DCP checkpoint in `folder` holds; weights and states stay in its files.

    Raises:
        CheckpointError: a file is missing or damaged, or, with `needs_states`, there is no optimizer's state.
    """
    source = DcpFolder(folder)
    prefix = _optimizer_prefix(source)
    if prefix is None and needs_states:
        raise CheckpointError(
            f"{folder} holds no optimizer state (no entries *.state.* and *.param_groups.*); save the dict of "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict too, or load with "
            "load_optimizer_states=False"
        )
    states = _states(source, prefix) if prefix is not None else {}
    weights_prefix = _weights_prefix(source, prefix, states)
    weights = {
        name.removeprefix(weights_prefix): tensor
        for name, tensor in source.tensors.items()
        if _place(source, name) == weights_prefix and not _is_of_optimizer(name, prefix)
    }
    try:
        optimizer = _optimizer_state(source, prefix, states) if prefix is not None else None
        steps = [int(state["step"].whole().item()) for state in states.values() if "step" in state]
        client = _client_state(source, prefix, {f"{weights_prefix}{name}" for name in weights})
    except _OF_ANOTHER_FORM as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder}: the optimizer's groups and steps, or other values, are not of the form in which "
            f"torch.distributed.checkpoint.state_dict gives them ({first_line(error)}); save them in that form"
        ) from error
    model_state = {
        "module": {},
        "optimizer": optimizer,
        "lr_scheduler": None,
        "global_steps": max(steps, default=0),
        "global_samples": 0,
        "skipped_steps": 0,
    }
    return LoadedCheckpoint(str(folder), tag, model_state, None, client, SavedParts([model_state], []), weights)


def _place(source: DcpFolder, name: str) -> str:
    """The keys of the dicts that an entry was in, each with a dot after it."""
    return "".join(f"{key}." for key in source.paths[name][:-1])


def _is_of_optimizer(name: str, prefix: str | None) -> bool:
    return prefix is not None and name.startswith((prefix + _STATES, prefix + _GROUPS))


def _optimizer_prefix(source: DcpFolder) -> str | None:
    """Return what precedes `state.` and `param_groups.` in names of the optimizer's entries; None if there are none."""
    keys = [name for name in source.paths if name.startswith(_GROUPS) or f".{_GROUPS}" in name]
    found = sorted({name[: name.index(_GROUPS)] for name in keys})
    if len(found) > 1:
        raise CheckpointError(
            f"{source.folder} holds the states of {len(found)} optimizers ({', '.join(found)}), and an engine has one; "
            "save one of them, or load with load_optimizer_states=False"
        )
    return found[0] if found else None


def _states(source: DcpFolder, prefix: str) -> dict[str, dict[str, DcpTensor]]:
    """The states of each parameter, by its name."""
    states: dict[str, dict[str, DcpTensor]] = {}
    for key, tensor in source.tensors.items():
        if key.startswith(prefix + _STATES):
            name, _, state = key.removeprefix(prefix + _STATES).rpartition(".")
            states.setdefault(name, {})[state] = tensor
    return states


def _weights_prefix(source: DcpFolder, prefix: str | None, states: Iterable[str]) -> str:
    """Return what precedes the names of the weights: the path of the largest dict that has all trained parameters."""
    found: dict[str, set[str]] = {}
    for name in source.tensors:
        if not _is_of_optimizer(name, prefix):
            place = _place(source, name)
            found.setdefault(place, set()).add(name.removeprefix(place))
    fitting = [place for place, names in found.items() if names.issuperset(states)]
    if not fitting:
        missing = sorted(set(states) - set().union(*found.values()))
        raise CheckpointError(
            f"{source.folder} holds no weights of the parameters that its optimizer has "
            f"({', '.join(missing[:4]) or 'none'}); save the dict of "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict too"
        )
    return max(fitting, key=lambda place: len(found[place]))


def _optimizer_state(source: DcpFolder, prefix: str, states: Mapping[str, Mapping[str, DcpTensor]]) -> dict[str, Any]:
    """Return the optimizer's state in the form of torch's state dict, with the parameters' names as `param_names`."""
    by_group: dict[str, dict[str, Any]] = {}
    for key in source.paths:
        if key.startswith(prefix + _GROUPS):
            group, _, option = key.removeprefix(prefix + _GROUPS).rpartition(".")
            by_group.setdefault(group, {})[option] = _option(source, key)
    if all("params" in group for group in by_group.values()):
        groups = [by_group[index] for index in sorted(by_group, key=int)]
        names = [list(group["params"]) for group in groups]
    else:
        groups, names = _merged(by_group)
    numbers = {name: number for number, name in enumerate(name for its in names for name in its)}
    return {
        "state": {
            numbers[name]: {key: tensor if tensor.dim() else tensor.whole() for key, tensor in state.items()}
            for name, state in states.items()
            if name in numbers
        },
        "param_groups": [
            {
                "params": [numbers[name] for name in its],
                **{option: value for option, value in group.items() if option not in _OF_THE_RUN},
            }
            for group, its in zip(groups, names, strict=True)
        ],
        "param_names": names,
    }


def _option(source: DcpFolder, key: str) -> Any:
    """An option of a group; of some runs it is a tensor, as `lr` of a capturable optimizer."""
    return source.tensors[key].whole().item() if key in source.tensors else source.value(key)


def _merged(by_name: Mapping[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Groups of a flattened state dict, which has the options of each parameter: those of equal options are one."""
    groups: list[dict[str, Any]] = []
    names: list[list[str]] = []
    for name, options in by_name.items():
        if options not in groups:
            groups.append(options)
            names.append([])
        names[groups.index(options)].append(name)
    return groups, names


def _client_state(source: DcpFolder, prefix: str | None, weights: set[str]) -> dict[str, Any]:
    """The other values, nested as they were saved."""
    client: dict[Any, Any] = {}
    others = {
        key: path for key, path in source.paths.items() if key not in weights and not _is_of_optimizer(key, prefix)
    }
    large = _large(source, [key for key in others if key in source.tensors])
    odd: list[str] = []
    for key, path in others.items():
        if key in large:
            continue
        try:
            value = source.tensors[key].whole() if key in source.tensors else source.value(key)
        except NotPlainData:
            odd.append(key)
            continue
        place = client
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = value
    size = f"{sum(map(_num_bytes, (source.tensors[key] for key in large))) / 2**20:.1f} MiB of tensors in"
    places = sorted({_place(source, key) or key for key in large})
    for left, why in ((odd, "they are not plain data:"), (places, f"every rank would hold {size}")):
        if left:
            logger.warning(
                "%s: not loaded, because %s %s. Read them with torch.distributed.checkpoint.",
                source.folder,
                why,
                ", ".join(left),
            )
    return client


def _large(source: DcpFolder, names: Iterable[str]) -> set[str]:
    """The tensors in those dicts that, from the smallest on, no longer fit into `_CLIENT_BYTES`."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        by_place.setdefault(_place(source, name), []).append(name)
    sizes = {place: sum(_num_bytes(source.tensors[name]) for name in its) for place, its in by_place.items()}
    places = sorted(sizes, key=lambda place: sizes[place])
    totals = accumulate(sizes[place] for place in places)
    return {
        name for place, total in zip(places, totals, strict=True) if total > _CLIENT_BYTES for name in by_place[place]
    }


def _num_bytes(tensor: DcpTensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
