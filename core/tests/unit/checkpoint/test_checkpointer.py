"""A save and a load of all ranks together: what comes back, and what happens when one rank or one file is wrong."""

import errno
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.checkpoint import MODEL_STATE_KEYS, Checkpointer, TorchStore, layout, save_state_dict_file
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import logger


@pytest.fixture
def ranks(make_ranks):
    return make_ranks(2)


@pytest.fixture
def saved(ranks, make_training, tmp_path):
    training = make_training(seed=3)
    outcomes = ranks.save(training, tmp_path, "global_step3", client_state={"epoch": 2, "best": np.float64(0.25)})
    assert outcomes == [tmp_path / "global_step3"] * 2
    return training


def test_round_trip(saved, ranks, tmp_path):
    for rank, found in enumerate(ranks.load(tmp_path, zero_stages=(1, 2))):
        assert found.tag == "global_step3"
        assert found.path == str(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
        assert found.client_state == {"epoch": 2, "best": 0.25}
        divided = {"model_parallel", "module_files", "module_rest", "optimizer_file", "data_rank"}
        asked = {*(f"ds_{name}" for name in divided), "moq", "local_sgd"}  # only where a run has them
        assert set(found.model_state) == MODEL_STATE_KEYS - asked
        torch.testing.assert_close(found.model_state["module"], saved.model_state()["module"], rtol=0, atol=0)
        shapes = found.model_state["param_shapes"]
        assert shapes == saved.model_state()["param_shapes"]
        assert all(isinstance(shape, torch.Size) for group in shapes for shape in group.values())
        assert list(shapes[0]) == ["embed.weight", "lin.weight"], "the order is the flat order"
        shard, expected = found.shard_state["optimizer_state_dict"], saved.shard_state(rank)["optimizer_state_dict"]
        torch.testing.assert_close(shard, expected, rtol=0, atol=0)


def test_without_latest_nothing_is_loaded_and_a_warning_says_so(ranks, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert ranks.load(tmp_path) == [None, None]
    assert f"{tmp_path / 'latest'}" in caplog.text
    assert "Training starts" not in caplog.text, "that is the caller's to decide: the demo's --resume stops"


def test_latest_moves_only_when_asked(saved, ranks, make_training, tmp_path):
    ranks.save(make_training(seed=4), tmp_path, "global_step4", save_latest=False)
    assert ranks.load(tmp_path)[0].tag == "global_step3"
    assert ranks.load(tmp_path, "global_step4")[0].model_state["global_steps"] == 4


def test_a_tag_can_be_saved_again(saved, ranks, make_training, tmp_path):
    ranks.save(make_training(seed=9), tmp_path, "global_step3")
    assert ranks.load(tmp_path)[1].model_state["global_steps"] == 9


def test_the_module_may_be_loaded_without_shards_and_by_another_number_of_ranks(saved, make_ranks, tmp_path):
    (found,) = make_ranks(1).load(tmp_path, load_shard=False)
    assert found.shard_state is None
    assert found.model_state["global_steps"] == 3


def test_the_prefix_is_in_the_name_and_either_is_read(make_ranks, make_training, tmp_path):
    make_ranks(2, prefix="bf16_").save(make_training(), tmp_path, "t")
    assert (tmp_path / "t" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").is_file()
    assert make_ranks(2).load(tmp_path)[1].shard_state is not None


def test_a_partitioned_model_has_a_file_per_rank(make_ranks, make_training, tmp_path):
    ranks = make_ranks(2, partitioned_model=True)
    ranks.save(make_training(stage=3), tmp_path, "t")
    names = {path.name for path in (tmp_path / "t").iterdir() if "model" in path.name}
    assert names == {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)}
    assert ranks.load(tmp_path)[1].path.endswith("zero_pp_rank_1_mp_rank_00_model_states.pt")


def test_client_state_may_not_take_the_checkpoints_own_keys(ranks, make_training, tmp_path):
    outcomes = ranks.save(make_training(), tmp_path, "t", client_state={"module": 1, "lr_scheduler": 2, "mine": 3})
    assert isinstance(outcomes[0], ConfigError)
    assert "client_state: the keys 'lr_scheduler', 'module'" in str(outcomes[0])
    assert isinstance(outcomes[1], CheckpointError)
    assert not list(tmp_path.iterdir())


def test_client_state_that_would_not_load_is_refused_at_the_save(ranks, make_training, tmp_path):
    outcomes = ranks.save(make_training(), tmp_path, "t", client_state={"where": tmp_path})
    assert isinstance(outcomes[0], ConfigError)
    assert "client_state['where'] is a pathlib" in str(outcomes[0])


@pytest.mark.parametrize(("client_state", "words"), [([1, 2], "found a list"), ("ab", "found a str")])
def test_client_state_is_a_dict(ranks, make_training, tmp_path, client_state, words):
    outcomes = ranks.save(make_training(), tmp_path, "t", client_state=client_state)
    assert isinstance(outcomes[0], ConfigError)
    assert f"client_state: {words}; give a dict" in str(outcomes[0])


@pytest.mark.parametrize("directory", [None, 3])
def test_a_directory_is_text_or_a_path(ranks, make_training, directory):
    outcomes = [*ranks.save(make_training(), directory, "t"), *ranks.load(directory)]
    assert all(f"directory of a checkpoint: found {directory}" in str(each) for each in outcomes)


def test_ranks_that_find_different_saves_of_one_tag_load_none(ranks, make_training, tmp_path):
    for folder, seed in (("one", 1), ("other", 2)):
        ranks.save(make_training(seed=seed), tmp_path / folder, "t")
    outcomes = ranks(lambda checkpointer, rank: checkpointer.load(tmp_path / ("one", "other")[rank]))
    for outcome in outcomes:
        assert "ranks 0 and 1 found different saves there (their index.json differ)" in str(outcome)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    outcomes = ranks(lambda checkpointer, rank: checkpointer.load(tmp_path / ("one", "copy")[rank]))
    assert [found.model_state["global_steps"] for found in outcomes] == [1, 1]


class FailingStore(TorchStore):
    """Fails in one step on the rank that has it."""

    def __init__(self, step):
        self.step = step

    def fail(self, step):
        if step == self.step:
            raise CheckpointError(f"cannot {step}: the disk is full")

    def create(self, folder):
        self.fail("create")
        super().create(folder)

    def save(self, state, folder, name):
        self.fail("save")
        return super().save(state, folder, name)

    def commit(self, folder, sizes):
        self.fail("commit")
        super().commit(folder, sizes)


@pytest.mark.parametrize(("step", "rank"), [("create", 0), ("save", 0), ("save", 1), ("commit", 0)])
def test_when_one_rank_fails_all_raise_and_the_former_checkpoint_stays(
    saved, ranks, make_training, tmp_path, step, rank
):
    training = make_training(seed=8)

    def save(checkpointer, own_rank):
        if own_rank == rank:
            checkpointer.store = FailingStore(step)
        model_state = training.model_state() if checkpointer.writes_model else None
        checkpointer.save(tmp_path, "global_step3", model_state=model_state, shard_state=training.shard_state(own_rank))

    outcomes = ranks(save)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "the disk is full" in str(outcomes[rank])
    reason = f"cannot save {tmp_path / 'global_step3'}: rank {rank}: cannot {step}: the disk is full"
    assert str(outcomes[1 - rank]) == reason, "every rank says what is wrong: any of them may be the last on the screen"
    assert ranks.load(tmp_path)[1].model_state["global_steps"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "zero_to_fp32.py", "global_step3"}
    ranks.save(training, tmp_path, "global_step8")  # and saving goes on
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "zero_to_fp32.py", "global_step3", "global_step8"}


def test_the_reason_of_a_foreign_error_has_its_type(ranks):
    def fail(checkpointer, rank):
        checkpointer.together(lambda: {}["w"] if rank else None, "read it")

    outcomes = ranks(fail)
    assert isinstance(outcomes[1], KeyError), "the rank that failed raises its own error"
    assert str(outcomes[0]) == "cannot read it: rank 1: KeyError: 'w'"


def test_ranks_with_different_tags_commit_nothing(ranks, make_training, tmp_path):
    training = make_training()

    def save(checkpointer, rank):
        model_state = training.model_state() if checkpointer.writes_model else None
        checkpointer.save(tmp_path, f"t{rank}", model_state=model_state, shard_state=training.shard_state(rank))

    assert all(isinstance(outcome, CheckpointError) for outcome in ranks(save))
    assert layout.tags_in(tmp_path) == []


def expect(outcomes, *words):
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError), outcome
    assert any(all(word in str(outcome) for word in words) for outcome in outcomes), outcomes


