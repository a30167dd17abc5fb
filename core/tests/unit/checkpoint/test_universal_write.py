"""The universal format as `ds_to_universal` writes it: its layout, its memory, and what is refused."""

import argparse

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, other_formats
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.ds_to_universal import ds_to_universal, main
from deepspeed.checkpoint.model_ranks import DIVISION
from deepspeed.errors import CheckpointError


@pytest.fixture
def saved(make_ranks, make_training, tmp_path):
    training = make_training(world_size=3)
    make_ranks(3).save(training, tmp_path / "ckpt", "global_step1", client_state={"epoch": 4})
    return training


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run(tmp_path, *more):
    folders = ("--input_folder", tmp_path / "ckpt/global_step1", "--output_folder", tmp_path / "ckpt/universal")
    return main([str(word) for word in (*folders, *more)])


def test_the_layout_is_the_documented_one(saved, tmp_path):
    assert run(tmp_path, "--num_extract_workers", 3, "--keep_temp_folder", "--no_strict", "--inject_missing_state") == 0
    folder = tmp_path / "ckpt" / "universal"
    trained = {name: weight for group in saved.groups for name, weight in group.items()}
    expected = [f"zero/{name}/{value}.pt" for name in trained for value in ("exp_avg", "fp32", "step")]
    assert names_in(folder) == sorted([*expected, "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"])
    assert (tmp_path / "ckpt" / "latest_universal").read_text() == "universal"
    assert (tmp_path / "ckpt" / "latest").read_text().strip() == "global_step1"
    for name, weight in trained.items():
        found = {value: torch.load(folder / "zero" / name / f"{value}.pt") for value in ("fp32", "exp_avg", "step")}
        assert torch.equal(found["fp32"]["param"], weight)
        assert torch.equal(found["exp_avg"]["param"], weight / 2)
        assert found["step"] == 3
    groups = torch.load(folder / "zero/optimizer_state.pt")["param_groups"]
    assert groups == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert torch.load(folder / "mp_rank_00_model_states.pt")["epoch"] == 4


def test_arguments_of_a_parser_are_taken_as_deepspeed_takes_them(saved, tmp_path):
    folders = {"input_folder": tmp_path / "ckpt/global_step1", "output_folder": tmp_path / "out/tag"}
    (tmp_path / "out").mkdir()
    rest = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    assert main(argparse.Namespace(**folders, **rest)) == 0
    assert (tmp_path / "out" / "latest_universal").read_text() == "tag"


def test_convert_writes_a_directory_that_loads(saved, tmp_path):
    convert(tmp_path / "ckpt", tmp_path / "out", "universal")
    found = Checkpointer().load(tmp_path / "out", needs_states=True)
    assert (found.tag, found.client_state) == ("global_step1_universal", {"epoch": 4})
    assert torch.equal(found.model_state["module"]["embed.weight"], saved.weights["embed.weight"])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_memory_holds_one_value_per_worker(large, tmp_path, num_workers):
    ds_to_universal(large.directory / "step", tmp_path / "out", num_workers=num_workers)
    assert len(large.added) == 12
    # joined of pieces, and a copy of it that is written; the other value of a worker is freed by then
    assert max(large.added) < (2 * num_workers + 0.5) * large.weight_bytes
    assert torch.load(tmp_path / "out/zero/w7/exp_avg.pt")["param"].unique().tolist() == [1.0]


@pytest.mark.parametrize("large", [2], indirect=True)
def test_memory_holds_one_value_of_a_divided_model(large, tmp_path):
    ds_to_universal(large.directory / "step", tmp_path / "out", num_workers=1)
    assert len(large.added) == 24
    # the value, the parts of it that are put together, and the other one of the worker
    assert max(large.added) < 3.5 * large.weight_bytes
    assert torch.load(tmp_path / "out/zero/w7/exp_avg.pt")["param"].unique().tolist() == [1.0]
    assert torch.load(tmp_path / "out/mp_rank_00_model_states.pt")["module"]["w7"].unique().tolist() == [1.0]


