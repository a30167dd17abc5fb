"""The files of a checkpoint as libraries and users' scripts know them: names, keys, what plain torch.load gives."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

# Lightning refuses to take these names for its own state; they are the checkpoint's top-level keys.
KEYS_THAT_LIGHTNING_KNOWS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "lr_scheduler",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
}


def save(directory: Path, tag: str = "global_step7", prefix: str = "") -> None:
    model_state = dict.fromkeys(KEYS_THAT_LIGHTNING_KNOWS, 0)
    model_state.update(
        module=OrderedDict(w=torch.ones(2, 3)),
        param_shapes=[OrderedDict(w=torch.Size([2, 3]))],
        dp_world_size=1,
        mp_world_size=1,
    )
    shard = {"zero_stage": 2, "partition_count": 1, "single_partition_of_fp32_groups": [torch.ones(6)]}
    Checkpointer(prefix=prefix).save(
        directory,
        tag,
        model_state=model_state,
        shard_state={"optimizer_state_dict": shard, "ds_config": {}, "ds_version": "0.19.6"},
        client_state={"epoch": 1},
    )


def test_the_tree_is_deepspeeds_with_an_index(tmp_path):
    save(tmp_path)
    save(tmp_path, "global_step8", prefix="bf16_")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "global_step7/index.json",
        "global_step7/mp_rank_00_model_states.pt",
        "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step8/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step8/index.json",
        "global_step8/mp_rank_00_model_states.pt",
        "latest",
        "zero_to_fp32.py",
    ]
    assert (tmp_path / "latest").read_text() == "global_step8"


def test_transformers_finds_the_folder_by_its_pattern(tmp_path):
    save(tmp_path)
    (tmp_path / ".global_step9.staging").mkdir()
    assert [path.name for path in tmp_path.glob("global_step*")] == ["global_step7"]


def test_top_level_keys_and_client_state_lie_side_by_side(tmp_path):
    save(tmp_path)
    state = torch.load(tmp_path / "global_step7" / "mp_rank_00_model_states.pt", weights_only=True)
    assert set(state) == KEYS_THAT_LIGHTNING_KNOWS | {"epoch"}


def test_lightnings_way_to_fp32_weights(tmp_path):
    from deepspeed.checkpoint.consolidate import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    save(tmp_path, "checkpoint")
    folder = str(tmp_path / "checkpoint")
    optim_state = torch.load(get_optim_files(folder)[0], weights_only=True)
    stage = optim_state["optimizer_state_dict"]["zero_stage"]
    client_state = torch.load(get_model_state_file(folder, stage), weights_only=True)
    assert client_state["epoch"] == 1
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))["w"], torch.ones(2, 3))


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_optimizer_files_are_in_the_order_of_ranks(tmp_path, prefix):
    from deepspeed.utils.zero_to_fp32 import get_optim_files

    expected = [f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt" for rank in range(12) for mp in (0, 1)]
    for name in sorted(expected):
        (tmp_path / name).touch()
    assert [Path(path).name for path in get_optim_files(str(tmp_path))] == expected


def test_accelerate_clones_a_state_dict_before_it_saves(tmp_path):
    flat = torch.arange(10_000.0)
    torch.save(clone_tensors_for_torch_save({"w": flat[:6].view(2, 3)}), tmp_path / "w.bin")
    assert (tmp_path / "w.bin").stat().st_size < 5_000
