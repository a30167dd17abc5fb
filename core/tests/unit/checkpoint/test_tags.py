"""Tags, `latest`, and the check that ranks share one tag."""

import logging

import pytest
from deepspeed.checkpoint import Checkpointer
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint, main
from deepspeed.checkpoint.tags import check_new_tag, check_tag, read_latest, validate_tag, write_latest
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import logger


@pytest.mark.parametrize(
    "tag", ["", ".", "..", ".hidden", "a/b", "a\\b", "latest", "zero_to_fp32.py", "a\nb", "a\0", "x" * 256]
)
def test_a_tag_must_be_a_plain_name(tag):
    with pytest.raises(ConfigError, match="tag: "):
        check_tag(tag)


@pytest.mark.parametrize(
    "tag", ["", "a/b", "..", "a ", " a", "a\t", "a\r", "a\x1b[2J", "a\udcff", "a\u2028b", "x" * 201, "é" * 101]
)
def test_a_new_tag_must_be_easy_to_load(tag):
    with pytest.raises(ConfigError, match="tag: "):
        check_new_tag(tag)


@pytest.mark.parametrize("tag", ["a b", "épreuve-7", "日本", "x" * 200, "-rf", "a.staging"])
def test_other_tags_are_saved_and_found(tag, make_training, tmp_path):
    training = make_training(world_size=1)
    Checkpointer().save(tmp_path, tag, model_state=training.model_state(), shard_state=training.shard_state(0))
    assert Checkpointer().load(tmp_path).tag == tag
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["old ", " old"])
def test_a_checkpoint_of_an_earlier_version_with_a_space_at_its_end_loads(tag, make_training, tmp_path):
    training = make_training(world_size=1)
    Checkpointer().save(tmp_path, "new", model_state=training.model_state(), shard_state=training.shard_state(0))
    (tmp_path / "new").rename(tmp_path / tag)
    (tmp_path / "latest").write_text(tag)
    assert Checkpointer().load(tmp_path).tag == tag
    assert Checkpointer().load(tmp_path, tag).tag == tag
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["new\n", "new \r\n", " new\n\n", "new\t"])
def test_white_space_around_latest_is_an_editors(content, make_training, tmp_path):
    training = make_training(world_size=1)
    Checkpointer().save(tmp_path, "new", model_state=training.model_state(), shard_state=training.shard_state(0))
    (tmp_path / "latest").write_text(content)
    assert Checkpointer().load(tmp_path).tag == "new"
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "\n", "..", "../elsewhere", "a\nb", "/etc"])
def test_zero_to_fp32_refuses_a_foreign_latest(content, tmp_path):
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError, match="which is no tag"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["out.bin", "out.pt", "out.safetensors", "out"])
def test_zero_to_fp32_says_that_its_output_is_a_folder_where_the_name_is_of_a_file(name, tmp_path, caplog):
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):  # there is no checkpoint
        main([str(tmp_path), str(tmp_path / name)])
    assert (f"{name} is a folder, in which the files of weights are written" in caplog.text) is (name != "out")


def test_numbers_are_tags():
    assert check_tag(100) == "100"


def test_latest_round_trip(tmp_path):
    assert read_latest(tmp_path) is None
    assert read_latest(tmp_path / "absent") is None
    write_latest(tmp_path, "global_step1")
    write_latest(tmp_path, "global_step2")
    assert read_latest(tmp_path) == "global_step2"
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_latest_from_an_editor_may_end_with_a_newline(tmp_path):
    (tmp_path / "latest").write_text("global_step3\n")
    assert read_latest(tmp_path) == "global_step3"


@pytest.mark.parametrize("content", [b"", b"../../etc", b"\xff\xfe", b"a\nb"])
def test_a_foreign_latest_is_refused(tmp_path, content):
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(tmp_path)


def test_a_load_that_finds_no_latest_says_what_is_there_instead(make_training, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.chdir(tmp_path)
    training = make_training(world_size=1)
    Checkpointer().save("saved", "new", model_state=training.model_state(), shard_state=training.shard_state(0))
    (tmp_path / "empty").mkdir()
    said = {
        "absent": f"The folder {tmp_path / 'absent'} does not exist.",
        "saved/latest": "saved/latest is no folder; give the one that save_checkpoint was given.",
        "saved/new": "This is the folder of one tag: pass 'saved' and tag='new'.",
        "empty": "Pass a tag if there is a checkpoint without that file.",
    }
    for folder, reason in said.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert Checkpointer().load(folder) is None
        (message,) = set(caplog.messages)
        assert message.startswith("no checkpoint was loaded, everything is as it was: there is no file ")
        assert message.endswith(f"latest. {reason}")


def test_tag_validation(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    differ, agree = (lambda tag: [tag, "other"]), (lambda tag: [tag, tag])
    assert validate_tag(7, "fail", agree) == "7"
    with pytest.raises(CheckpointError, match="rank 0: '7', rank 1: 'other'"):
        validate_tag(7, "Fail", differ)
    with caplog.at_level(logging.WARNING):
        assert validate_tag("a", "WARN", differ) == "a"
    assert "rank 1: 'other'" in caplog.text
    with pytest.raises(ConfigError, match="tag_validation: found 'maybe'"):
        validate_tag("a", "maybe", agree)


def test_ignore_does_not_communicate():
    assert validate_tag("a", "Ignore", lambda tag: pytest.fail("it did")) == "a"
