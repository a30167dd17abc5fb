"""File names."""

from deepspeed.checkpoint import layout


def test_names():
    assert layout.model_file(0) == "mp_rank_00_model_states.pt"
    assert layout.model_file(3, dp_rank=12) == "zero_pp_rank_12_mp_rank_03_model_states.pt"
    assert layout.shard_file(1, 0) == "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert layout.shard_file(1, 0, "bf16_") == "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_shards_are_found_with_and_without_prefix(tmp_path):
    for name in (layout.shard_file(10, 0), layout.shard_file(2, 1, "bf16_"), layout.model_file(0, 1), "other.pt"):
        (tmp_path / name).touch()
    assert list(layout.shards_in(tmp_path)) == [(2, 1), (10, 0)]


def test_the_whole_version_is_found_under_either_name(tmp_path):
    folder = tmp_path / "global_step1"
    assert layout.whole_folder(folder) is None
    layout.former_folder(folder).mkdir()
    assert layout.whole_folder(folder) == tmp_path / ".global_step1.former"
    folder.mkdir()
    assert layout.whole_folder(folder) == folder


def test_tags_hides_what_is_unfinished_or_foreign(tmp_path):
    for name in ("global_step1", ".global_step2.staging", ".global_step3.former", "logs"):
        (tmp_path / name).mkdir()
        if name != "logs":
            (tmp_path / name / layout.model_file(0)).touch()
    (tmp_path / "latest").touch()
    assert layout.tags_in(tmp_path) == ["global_step1", "global_step3"]
    (tmp_path / "global_step1").rename(tmp_path / "global_step10")
    assert layout.tags_in(tmp_path) == ["global_step3", "global_step10"], "by number"
    assert layout.tags_in(tmp_path / "absent") == []
    assert not list(tmp_path.glob("global_step2*")), "libraries look for checkpoints with this pattern"
