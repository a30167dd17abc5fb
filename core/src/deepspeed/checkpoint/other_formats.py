"""Write a checkpoint for other programs.

`write_dcp` writes `torch.distributed.checkpoint` files, in the form that FSDP2 and torchtitan load; `write_universal`
writes DeepSpeed's universal format, which DeepSpeed loads at any number of ranks.

The state dict of `write_dcp` is that of `torch.distributed.checkpoint.state_dict`, full and unsharded; a load shards
it. A tensor is read when it is written; memory holds the tensors of two files of 256 MiB, or two tensors.

The universal format has a file per parameter and state:

<folder>/*_model_states.pt                     as in the checkpoint, without states of the optimizer
<folder>/zero/<name>/fp32.pt, exp_avg.pt, ...  each value of a parameter: `{"param": tensor, "cat_dim": 0}`, in stage 3
                                               the tensor itself, in one dimension
<folder>/zero/<name>/step.pt                   how often the parameter was updated; absent if it never was
<folder>/zero/optimizer_state.pt               the groups of the optimizer, and the loss scale

Called by `convert.py` and `ds_to_universal.py`. `deepspeed_files.py` reads the universal format.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItem

from deepspeed._version import __version__
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate import new_file
from deepspeed.checkpoint.deepspeed_files import VOCAB_TENSOR, constant_scaler, vocabulary_rows
from deepspeed.checkpoint.saved_run import SavedRun
from deepspeed.errors import CheckpointError

_FILE_BYTES = 256 * 2**20  # of tensors per file, unless one tensor has more


def write_dcp(run: SavedRun, output: Path, form: str = "pytorch") -> None:
    """Write `run` into the new or empty folder `output`; a failure leaves nothing there.

    Args:
        form: "pytorch": `{"model": ..., "optim": ...}` with the dicts of `get_model_state_dict` and
            `get_optimizer_state_dict`; "torchtitan": weights at the top level, and "optimizer" flattened.

    Raises:
        CheckpointError: the disk refuses a file; names it, and the room that there is.
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
    with _whole_folder(output) as staging:
        writer = FileSystemWriter(staging)
        writer.fs = _Files()
        _write(state, planner, writer)


def _states(run: SavedRun, planner: "_Planner") -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's state of each parameter, by its name."""
    if run.states is None:
        return {}
    states: dict[str, dict[str, Tensor]] = {}
    for name in (name for its in run.states.names for name in its):
        shape = run.states.shapes[name]
        states[name] = {
            key: planner.later(shape, torch.float32, partial(run.optimizer_state, name, key))
            for key in run.state_names(name)
        }
        states[name]["step"] = torch.tensor(run.step(name))
    return states