def test_an_unknown_tag_lists_what_is_there(saved, ranks, tmp_path):
    expect(ranks.load(tmp_path, "global_step7"), "'global_step7'", "It holds: global_step3")


def test_latest_that_names_nothing(saved, ranks, tmp_path):
    shutil.rmtree(tmp_path / "global_step3")
    expect(ranks.load(tmp_path), "global_step3", "No checkpoint was found there")


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_gets_the_files_of_all(saved, make_ranks, tmp_path, world_size):
    for loaded in make_ranks(world_size).load(tmp_path):
        assert loaded.shard_state is None
        assert loaded.parts.model_states == [loaded.model_state]
        for rank, shard in enumerate(loaded.parts.shard_states):
            masters = saved.shard_state(rank)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            assert all(map(torch.equal, shard["single_partition_of_fp32_groups"], masters))
        assert len(loaded.parts.shard_states) == 2


def test_another_number_of_model_parallel_ranks(saved, make_ranks, tmp_path):
    expect(make_ranks(2, mp_world_size=4).load(tmp_path), "saved by 1 model parallel rank, this job has 4")


def test_another_stage_gets_the_files_of_all(saved, ranks, tmp_path):
    for loaded in ranks.load(tmp_path, zero_stages=(3,)):
        assert loaded.shard_state is None
        assert [shard["zero_stage"] for shard in loaded.parts.shard_states] == [2, 2]