def test_what_patterns_say_of_divided_parameters_is_joined(tmp_path):
    folder = tmp_path / "ckpt/t"
    folder.mkdir(parents=True)
    info = {
        "original_vocab_size": 7,
        "vocabulary_parameter_patterns": ["embed"],
        "parameter_to_average_patterns": ["norm"],
    }
    shapes = {"embed": (4, 2), "norm": (3,)}
    for rank in range(2):
        module = {"embed": torch.full((4, 2), rank + 1.0), "norm": torch.full((3,), rank * 2.0)}
        model = {"module": module, "param_shapes": [shapes], "mp_world_size": 2, "universal_checkpoint_info": info}
        torch.save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
        flat = torch.cat([value.flatten() for value in module.values()])
        base = {"state": {0: {"exp_avg": flat / 4, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
        state = {"zero_stage": 2, "single_partition_of_fp32_groups": [flat], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    ds_to_universal(folder, tmp_path / "ckpt/universal")
    zero = tmp_path / "ckpt/universal/zero"
    embed, norm = (torch.load(zero / name / "fp32.pt", weights_only=True) for name in shapes)
    whole = torch.tensor([1.0] * 4 + [2.0] * 4)[:, None].expand(8, 2)
    assert torch.equal(embed["param"], whole[:7])
    assert embed["vocab_tensor"] is True
    assert torch.equal(norm["param"], torch.ones(3))
    assert torch.load(zero / "norm/exp_avg.pt", weights_only=True)["param"].tolist() == [0.25] * 3
    found = Checkpointer().load(tmp_path / "ckpt", "universal", needs_states=True)
    assert torch.equal(found.model_state["module"]["embed"], torch.cat([whole[:7], torch.zeros(1, 2)]))


def test_a_part_of_another_shape_than_the_division_says_is_named(tmp_path):
    folder = tmp_path / "ckpt/t"
    folder.mkdir(parents=True)
    info = {"tp_replicated_parameter_patterns": []}
    for rank, shape in enumerate(((4, 2), (3, 2))):
        parts = {"w": {"name": "w", "dim": 0, "shape": [8, 2], "ranges": [[4 * rank, 4 * rank + 4]]}}
        division = {"axes": {"pp": 1, "tp": 2}, "parts": parts}
        model = {"module": {"w": torch.ones(shape)}, "param_shapes": [{"w": shape}], "mp_world_size": 2}
        model |= {"universal_checkpoint_info": info, DIVISION: division}
        torch.save(model, folder / f"mp_rank_{rank:02d}_model_states.pt")
        base = {"state": {}, "param_groups": [{"lr": 0.1}]}
        flat = torch.ones(shape).flatten()
        state = {"zero_stage": 2, "single_partition_of_fp32_groups": [flat], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"w: found shape \(3, 2\) .* whose part of it has shape \(4, 2\)"):
        ds_to_universal(folder, tmp_path / "ckpt/universal")


def test_a_failure_leaves_nothing(saved, tmp_path, capsys, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(other_formats, "_optimizer_state", refuse)
    assert run(tmp_path) == 1
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["global_step1", "latest", "zero_to_fp32.py"]


def test_what_cannot_be_done_is_named(saved, tmp_path, capsys):
    (tmp_path / "ckpt" / "universal").mkdir()
    (tmp_path / "ckpt" / "universal" / "mine").write_text("mine")
    assert run(tmp_path) == 1
    assert "is there and not empty" in capsys.readouterr().err
    assert main(["--input_folder", str(tmp_path / "no"), "--output_folder", str(tmp_path / "out")]) == 1
    assert f"found no folder {tmp_path / 'no'}" in capsys.readouterr().err
    root, out = tmp_path / "ckpt", str(tmp_path / "out")
    assert main(["--input_folder", str(root), "--output_folder", out]) == 1
    told = capsys.readouterr().err
    assert f"found {root}, the folder of global_step1, and 'latest' there names 'global_step1'" in told
    assert f"give the folder of one tag, {root / 'global_step1'}" in told
    (root / "latest").unlink()
    assert main(["--input_folder", str(root), "--output_folder", out]) == 1
    assert f"the folder of global_step1; give the folder of one tag, {root / 'global_step1'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, "--num_merge_workers", 0)
    assert "expected an integer >= 1" in capsys.readouterr().err


def test_a_checkpoint_without_optimizer_is_refused(make_training, tmp_path):
    state = {**make_training(world_size=1, stage=0).model_state(), "optimizer": None}
    Checkpointer().save(tmp_path / "ckpt", "t", model_state=state, shard_state=None)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        ds_to_universal(tmp_path / "ckpt/t", tmp_path / "out")


@pytest.mark.parametrize("name", ["../../outside", ".."])
def test_a_name_that_leads_elsewhere_is_refused(make_training, tmp_path, name):
    training = make_training(world_size=1)
    training.groups[0][name] = training.groups[0].pop("lin.weight")
    states = {"model_state": training.model_state(), "shard_state": training.shard_state(0)}
    Checkpointer().save(tmp_path / "ckpt", "t", **states)
    with pytest.raises(CheckpointError, match="cannot be the name of a folder"):
        ds_to_universal(tmp_path / "ckpt/t", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