def _with_defaults(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with every option that torch's AdamW has: a load needs them all."""
    if not {"betas", "eps"} <= set(group):
        return dict(group)
    return {**torch.optim.AdamW([torch.empty(0)]).defaults, **group}


def _flattened(states: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Flatten states and groups as `get_optimizer_state_dict` does with `flatten_optimizer_state_dict`."""
    flat = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    for group in groups:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


@contextmanager
def _whole_folder(output: Path) -> Iterator[Path]:
    """Yield a folder that becomes `output`, new or empty, when the body is over; a failure leaves nothing."""
    staging = layout.staging_folder(output)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        if output.is_dir():
            output.rmdir()
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Files(FileSystem):
    """The file system of torch's writer, whose errors name the file that the disk refuses."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file that is written, and complete once the body is over."""
        assert mode == "wb", mode
        with new_file(Path(path)) as file:
            yield file


class _Planner(DefaultSavePlanner):
    """`_Planner` plans with tensors without memory, and creates each tensor when it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[int, Callable[[], Tensor]] = {}

    def later(self, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return a placeholder to put into the state dict; the tensor that `make` gives is written in its place."""
        placeholder = torch.empty(shape, dtype=dtype, device="meta")
        self._makers[id(placeholder)] = make
        return placeholder

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        make = self._makers.get(id(found))
        return found if make is None else make()


def _write(state: Mapping[str, Any], planner: DefaultSavePlanner, writer: FileSystemWriter) -> None:
    """Save like `torch.distributed.checkpoint.save`, in one process, with a plan, and so a file, per few tensors.

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
    """Divide the items among files: each file gets up to `_FILE_BYTES`, but at least one item."""
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


#: keys of a shard whose values are the same on all ranks
_COMMON = frozenset({"clip_grad", "overflow", "dynamic_loss_scale", "partition_count", "group_paddings"})


def write_universal(run: SavedRun, output: Path, *, num_workers: int = 2) -> None:
    """Write `run` into the new or empty folder `output`; a failure leaves nothing there.

    Args:
        num_workers: number of parameters that are written at a time; memory holds one value of each.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, `output` holds something, or the disk refuses a file.
        OSError: the disk refuses a folder.
    """
    if run.states is None:
        raise CheckpointError(
            f"{run.folder} holds no optimizer state, of which the universal format consists; save it with an optimizer"
        )
    if run.zero_stage == 3 and run.common_state.get("dynamic_loss_scale"):
        raise CheckpointError(
            f"{run.folder} was saved in fp16 at stage 3 with a dynamic loss scale, which DeepSpeed takes from no other "
            "program; save it in bf16, or at stage 1 or 2"
        )
    names = sorted(run.states.trained)
    for name in names:
        if os.sep in name or name in (".", ".."):
            raise CheckpointError(f"{run.folder} has the parameter {name!r}, which cannot be the name of a folder")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is there and not empty; give a folder that is new or empty")
    with _whole_folder(output) as staging:
        zero = staging / layout.UNIVERSAL_FOLDER
        zero.mkdir()
        with ThreadPoolExecutor(num_workers) as pool:
            for _ in pool.map(lambda name: _write_parameter(run, name, zero / name), names):
                pass
        _save(_optimizer_state(run), zero / "optimizer_state.pt")
        with TemporaryDirectory(dir=staging) as scratch:
            for file, content in run.model_contents(Path(scratch)):
                _save(content, staging / file)


def write_latest_universal(folder: Path) -> None:
    """Write `latest_universal`, by which DeepSpeed finds the tag, beside the tag's folder."""
    with new_file(folder.with_name("latest_universal")) as file:
        file.write(folder.name.encode())


def _write_parameter(run: SavedRun, name: str, folder: Path) -> None:
    states = run.states
    assert states is not None
    folder.mkdir()
    shape = states.shapes[name]
    rows = vocabulary_rows(run.client_state, name)
    _save_value(run, states.master(name, 0, shape.numel()).float(), shape, folder / "fp32.pt", rows)
    for key in run.state_names(name):
        _save_value(run, run.optimizer_state(name, key), shape, folder / f"{key}.pt", rows)
    for key, value in states.others(name).items():
        _save(value.clone(), folder / f"{key}.pt")
    for key, value in states.scalars(name).items():
        _save(value.clone() if isinstance(value, Tensor) else value, folder / f"{key}.pt")


def _save_value(run: SavedRun, value: Tensor, shape: torch.Size, path: Path, rows: int | None) -> None:
    if run.zero_stage == 3:
        _save(value.reshape(-1), path)
    elif rows is None:
        _save({"param": value.reshape(shape), "cat_dim": 0}, path)
    else:
        _save({"param": value.reshape(shape)[:rows].clone(), "cat_dim": 0, VOCAB_TENSOR: True}, path)


def _save(content: Any, path: Path) -> None:
    with new_file(path) as file:
        torch.save(content, file)


def _optimizer_state(run: SavedRun) -> dict[str, Any]:
    """Return the values of a shard that are no tensors. `params` of a group are positions in `param_shapes`."""
    assert run.states is not None
    buffers = run.model_state["param_shapes"]
    number_of = {name: number for number, buffer in enumerate(buffers) for name in buffer}
    groups = [
        {**group, "params": sorted({number_of[name] for name in group["params"]})} for group in run.param_groups()
    ]
    saved = run.common_state
    common = {key: value for key, value in saved.items() if key in _COMMON}
    common |= {"zero_stage": run.zero_stage, "param_groups": groups}
    common["ds_version"] = run.model_state.get("ds_version", __version__)  # DeepSpeed needs one
    if "loss_scaler" in saved:
        common["loss_scale_state"] = saved["loss_scaler"]
    if run.zero_stage == 3:
        steps = {number: run.states.scalars(next(iter(buffer))) for number, buffer in enumerate(buffers) if buffer}
        common["optimizer_state_dict"] = {"state": steps, "param_groups": groups}
        common["loss_scaler"] = constant_scaler()
    return common