def test_a_checkpoint_without_shards(ranks, make_training, tmp_path):
    training = make_training(stage=0)

    def save(checkpointer, rank):
        state = {**training.model_state(), "optimizer": {"state": {}}} if checkpointer.writes_model else None
        checkpointer.save(tmp_path, "t", model_state=state, shard_state=None)

    ranks(save)
    for zero_stages in ((0,), (1, 2)):
        loaded = ranks.load(tmp_path, zero_stages=zero_stages, needs_states=True)[1]
        assert loaded.model_state["optimizer"] == {"state": {}}
        assert loaded.parts is None if 0 in zero_stages else loaded.parts.shard_states == []


def test_a_missing_shard_fails_every_rank(saved, ranks, tmp_path):
    name = layout.shard_file(1, 0)
    (tmp_path / "global_step3" / name).unlink()
    expect(ranks.load(tmp_path), "incomplete", name)


def test_a_checkpoint_whose_shards_are_all_gone(saved, ranks, tmp_path):
    for rank in range(2):
        (tmp_path / "global_step3" / layout.shard_file(rank, 0)).unlink()
    outcomes = ranks.load(tmp_path, needs_states=True)
    expect(outcomes, "holds no optimizer state: it has no shards", "load_optimizer_states=False")
    assert not any("zero_optimization.stage" in str(outcome) for outcome in outcomes), "the stage is not what is wrong"


def test_a_damaged_shard_fails_every_rank(saved, ranks, tmp_path):
    path = tmp_path / "global_step3" / layout.shard_file(1, 0)
    path.write_bytes(path.read_bytes()[:1000])
    expect(ranks.load(tmp_path), str(path), "cut short")


@pytest.mark.usefixtures("unindexed")
def test_damage_is_found_by_the_readers_of_a_checkpoint_without_an_index(ranks, tmp_path):
    assert [found.tag for found in ranks.load(tmp_path)] == ["global_step3"] * 2
    path = tmp_path / "global_step3" / layout.shard_file(1, 0)
    path.write_bytes(path.read_bytes()[:1000])
    expect(ranks.load(tmp_path), str(path), "cut short, damaged or was not written by torch.save")


def test_a_missing_model_file(saved, ranks, tmp_path):
    (tmp_path / "global_step3" / layout.model_file(0)).unlink()
    expect(ranks.load(tmp_path), "mp_rank_00_model_states.pt is missing")


@pytest.fixture
def unindexed(saved, tmp_path):
    """As an earlier version, or DeepSpeed, saved it."""
    (tmp_path / "global_step3" / "index.json").unlink()


@pytest.mark.usefixtures("unindexed")
@pytest.mark.parametrize("content", [{"weights": 1}, [1, 2]])
def test_a_foreign_model_file(ranks, tmp_path, content):
    torch.save(content, tmp_path / "global_step3" / layout.model_file(0))
    expect(ranks.load(tmp_path), "no model file of a checkpoint")


