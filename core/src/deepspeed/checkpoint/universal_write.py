"""A checkpoint in DeepSpeed's universal format, which it loads at any number of ranks: a file per parameter and state.

<folder>/*_model_states.pt                     as in the checkpoint, without states of the optimizer
<folder>/zero/<name>/fp32.pt, exp_avg.pt, ...  each value of a parameter: `{"param": tensor, "cat_dim": 0}`, in stage 3
                                               the tensor itself, in one dimension
<folder>/zero/<name>/step.pt                   how often it was updated; absent if it never was
<folder>/zero/optimizer_state.pt               the groups of the optimizer, and the loss scale

Called by `convert.py` and `ds_to_universal.py`. `universal.py` reads it.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from deepspeed._version import __version__
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.constants import VOCAB_TENSOR
from deepspeed.checkpoint.deepspeed_files import constant_scaler
from deepspeed.checkpoint.saved_run import SavedRun
from deepspeed.checkpoint.universal import vocabulary_rows
from deepspeed.errors import CheckpointError

#: of a shard; the same on all ranks
_COMMON = frozenset({"clip_grad", "overflow", "dynamic_loss_scale", "partition_count", "group_paddings"})


def write_universal(run: SavedRun, output: Path, *, num_workers: int = 2) -> None:
    """Write `run` into the folder `output`, which is not there or empty; a failure leaves nothing there.

    Args:
        num_workers: how many parameters are written at a time; memory holds one value of each.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, or `output` holds something.
        OSError: the disk refuses.
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
    staging = layout.staging_folder(output)
    shutil.rmtree(staging, ignore_errors=True)
    zero = staging / layout.UNIVERSAL_FOLDER
    zero.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            for _ in pool.map(lambda name: _write_parameter(run, name, zero / name), names):
                pass
        torch.save(_optimizer_state(run), zero / "optimizer_state.pt")
        with TemporaryDirectory(dir=staging) as scratch:
            for file, content in run.model_contents(Path(scratch)):
                torch.save(content, staging / file)
        if output.is_dir():
            output.rmdir()
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_latest_universal(folder: Path) -> None:
    """Put `latest_universal`, by which DeepSpeed finds the tag, beside the tag's folder."""
    folder.with_name("latest_universal").write_text(folder.name, encoding="utf-8")


def _write_parameter(run: SavedRun, name: str, folder: Path) -> None:
    states = run.states
    assert states is not None
    folder.mkdir()
    shape = states.shapes[name]
    rows = vocabulary_rows(run.client_state, name)
    _save_value(run, states.master(name, 0, shape.numel()).float(), shape, folder / "fp32.pt", rows)
    for key in run.state_names:
        _save_value(run, run.optimizer_state(name, key), shape, folder / f"{key}.pt", rows)
    for key, value in states.others(name).items():
        torch.save(value.clone(), folder / f"{key}.pt")
    for key, value in states.scalars(name).items():
        torch.save(value.clone() if isinstance(value, Tensor) else value, folder / f"{key}.pt")


def _save_value(run: SavedRun, value: Tensor, shape: torch.Size, path: Path, rows: int | None) -> None:
    if run.zero_stage == 3:
        torch.save(value.reshape(-1), path)
    elif rows is None:
        torch.save({"param": value.reshape(shape), "cat_dim": 0}, path)
    else:
        torch.save({"param": value.reshape(shape)[:rows].clone(), "cat_dim": 0, VOCAB_TENSOR: True}, path)


def _optimizer_state(run: SavedRun) -> dict[str, Any]:
    """What a shard has besides tensors. `params` of a group count the dicts of `param_shapes`."""
    assert run.states is not None
    buffers = run.model_state["param_shapes"]
    number_of = {name: number for number, buffer in enumerate(buffers) for name in buffer}
    groups = [
        {**group, "params": sorted({number_of[name] for name in group["params"]})} for group in run.param_groups()
    ]
    saved = run.common_state
    common = {key: value for key, value in saved.items() if key in _COMMON}
    common |= {"zero_stage": run.zero_stage, "param_groups": groups}
    common["ds_version"] = run.model_state.get("ds_version", __version__)  # DeepSpeed wants one
    if "loss_scaler" in saved:
        common["loss_scale_state"] = saved["loss_scaler"]
    if run.zero_stage == 3:
        steps = {number: run.states.scalars(next(iter(buffer))) for number, buffer in enumerate(buffers) if buffer}
        common["optimizer_state_dict"] = {"state": steps, "param_groups": groups}
        common["loss_scaler"] = constant_scaler()
    return common
