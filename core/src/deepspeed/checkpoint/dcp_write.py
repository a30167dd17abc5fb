"""A checkpoint as `torch.distributed.checkpoint` files, in the form that FSDP2 and torchtitan load.

The state dict is that of `torch.distributed.checkpoint.state_dict`, full and unsharded; a load there shards it. Tensors
are read when they are written; memory holds those of two files of 256 MiB, or two tensors.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from deepspeed.checkpoint.saved_run import SavedRun

_FILE_BYTES = 256 * 2**20  # of tensors, unless one has more


def write_dcp(run: SavedRun, output: Path, form: str = "pytorch") -> None:
    """Write `run` into the folder `output`.

    Args:
        form: "pytorch": `{"model": ..., "optim": ...}` with the dicts of `get_model_state_dict` and
            `get_optimizer_state_dict`; "torchtitan": weights at the top level, and "optimizer" flattened.
    """
    planner = _Planner()
    weights = {
        name: planner.later(weight.shape, weight.dtype, weight.contiguous) for name, weight in run.weights.items()
    }
    states = _states(run, planner)
    groups = [_with_defaults(group) for group in run.param_groups()]
    if form == "torchtitan":
        state: dict[str, Any] = {**weights, **({"optimizer": _flattened(states, groups)} if groups else {})}
    else:
        state = {"model": weights, **({"optim": {"state": states, "param_groups": groups}} if groups else {})}
    state.update({key: value for key, value in run.client_state.items() if key not in state})
    _write(state, planner, FileSystemWriter(output))


def _states(run: SavedRun, planner: "_Planner") -> dict[str, dict[str, Tensor]]:
    """The optimizer's state of each parameter, by its name."""
    if run.states is None:
        return {}
    states: dict[str, dict[str, Tensor]] = {}
    for name in (name for its in run.states.names for name in its):
        shape = run.states.shapes[name]
        states[name] = {
            key: planner.later(shape, torch.float32, partial(run.optimizer_state, name, key)) for key in run.state_names
        }
        states[name]["step"] = torch.tensor(run.step(name))
    return states


def _with_defaults(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with every option that torch's AdamW has: a load wants them all."""
    if not {"betas", "eps"} <= set(group):
        return dict(group)
    return {**torch.optim.AdamW([torch.empty(0)]).defaults, **group}


def _flattened(states: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """As `get_optimizer_state_dict` with `flatten_optimizer_state_dict` has it."""
    flat = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    for group in groups:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


class _Planner(DefaultSavePlanner):
    """Plans with tensors without memory, and makes each when its turn to be written comes."""

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[int, Callable[[], Tensor]] = {}

    def later(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """What to put into the state dict for a tensor that `make` gives."""
        placeholder = torch.empty(shape, dtype=dtype, device="meta")
        self._makers[id(placeholder)] = make
        return placeholder

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        make = self._makers.get(id(found))
        return found if make is None else make()


def _write(state: Mapping[str, Any], planner: DefaultSavePlanner, writer: FileSystemWriter) -> None:
    """What `torch.distributed.checkpoint.save` does, in one process with a plan, and so a file, for each few tensors.

    The writer keeps the tensors of a plan until the plan is written.
    """
    planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    parts = [dataclasses.replace(plan, items=items) for items in _by_file(plan.items)]
    plans, metadata = planner.create_global_plan(parts)
    results = []
    for part in writer.prepare_global_plan(plans):
        written = writer.write_data(planner.finish_plan(part), planner)
        written.wait()
        results.append(written.value())
    writer.finish(metadata, results)


def _by_file(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items of each file: as many as have `_FILE_BYTES`, but at least one."""
    files: list[list[WriteItem]] = [[]]
    room = _FILE_BYTES
    for item in items:
        size = item.tensor_storage_size() or 0
        if size > room and files[-1]:
            files.append([])
            room = _FILE_BYTES
        room -= size
        files[-1].append(item)
    return files