@pytest.mark.usefixtures("unindexed")
def test_a_foreign_shard(ranks, tmp_path):
    torch.save({"x": 1}, tmp_path / "global_step3" / layout.shard_file(0, 0))
    expect(ranks.load(tmp_path), "no optimizer shard")


def test_a_directory_that_only_some_ranks_see(saved, ranks, tmp_path):
    outcomes = ranks(lambda checkpointer, rank: checkpointer.load(tmp_path if rank else tmp_path / "elsewhere"))
    for outcome in outcomes:
        assert "(rank 0: no such file, rank 1: global_step3)" in str(outcome)


@pytest.mark.parametrize("tag", [None, "global_step3"])
def test_the_folder_of_a_tag_in_place_of_its_parent(saved, ranks, tmp_path, lines, tag):
    outcomes = ranks.load(tmp_path / "global_step3", tag)
    said = "\n".join(text for _, text in lines) + "\n".join(map(str, outcomes))
    assert f"pass '{tmp_path}' and tag='global_step3'" in said


def test_the_folder_of_a_tag_by_a_relative_path(saved, ranks, tmp_path, lines, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ranks.load("global_step3") == [None, None]
    assert "pass '.' and tag='global_step3'" in lines[-1][1]
    monkeypatch.chdir(tmp_path / "global_step3")
    assert ranks.load(".") == [None, None]
    assert f"pass '{tmp_path}' and tag='global_step3'" in lines[-1][1]


def test_one_process_needs_no_communication(make_training, tmp_path):
    training = make_training(world_size=1)
    checkpointer = Checkpointer()
    checkpointer.save(tmp_path, 5, model_state=training.model_state(), shard_state=training.shard_state(0))
    assert checkpointer.load(str(tmp_path)).tag == "5"


def test_loaded_weights_may_outlive_the_next_save_of_the_same_tag(saved, ranks, make_training, tmp_path):
    found = ranks.load(tmp_path)[0]
    ranks.save(make_training(seed=9), tmp_path, "global_step3")
    torch.testing.assert_close(found.model_state["module"], saved.model_state()["module"], rtol=0, atol=0)


def test_a_universal_checkpoint_without_its_model_file(ranks, tmp_path):
    (tmp_path / "global_step3_universal" / "zero").mkdir(parents=True)
    expect(ranks.load(tmp_path, "global_step3_universal"), "mp_rank_00_model_states.pt is missing")


def save_tag(directory, tag):
    state = {"module": {"w": torch.ones(3)}, "dp_world_size": 1, "mp_world_size": 1}
    Checkpointer().save(directory, tag, model_state=state, shard_state=None)


def test_a_former_version_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch, lines):
    def refuse(path):
        raise PermissionError(errno.EACCES, "not yours", str(path))

    for tag in "ab":
        save_tag(tmp_path, tag)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        save_tag(tmp_path, "a")
    assert (tmp_path / "latest").read_text() == "a"
    assert (tmp_path / ".a.former").is_dir()
    assert "cannot remove what a save left of" in lines[-1][1]
    save_tag(tmp_path, "b")
    assert not layout.unfinished_in(tmp_path)


def test_a_disk_that_cannot_make_a_new_version_durable_is_an_error(tmp_path, monkeypatch):
    def sync_folder(folder):
        if folder == tmp_path:
            raise OSError(errno.EIO, "no disk")

    save_tag(tmp_path, "a")
    monkeypatch.setattr("deepspeed.checkpoint.store.sync_folder", sync_folder)
    with pytest.raises(CheckpointError, match=r"a is saved, but the disk could not make its name durable: no disk"):
        save_tag(tmp_path, "a")


@pytest.mark.parametrize("is_relative", [False, True])
def test_the_names_of_folders_that_a_save_makes_are_durable(tmp_path, monkeypatch, is_relative):
    monkeypatch.chdir(tmp_path)
    root, synced = Path() if is_relative else tmp_path, []
    monkeypatch.setattr("deepspeed.checkpoint.durable.sync_folder", synced.append)
    save_tag(root / "runs" / "first", "a")
    save_state_dict_file({"w": torch.ones(3)}, root / "exports" / "weights.bin")
    assert synced == [root / "runs", root, root]
    save_tag(root / "runs" / "first", "b")
    assert len(synced) == 3
