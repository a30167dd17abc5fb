"""Tags, `latest`, and the check that ranks share one tag."""

import logging

import pytest
from deepspeed.checkpoint.tags import check_tag, read_latest, validate_tag, write_latest
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import logger


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "a\\b", "latest", "zero_to_fp32.py", "a\nb", "a\0"])
def test_a_tag_must_be_a_plain_name(tag):
    with pytest.raises(ConfigError, match="tag: "):
        check_tag(tag)


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


@pytest.mark.parametrize("content", [b"", b"../../etc", b"\xff\xfe"])
def test_a_foreign_latest_is_refused(tmp_path, content):
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(tmp_path)


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
